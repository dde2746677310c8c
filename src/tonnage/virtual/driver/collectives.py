"""Tracks known values through collectives: in a group of one, the outputs are the inputs.

The results of larger groups are unknown, because the other ranks' inputs are.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tonnage.virtual.driver.following import Keywords, Run

if TYPE_CHECKING:
    from tonnage.virtual.driver.values import DriverValues

# Operators of torch's `c10d` that write their first argument from their second; all others work in place.
COLLECTIVES = (
    "allgather_ _allgather_base_ allgather_into_tensor_coalesced_ allgather_coalesced_ reduce_scatter_ _reduce_scatter_base_ "
    "reduce_scatter_tensor_coalesced_ gather_ scatter_ alltoall_ alltoall_base_"
).split()


class Collectives:
    """Tracks the collectives of one card."""

    def __init__(self, values: "DriverValues", torch: Any) -> None:
        self._values = values
        self._torch = torch

    def follow(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        """Run the collective and record what is known of its results."""
        written, read = (list(self._flat(argument)) for argument in arguments[:2])
        result = call()
        group = self._torch.distributed.ProcessGroup.unbox(arguments[2])
        for to, source in zip(written, read, strict=False):
            if group.size() == 1 and self._values.is_known(source):
                self._values.put(to, self._values.host_view(source))
            else:
                self._values.forget(to)
        return result

    def _flat(self, argument: Any) -> Iterator[Any]:
        if isinstance(argument, self._torch.Tensor):
            yield argument
        else:
            for part in argument:
                yield from self._flat(part)
