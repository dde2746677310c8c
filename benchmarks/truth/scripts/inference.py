"""Image models without gradients, and sampling from a language model."""

import argparse

import torch

p = argparse.ArgumentParser()
p.add_argument("--model", default="resnet50")
p.add_argument("--batch", type=int, default=64)
p.add_argument("--half", action="store_true")
p.add_argument("--beams", type=int, default=1)
args = p.parse_args()

if args.model == "gpt2":
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2"), dtype=torch.float16 if args.half else None).cuda().eval()
    ids = torch.randint(0, 50000, (args.batch, 256), device="cuda")
    extra = dict(num_beams=args.beams) if args.beams > 1 else dict(do_sample=True, top_k=50, top_p=0.95, temperature=0.8)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, min_new_tokens=48, pad_token_id=0, **extra)
    print(out.shape)
else:
    import timm

    model = timm.create_model(args.model, pretrained=False).cuda().eval()
    if args.half:
        model = model.half().to(memory_format=torch.channels_last)
    with torch.inference_mode():
        for _ in range(3):
            x = torch.randn(args.batch, 3, 224, 224).cuda()
            if args.half:
                x = x.half().to(memory_format=torch.channels_last)
            print(model(x).argmax(1).cpu()[:3].shape)
