"""Expert parallelism: each rank holds some of the experts of a Mixtral, and tokens travel to theirs and back."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F


class SpreadExperts(nn.Module):
    """This rank's experts; takes what transformers' own module takes."""

    def __init__(self, plain: Any, mesh: DeviceMesh) -> None:
        super().__init__()
        self.copies, self._group, self._ep = mesh["copies"], mesh["ep"].get_group(), mesh["ep"].size()
        self.experts, self.act_fn = plain.num_experts, plain.act_fn
        own = self.experts // self._ep
        self.gate_up_proj = nn.Parameter(plain.gate_up_proj.new_empty(own, *plain.gate_up_proj.shape[1:]))
        self.down_proj = nn.Parameter(plain.down_proj.new_empty(own, *plain.down_proj.shape[1:]))

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Send every token to its experts, and add up what they answer."""
        order = chosen.flatten().argsort()
        counts = torch.bincount(chosen.flatten(), minlength=self.experts)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self._group)
        sent = counts.view(self._ep, -1).sum(1).tolist()
        got = arriving.view(self._ep, -1).sum(1).tolist()
        received = all_to_all_single_autograd(hidden[order // chosen.shape[1]], got, sent, self._group)
        answers = all_to_all_single_autograd(self._answers(received, arriving), sent, got, self._group)
        by_token = answers[order.argsort()].view(*chosen.shape, -1)
        return (by_token * weights.unsqueeze(-1).to(hidden.dtype)).sum(1)

    def _answers(self, received: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        """Of this rank's experts, each on its own tokens, which came rank by rank."""
        owners = torch.arange(len(arriving), device=arriving.device) % len(self.down_proj)
        order = owners.repeat_interleave(arriving, output_size=len(received)).argsort()
        ends = arriving.view(self._ep, -1).sum(0).cumsum(0).int()
        gate, up = F.grouped_mm(received[order], self.gate_up_proj.mT, offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(self.act_fn(gate) * up, self.down_proj.mT, offs=ends)[order.argsort()]


def spread_experts(model: Any, mesh: DeviceMesh, ep: int) -> None:
    """In place; the groups of ranks are the same for all blocks."""
    groups = mesh._unflatten(0, (mesh.size() // ep, ep), ("copies", "ep"))
    for block in model.model.layers:
        block.mlp.experts = SpreadExperts(block.mlp.experts, groups)
