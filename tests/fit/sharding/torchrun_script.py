"""A script as people write it: torchrun --nproc-per-node 2 torchrun_script.py FOLDER."""

import atexit
import json
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import tonnage

# The first to be registered is the last to run: what is alive then dies with the interpreter, in whatever it does.
# In one write: both ranks share the output.
atexit.register(lambda: os.write(1, f"at the end: {[thread.name for thread in threading.enumerate()]}\n".encode()))
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rows = torch.randn(10, 8, generator=torch.Generator().manual_seed(0))
loader = [{"x": part, "labels": (part.sum(1) > 0).long()} for part in rows.split(2)][rank::ranks]

fitted = tonnage.fit(
    model,
    optimizer,
    loss=lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["labels"]),
    sample=loader[0],
    mesh=init_device_mesh("cpu", (ranks,)),
)
losses = []
with fitted.joined():
    for batch in loader:
        losses.append(float(fitted.step(batch)))
answer = {"losses": losses, "class": type(model).__name__, "techniques": [one.name for one in fitted.techniques]}
(Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(answer))
dist.destroy_process_group()
