"""One rank of a virtual cluster, as its groups use it: the connection to its peers, its card, and handles of its work.

Nothing runs on a virtual GPU, so work is always complete; only host messages are waited for.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tonnage.budget.training.overheads import NCCL_CONNECTION_BYTES, NCCL_CONNECTIONS
from tonnage.script import profiler
from tonnage.virtual.cluster.exchange import Payload, ProcessGroup
from tonnage.virtual.recorded import RecordedDevice
from tonnage.virtual.session import Session

if TYPE_CHECKING:
    from tonnage.virtual.cluster.exchange import Exchange

Tensors = Sequence[torch.Tensor]
_MOST_ON_CARD = 1 << 20  # elements: the virtual GPU keeps no larger integer tensors
_MOST_ON_HOST_BYTES = 1 << 24
_HOST_S_PER_REQUEST = 20e-6  # host time of an eager operator; an assumption (tens of microseconds are typical)


class Member:
    """State that all groups of a rank share."""

    def __init__(self, rank: int, world: int, session: Session, exchange: "Exchange") -> None:
        self.rank, self.world, self.exchange = rank, world, exchange
        self._session, self.device = session, session.device
        self._copies: Counter[tuple[int, ...]] = Counter()
        self.groups = 0  # that the rank is in
        self.communicators: list[ProcessGroup] = []
        self.calls = 0
        self.copies_back = CopiesBack(session.device)
        self._noted = 0  # collectives
        self._lanes: dict[tuple[ProcessGroup, tuple[int, ...]], int] = {}

    def group_made(self, ranks: Sequence[int], backend: str) -> ProcessGroup | None:
        """Register a group; return None if this rank is not in it."""
        key = tuple(ranks)
        self.exchange.send("made", key)
        copy, self._copies[key] = self._copies[key], self._copies[key] + 1
        if self.rank not in key:
            return None
        self.groups += 1
        return ProcessGroup(key, copy, self.groups - 1, backend)

    def line(self) -> str:
        return self.device.attribution.line()

    def uses_card(self, group: ProcessGroup) -> int:
        """Count a call on the card and return the current stream's id. A group's first call creates its communicator."""
        self.calls += 1
        if group not in self.communicators:
            self.communicators.append(group)
            # What NCCL holds outside the allocator by communicator, as the planner models it; Gloo holds nothing.
            used = [each for each in self.communicators if len(each.ranks) > 1 and not is_gloo(each.backend)]
            each_bytes = NCCL_CONNECTION_BYTES * NCCL_CONNECTIONS
            self.device.hold({f"NCCL communicator {number}": each_bytes for number, _ in enumerate(used, 1)})
        return torch.cuda.current_stream().stream_id

    def note(self, group: ProcessGroup, operation: str, card_bytes: int, among: tuple[int, ...] | None = None) -> int:
        """Note a collective of `card_bytes` among these ranks (default: the whole group); return its number.

        That is 0 for host tensors, which are not noted. Step capture reads what was called, and when it is waited for. As
        in NCCL, a group's collectives run on one stream, and its messages with each peer on another.
        """
        if not card_bytes:
            return 0
        ranks = among or group.ranks
        apart = -(-(ranks[-1] - ranks[0]) // (len(ranks) - 1)) if len(ranks) > 1 else 1
        self._noted += 1
        lane = self._lanes.setdefault((group, among or ()), len(self._lanes) + 1)
        profiler.note("collective", operation, self._noted, card_bytes, len(ranks), apart, lane)
        return self._noted

    def travels(self, tensors: Tensors) -> bool:
        """Whether the values of such tensors are exchanged. The answer is the same on all ranks."""
        for tensor in tensors:
            if tensor.is_cuda:
                if tensor.numel() > _MOST_ON_CARD or tensor.is_floating_point() or tensor.is_complex():
                    return False
            elif tensor.device.type != "cpu" or tensor.numel() * tensor.element_size() > _MOST_ON_HOST_BYTES:
                return False
        return True

    def values_of(self, tensors: Tensors) -> Payload:
        """Return copies on the host, or None if a value is unknown."""
        if any(tensor.is_cuda and not self._session.is_known(tensor) for tensor in tensors):
            return None
        return [tensor.detach().to("cpu", copy=True).contiguous() for tensor in tensors]

    def forget(self, tensors: Tensors) -> None:
        """Mark the values on the card as unknown."""
        for tensor in tensors:
            if tensor.is_cuda:
                self._session.forget(tensor)


# Backends: the temporary tensors that one takes from the caching allocator, on the calling stream. NCCL reduces and
# gathers in place; only the list variants go through a flat copy. Gloo moves tensors through host memory, gathers into
# a flat tensor and reduces a copy of what it scatters.


def is_gloo(backend: str) -> bool:
    """Whether CUDA tensors go through Gloo, not NCCL, also for names like "cpu:gloo,cuda:nccl"."""
    pairs = dict(part.split(":", 1) for part in backend.split(",") if ":" in part)
    return pairs.get("cuda", backend) == "gloo"


def flat_tensor(tensors: Tensors) -> torch.Tensor | None:
    """Return a flat tensor for a list of equal tensors; None for unequal ones, which are sent one by one."""
    first = tensors[0]
    if any((tensor.shape, tensor.dtype) != (first.shape, first.dtype) for tensor in tensors):
        return None
    return torch.empty((len(tensors), *first.shape), dtype=first.dtype, device=first.device)


# Gloo's copies from the host back to the card, each on its own stream and queued when `wait` returns. A tensor freed
# while such a copy may still run is not reused before the copy is done. Nothing runs here, so the duration is estimated
# as a number of further allocation requests: the bytes at PCIe speed, divided by the host's time per request. A later
# collective that returned over the slower network implies that all earlier copies are done.


class CopiesBack:
    """A rank's copies that were queued and may still run."""

    def __init__(self, device: RecordedDevice) -> None:
        self._device = device
        self._bytes_per_request = device.gpu.pcie_bytes_per_s * _HOST_S_PER_REQUEST
        self._begun = 0
        # By number of the collective: the handle of its copy, and the number of allocations by which it is done.
        self._queued: dict[int, tuple[Any, int]] = {}

    def begin(self, tensors: Tensors) -> Callable[[], None]:
        """Announce copies to these tensors; call the result when the collective has been waited for."""
        blocks = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        self._begun += 1
        number, handle = self._begun, self._device.begin_copy(tensors)
        requests = round(sum(blocks.values()) / self._bytes_per_request)

        def queue() -> None:
            """Start the copy; those of earlier collectives are now done."""
            self._end([each for each in self._queued if each < number])
            self._queued[number] = handle, len(self._device.allocations) + requests
            self._device.on_request = self._end_the_done

        return queue

    def _end_the_done(self) -> None:
        self._end([each for each, (_, done_at) in self._queued.items() if done_at <= len(self._device.allocations)])
        if not self._queued:
            self._device.on_request = None

    def _end(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._device.end_copy(self._queued.pop(number)[0])


class DoneWork(dist.Work):
    """The handle of a collective. `kept` holds the tensors that the real handle would keep until it is waited for.

    The first wait calls `finish`, which receives what other ranks contributed, and then `waited`.
    """

    def __init__(
        self,
        outputs: Tensors,
        kept: Any = None,
        finish: Callable[[], object] | None = None,
        waited: Callable[[], object] | None = None,
        noted: int = 0,
    ) -> None:
        super().__init__()
        self._outputs, self._kept, self._noted = list(outputs), kept, noted
        self._to_do = [call for call in (finish, waited) if call is not None]

    def wait(self, timeout: Any = None) -> bool:
        """Finish the collective and release the tensors it held."""
        if self._noted:
            profiler.note("stream", "wait_collective", self._noted)
        return self.is_completed()

    def is_completed(self) -> bool:
        """Finish and return True: no time passes between two calls."""
        calls, self._to_do = self._to_do, []
        for call in calls:
            call()
        self._kept = None
        return True

    def get_future(self) -> "torch.futures.Future[Any]":
        """Return a completed future. Callers such as DDP's reducer wait for it when the backward pass is over."""
        if self._noted:
            profiler.note("stream", "future_collective", self._noted)
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.result())
        return future

    def result(self) -> list[torch.Tensor]:
        self.is_completed()
        return self._outputs

    def is_success(self) -> bool:
        """Return True: errors are raised instead."""
        return True

    def exception(self) -> None:
        """Return None: errors are raised instead."""

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def source_rank(self) -> int:
        """Return -1: `recv_anysource` is not supported."""
        return -1
