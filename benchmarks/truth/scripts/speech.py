"""Speech recognition: spectrograms, strided convolutions, a transformer encoder, CTC; or wav2vec2 from transformers."""
import argparse

import torch
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--kind", choices=["ctc", "wav2vec2", "hubert"], default="ctc")
p.add_argument("--batch", type=int, default=8)
p.add_argument("--seconds", type=int, default=5)
p.add_argument("--amp", action="store_true")
args = p.parse_args()


class Recognizer(nn.Module):
    def __init__(self, d=384):
        super().__init__()
        self.register_buffer("window", torch.hann_window(400))
        self.front = nn.Sequential(nn.Conv1d(201, d, 5, 2, 2), nn.BatchNorm1d(d), nn.ReLU(), nn.Conv1d(d, d, 5, 2, 2), nn.ReLU())
        layer = nn.TransformerEncoderLayer(d, 6, 4 * d, 0.1, "gelu", batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 6), nn.Linear(d, 64)

    def forward(self, wave):
        power = torch.stft(wave, 400, 160, window=self.window, return_complex=True).abs().square()
        x = self.front(torch.log1p(power)).transpose(1, 2)
        return self.head(self.body(x)).log_softmax(-1).transpose(0, 1)


if args.kind == "ctc":
    model = Recognizer()
else:
    from transformers import AutoConfig, AutoModelForCTC

    model = AutoModelForCTC.from_config(AutoConfig.for_model(args.kind, num_hidden_layers=6, ctc_loss_reduction="mean",
                                                             mask_time_prob=0.0, apply_spec_augment=False))
model.cuda().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(3):
    wave = torch.randn(args.batch, 16000 * args.seconds, device="cuda")
    labels = torch.randint(1, 30, (args.batch, 20), device="cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=args.amp):
        if args.kind == "ctc":
            scores = model(wave)
            lengths = torch.full((args.batch,), scores.shape[0], device="cuda")
            loss = nn.functional.ctc_loss(scores.float(), labels, lengths, torch.full((args.batch,), 20, device="cuda"))
        else:
            loss = model(wave, labels=labels).loss
    loss.backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
