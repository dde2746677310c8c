"""Train a small GPT in pipeline stages, one a rank, in plain PyTorch. Nothing here knows of Tonnage.

torchrun --nproc-per-node 8 examples/train_pipeline.py
tonnage run --gpus 8xh200 examples/train_pipeline.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from train_gpt import Block

VOCABULARY, TOKENS, DIM, HEADS, LAYERS = 50304, 1024, 1024, 16, 16
BATCH, MICRO_BATCHES, STEPS = 32, 16, 2


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.position = nn.Embedding(TOKENS, DIM)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))


def layers_of(rank: int, ranks: int) -> nn.Sequential:
    """This stage's share of the layers; the first stage has the embedding too, the last one the head."""
    first = [Embedding()] if rank == 0 else []
    last = [nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)] if rank == ranks - 1 else []
    return nn.Sequential(*first, *(Block(DIM, HEADS) for _ in range(LAYERS // ranks)), *last)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = layers_of(rank, ranks).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    schedule = Schedule1F1B(PipelineStage(model, rank, ranks, torch.device("cuda")), MICRO_BATCHES, loss_fn=loss_of)
    for _ in range(STEPS):
        text = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), device="cuda")
        if rank == 0:
            schedule.step(text[:, :-1])
        else:
            schedule.step(target=text[:, 1:] if rank == ranks - 1 else None)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
