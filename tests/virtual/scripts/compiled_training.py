"""Compiles a model, a function with a graph break and an optimizer's step; prints what was captured."""

import os

import torch
from torch import nn

wanted_folder = os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/nowhere/inductor"


@torch.compiler.disable
def left_alone(x):
    return x + 1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


model = nn.Sequential(Block(), Block()).cuda()
model[0].norm.register_forward_hook(lambda module, arguments, output: output * 2)
optimizer = torch.optim.AdamW(model.parameters())
compiled = torch.compile(model, fullgraph=True)
step = torch.compile(lambda: optimizer.step())
for _ in range(3):
    compiled(torch.randn(64, 256, device="cuda")).square().mean().backward()
    step()
    optimizer.zero_grad()


def report():
    from torch._dynamo.utils import counters
    from torch._inductor.codecache import PyCodeCache

    from tonnage.virtual.compiling import source_of
    from tonnage.virtual.session import active

    print("graphs", counters["stats"]["unique_graphs"])
    before = sum(counters["graph_break"].values())
    torch.compile(lambda x: left_alone(x.sin()).cos())(torch.ones(8, device="cuda"))
    print("breaks at what is left alone", sum(counters["graph_break"].values()) - before)
    print("in the folder of the script", any(path.startswith(wanted_folder) for path in PyCodeCache.linemaps))
    known = set()
    for path in PyCodeCache.linemaps:
        with open(path) as code:
            for number, line in enumerate(code, 1):
                if "= empty_strided_cuda(" in line and (found := source_of(path, number)):
                    known.add(found)
    print("known", sorted(known))
    who = active().device.attribution
    print("step", who.step, "at", who.phase)


report()
