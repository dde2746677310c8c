"""The same encoder under the wrappers of torch: DataParallel, DDP (one process), FSDP2, or none."""

import argparse
import os
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

ap = argparse.ArgumentParser()
ap.add_argument("--wrap", default="dp", choices=["none", "dp", "ddp", "fsdp2"])
ap.add_argument("--backend", default="nccl")
ap.add_argument("--bucket-view", action="store_true")
ap.add_argument("--static-graph", action="store_true")
ap.add_argument("--batch", type=int, default=64)
ap.add_argument("--seq", type=int, default=512)
ap.add_argument("--d", type=int, default=1024)
ap.add_argument("--layers", type=int, default=12)
ap.add_argument("--eval", action="store_true")
a = ap.parse_args()
torch.manual_seed(0)

if a.wrap in ("ddp", "fsdp2"):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(29500 + os.getpid() % 1000))
    dist.init_process_group(a.backend, rank=0, world_size=1)
    torch.cuda.set_device(0)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(30000, a.d, padding_idx=0)
        self.pos = nn.Parameter(torch.zeros(a.seq, a.d))
        self.enc = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(a.d, 16, 4 * a.d, activation="gelu", batch_first=True, norm_first=False),
            a.layers,
        )
        self.out = nn.Linear(a.d, 50)

    def forward(self, ids):
        h = self.enc(self.emb(ids) + self.pos[: ids.shape[1]], src_key_padding_mask=ids == 0)
        return self.out(h)


net = Tagger().cuda()
if a.wrap == "dp":
    net = DataParallel(net)
elif a.wrap == "ddp":
    net = DistributedDataParallel(
        net, device_ids=[0], gradient_as_bucket_view=a.bucket_view, static_graph=a.static_graph
    )
elif a.wrap == "fsdp2":
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in net.enc.layers:
        fully_shard(layer, mp_policy=mp)
    fully_shard(net, mp_policy=mp)
opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
lengths = torch.randint(a.seq // 3, a.seq, (6, a.batch))
for step in range(4):
    T = int(lengths[step].max())
    ids = torch.randint(1, 30000, (a.batch, T))
    ids[torch.arange(T)[None] >= lengths[step][:, None]] = 0
    ids = ids.cuda()
    tags = ids % 50
    with torch.autocast("cuda", torch.bfloat16, enabled=a.wrap != "fsdp2"):
        logits = net(ids)
    keep = ids != 0
    loss = nn.functional.cross_entropy(logits[keep].float(), tags[keep])
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(step, T, loss.item())
if a.eval:
    net.eval()
    with torch.no_grad():  # the fast path of the encoder (nested tensors) when there is padding
        T = int(lengths[4].max())
        ids = torch.randint(1, 30000, (a.batch, T))
        ids[torch.arange(T)[None] >= lengths[4][:, None]] = 0
        print(net(ids.cuda()).argmax(-1).float().mean().item())
if dist.is_initialized():
    dist.destroy_process_group()
