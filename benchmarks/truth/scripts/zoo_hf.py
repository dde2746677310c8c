"""Other Hugging Face models, built from their configurations: vision, audio, text and image."""

import argparse

import torch
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification, AutoModelForSpeechSeq2Seq, AutoModelForCTC

p = argparse.ArgumentParser()
p.add_argument("--model", default="vit", choices=["vit", "swin", "clip", "whisper", "wav2vec2", "dinov2", "albert", "convnextv2"])
p.add_argument("--batch", type=int, default=16)
p.add_argument("--amp", action="store_true")
args = p.parse_args()

images = torch.randn(args.batch, 3, 224, 224)
if args.model in ("vit", "swin", "dinov2", "convnextv2"):
    model = AutoModelForImageClassification.from_config(AutoConfig.for_model(args.model, num_labels=1000))
    inputs = dict(pixel_values=images, labels=torch.randint(0, 1000, (args.batch,)))
elif args.model == "clip":
    model = AutoModel.from_config(AutoConfig.for_model("clip"))
    inputs = dict(pixel_values=images, input_ids=torch.randint(0, 40000, (args.batch, 77)), return_loss=True)
elif args.model == "whisper":
    model = AutoModelForSpeechSeq2Seq.from_config(AutoConfig.for_model("whisper"))
    inputs = dict(input_features=torch.randn(args.batch, 80, 3000), labels=torch.randint(0, 50000, (args.batch, 64)))
elif args.model == "wav2vec2":
    model = AutoModelForCTC.from_config(AutoConfig.for_model("wav2vec2", ctc_loss_reduction="mean", mask_time_prob=0.0))
    inputs = dict(input_values=torch.randn(args.batch, 64000), labels=torch.randint(1, 31, (args.batch, 40)))
else:
    model = AutoModel.from_config(AutoConfig.for_model("albert"))
    inputs = dict(input_ids=torch.randint(0, 30000, (args.batch, 128)))
model = model.cuda().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(3):
    batch = {k: v.cuda() if torch.is_tensor(v) else v for k, v in inputs.items()}
    with torch.autocast("cuda", torch.bfloat16, enabled=args.amp):
        out = model(**batch)
        loss = out.loss if getattr(out, "loss", None) is not None else out.last_hidden_state.float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
