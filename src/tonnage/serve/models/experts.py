"""A mixture of experts: each token goes to a few of many small MLPs, whose outputs are summed by router weight.

Tokens are sorted by expert, so that one grouped product computes them all. It finds the group bounds on the device,
so nothing waits for the host and a captured graph stays valid whatever the tokens choose. Without such a kernel
(CPU, FP32, GPUs before Hopper) experts run in turn, and the host reads the bounds.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import linear

Activate = Callable[[Tensor], Tensor]


class ExpertStack:
    """One matrix per expert, weight [experts, n, k]; with scales [experts, n] if stored in eight bits."""

    __slots__ = ("grouped", "scales", "weight")

    def __init__(self, weight: Tensor, scales: Tensor | None, dtype: torch.dtype) -> None:
        self.weight, self.scales = weight, scales
        # The grouped product takes BF16 on Hopper and later, with matrix rows aligned to 16 bytes.
        aligned = dtype == torch.bfloat16 and not weight.shape[-1] % 8 and not weight.shape[-2] % 8
        cuda = weight.device.type == "cuda"
        self.grouped = cuda and aligned and torch.cuda.get_device_capability(weight.device)[0] in (9, 10)

    def __call__(self, rows: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        """Multiply rows sorted by expert [r]; those of expert e end before `ends[e]`."""
        if self.grouped:
            out = torch._grouped_mm(rows, self.weight.to(rows.dtype).transpose(1, 2), offs=ends)
        else:
            out, start = rows.new_empty(rows.shape[0], self.weight.shape[1]), 0
            for expert, end in enumerate(ends.tolist()):
                if end > start:
                    out[start:end] = linear(rows[start:end], self.weight[expert].to(rows.dtype))
                start = end
        return out if self.scales is None else (out * self.scales[experts]).to(rows.dtype)


@dataclass(slots=True, eq=False)
class Experts:
    """The router and the experts of one layer."""

    router: Tensor
    gate_up: ExpertStack
    down: ExpertStack
    activate: Activate
    per_token: int
    normalised: bool
    numbers: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = torch.arange(self.router.shape[0], device=self.router.device)

    @property
    def capturable(self) -> bool:
        """Whether it runs without the host reading anything."""
        return self.gate_up.grouped and self.down.grouped

    def __call__(self, hidden: Tensor) -> Tensor:
        probabilities = linear(hidden, self.router).softmax(dim=-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.per_token, dim=-1)
        if self.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights.to(hidden.dtype)
        experts, order = chosen.view(-1).sort(stable=True)
        ends = torch.searchsorted(experts, self.numbers, right=True, out_int32=True)
        rows = hidden[order // self.per_token]
        answers = self.down(self.activate(self.gate_up(rows, experts, ends)), experts, ends)
        unsorted = torch.empty_like(answers)
        unsorted[order] = answers
        return torch.bmm(weights[:, None], unsorted.view(*chosen.shape, -1))[:, 0]
