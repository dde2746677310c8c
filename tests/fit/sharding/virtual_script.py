"""Two budgets on two virtual GPUs: tonnage run --gpus 2xh200 virtual_script.py FOLDER."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import tonnage


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(6))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["labels"])


dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh("cuda", (dist.get_world_size(),))
model = Net(2048).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
batch = {"x": torch.randn(2, 2048, device="cuda"), "labels": torch.zeros(2, dtype=torch.int64, device="cuda")}
answers = []
for budget in (4 << 30, 1500 << 20):
    # FP32 throughout: autocast would copy every weight.
    fitted = tonnage.fit(
        model, optimizer, loss=loss, sample=batch, mesh=mesh, budget=budget, host="4 GiB", without=("autocast",)
    )
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    fitted.step(batch)
    answers.append(
        {
            "budget": budget,
            "rehearsed": fitted.measured.peak_reserved_bytes,
            "stepped": torch.cuda.max_memory_reserved(),
            "shard": fitted.techniques[0].settings(),
            "plan": repr(fitted.plan),
        }
    )
    fitted.undo()
(Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(answers))
