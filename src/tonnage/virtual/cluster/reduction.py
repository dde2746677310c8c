"""Reduces the values of all ranks on the host."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch.distributed import ReduceOp


def reduced(parts: Sequence[torch.Tensor], how: Any) -> torch.Tensor:
    """Reduce the parts to one tensor by a ReduceOp."""
    if how == ReduceOp.AVG:
        total = reduce(torch.add, parts)
        return total / len(parts) if total.is_floating_point() else total // len(parts)
    return reduce(_combination(how), parts)


def _combination(how: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    known = {
        ReduceOp.SUM: torch.add,
        ReduceOp.PRODUCT: torch.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.BAND: torch.bitwise_and,
        ReduceOp.BOR: torch.bitwise_or,
        ReduceOp.BXOR: torch.bitwise_xor,
    }
    # A ReduceOp and its kind compare equal but hash differently. A premultiplied sum counts as a sum.
    return next((combine for kind, combine in known.items() if how == kind), torch.add)
