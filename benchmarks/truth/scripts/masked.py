"""Masked autoencoding: random patches are hidden, by a sort, by a boolean mask or by chance."""
import argparse

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--way", default="sort", choices=["sort", "boolean", "where"])
p.add_argument("--hidden", type=float, default=0.75, help="share of the patches that are hidden")
p.add_argument("--batch", type=int, default=64)
p.add_argument("--image", type=int, default=224)
p.add_argument("--dim", type=int, default=768)
p.add_argument("--layers", type=int, default=8)
args = p.parse_args()
PATCHES = (args.image // 16) ** 2


def stack(dim, layers):
    layer = nn.TransformerEncoderLayer(dim, dim // 64, 4 * dim, activation="gelu", dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class MAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Linear(768, args.dim), nn.Parameter(torch.randn(PATCHES, args.dim) * 0.02)
        self.encoder, self.narrow = stack(args.dim, args.layers), nn.Linear(args.dim, 512)
        self.decoder, self.out = stack(512, 4), nn.Linear(512, 768)
        self.missing, self.decoder_place = nn.Parameter(torch.zeros(512)), nn.Parameter(torch.randn(PATCHES, 512) * 0.02)

    def forward(self, images):
        b = len(images)
        patches = images.unfold(2, 16, 16).unfold(3, 16, 16).permute(0, 2, 3, 1, 4, 5).reshape(b, PATCHES, 768)
        x = self.embed(patches) + self.place
        noise = torch.rand(b, PATCHES, device=x.device)
        if args.way == "sort":
            kept = int(PATCHES * (1 - args.hidden))
            order = noise.argsort(1)
            rows = order[:, :kept, None]
            seen = self.narrow(self.encoder(x.gather(1, rows.expand(-1, -1, args.dim))))
            full = torch.cat([seen, self.missing.expand(b, PATCHES - kept, -1)], 1)
            full = full.gather(1, order.argsort(1)[..., None].expand(-1, -1, 512))
            hidden = torch.ones(b, PATCHES, device=x.device).scatter(1, order[:, :kept], 0.0)
            guess = self.out(self.decoder(full + self.decoder_place))
            return ((guess - patches).square().mean(-1) * hidden).sum() / hidden.sum()
        hidden = noise < args.hidden
        x = torch.where(hidden[..., None], self.place.to(x.dtype), x)
        guess = self.out(self.decoder(self.narrow(self.encoder(x)) + self.decoder_place))
        if args.way == "where":
            return ((guess - patches).square().mean(-1) * hidden).sum() / hidden.sum()
        return F.smooth_l1_loss(guess[hidden], patches[hidden])


torch.manual_seed(0)
model = MAE().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-4, betas=(0.9, 0.95))
for step in range(3):
    images = torch.randn(args.batch, 3, args.image, args.image).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(images)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), torch.cuda.max_memory_allocated() // 2**20)
