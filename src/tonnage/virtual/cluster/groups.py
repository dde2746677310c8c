"""Process groups of a virtual cluster: the interface of torch.distributed, with collectives that move no data on the
card.

For tensors on the card, the backend's own allocations are made and the values become unknown. Host tensors, and
integers on the card whose values are known (counts, pickled objects), are really exchanged between the ranks that
run. No time passes; calls on the card are noted for step capture.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tonnage.virtual.cluster.exchange import Collective, Payload, ProcessGroup, SendReceive
from tonnage.virtual.cluster.member import DoneWork, Member, Tensors, flat_tensor, is_gloo


class VirtualGroup(dist.ProcessGroup):
    """One rank's side of a group, for any backend."""

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def __init__(self, member: Member, group: ProcessGroup) -> None:
        place = group.ranks.index(member.rank)
        super().__init__(place, len(group.ranks))  # type: ignore[call-arg]
        self._member, self._group, self._place = member, group, place
        self._is_gloo = is_gloo(group.backend)  # results then reach the card by copies from the host
        self._number = 0
        self._messages: Counter[tuple[int, int]] = Counter()
        self._name, self._desc = "", ""

    # The interface of a group and its backend, which are one object here

    def getRank(self) -> int:
        return self._place

    def getSize(self) -> int:
        return len(self._group.ranks)

    def getBackendName(self) -> str:
        return self._group.backend

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    name = _get_backend_name = getBackendName
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: Any) -> "VirtualGroup":
        return self

    def supports_tensor_alloc(self, *_: Any) -> bool:
        """Return False: registered memory is not modelled, so the caching allocator is used."""
        return False

    _has_hooks = supports_tensor_alloc

    def _end_coalescing(self, device: Any) -> DoneWork:
        return DoneWork([])

    def _get_sequence_number_for_group(self) -> int:
        return self._number

    def shutdown(self, *_: Any, **__: Any) -> None:
        """Do nothing: no work is in flight, missing peers are reported at once, and coalesced calls made one by one."""

    abort = set_timeout = _set_default_timeout = _add_ephemeral_timeout = _start_coalescing = shutdown
    _set_default_backend = _set_sequence_number_for_group = _wait_for_pending_works = shutdown

    # Collectives

    def broadcast(self, tensors: Tensors, opts: Any) -> DoneWork:
        root = opts.rootRank
        sent, manner = tensors if self._place == root else (), f"from rank {self._group.ranks[root]}"
        return self._collective("broadcast", tensors, sent, tensors, lambda parts: parts[root], manner)

    def allreduce(self, tensors: Tensors, opts: Any) -> DoneWork:
        how = opts.reduceOp
        return self._collective("all_reduce", tensors, tensors, tensors, _each(partial(reduced, how=how)), _manner(how))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> DoneWork:
        how, root = opts.reduceOp, opts.rootRank
        manner = f"{_manner(how)} at rank {self._group.ranks[root]}"
        outputs, combine = (tensors, _each(partial(reduced, how=how))) if self._place == root else ((), lambda _: None)
        return self._collective("reduce", tensors, tensors, outputs, combine, manner)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> DoneWork:
        flat = flat_tensor(outputs[0]) if inputs[0].is_cuda else None
        every = [tensor for tensors in outputs for tensor in tensors]
        return self._collective(
            "all_gather", inputs, inputs, every, lambda parts: _nth(parts, 0) * len(outputs), kept=flat
        )

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> DoneWork:
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> DoneWork:
        flats = [torch.empty_like(output) for output in outputs if output.is_cuda and self._is_gloo]
        work = self._collective("all_gather_into_tensor", inputs, inputs, outputs, _each(_joined))
        del flats
        return work

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> DoneWork:
        works = [self.allgather([list_], [source], opts) for list_, source in zip(outputs, inputs, strict=True)]
        every = [tensor for list_ in outputs for tensor in list_]
        return DoneWork(every, finish=lambda: [work.wait() for work in works])

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> DoneWork:
        every = [tensor for tensors in outputs for tensor in tensors]
        manner = f"at rank {self._group.ranks[opts.rootRank]}"
        return self._collective("gather", inputs, inputs, every, lambda parts: _nth(parts[: len(every)], 0), manner)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> DoneWork:
        root, place = opts.rootRank, self._place
        sent, manner = inputs[0] if place == root and inputs else (), f"from rank {self._group.ranks[root]}"
        return self._collective(
            "scatter", outputs, sent, outputs, lambda parts: parts[root] and [parts[root][place]], manner
        )

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> DoneWork:
        flat = flat_tensor(inputs[0]) if outputs[0].is_cuda else None
        return self._scatters("reduce_scatter", outputs, list(inputs), opts.reduceOp, kept=flat)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> DoneWork:
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> DoneWork:
        copies = [source.clone() for source in inputs if source.is_cuda and self._is_gloo]  # that are reduced
        pieces = [source.chunk(len(self._group.ranks)) for source in inputs]
        return self._scatters("reduce_scatter_tensor", outputs, pieces, opts.reduceOp, kept=copies)

    def _scatters(self, operation: str, outputs: Tensors, inputs: Sequence[Tensors], how: Any, kept: Any) -> DoneWork:
        sent = [tensor for tensors in inputs for tensor in tensors]
        own = range(self._place, self._place + len(outputs) * len(self._group.ranks), len(self._group.ranks))
        return self._collective(
            operation, sent, sent, outputs, _each(partial(reduced, how=how), own), _manner(how), kept
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> DoneWork:
        return self._collective("all_to_all", inputs, inputs, outputs, lambda parts: _nth(parts, self._place))

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, into: Sequence[int], of: Sequence[int], opts: Any
    ) -> DoneWork:
        """Send the parts of a tensor, one to each rank; equal parts if no sizes are given."""
        sent = source.split(list(of)) if len(of) else source.chunk(len(self._group.ranks))
        return self._collective("all_to_all_single", [source], sent, [output], _each(_joined, [self._place]))

    def barrier(self, opts: Any = None) -> DoneWork:
        """Wait for all ranks. NCCL does this by an all-reduce of one number on the card."""
        self._member.device.synchronize()
        call = self._call("barrier", ())
        self._member.exchange.send("contribute", call, None)
        kept = None if self._is_gloo else torch.empty(1, device="cuda")
        return DoneWork([], kept, lambda: self._member.exchange.ask("collect", call))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, or raise an error that names a missing one."""
        self.barrier().wait()

    # Names before torch 2.13
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Messages

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> DoneWork:
        message = self._message(tensors[0], self._place, target, is_send=True)
        values = self._member.values_of(tensors) if self._member.travels(tensors) else None
        self._member.exchange.send("tell", message, values)
        return DoneWork(tensors, kept=list(tensors), noted=self._note_message("send", tensors, target))

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> DoneWork:
        message = self._message(tensors[0], source, self._place, is_send=False)
        self._member.exchange.send("tell", message, None)
        noted = self._note_message("recv", tensors, source)
        if not self._member.travels(tensors):
            self._member.forget(tensors)
            return DoneWork(tensors, kept=list(tensors), noted=noted)
        return DoneWork(
            tensors, finish=lambda: _fill(tensors, self._member.exchange.ask("receive", message)), noted=noted
        )

    def _note_message(self, operation: str, tensors: Tensors, peer: int) -> int:
        first, last = sorted((self._member.rank, self._group.ranks[peer]))
        return self._member.note(self._group, operation, _card_bytes(tensors), (first, last))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> DoneWork:
        """Raise NotImplementedError: which rank sends first depends on timing."""
        raise NotImplementedError("A virtual cluster does not know who sends first: name the rank to receive from.")

    # Common to all calls

    def _collective(
        self,
        operation: str,
        shown: Tensors,
        sent: Tensors,
        outputs: Tensors,
        combine: Callable[[list[Payload]], Payload],
        manner: str = "",
        kept: Any = None,
    ) -> DoneWork:
        """Make a call. `combine` gives the outputs' values from all ranks' parts; None where they are unknown."""
        member, call = self._member, self._call(operation, shown, manner)
        travels = member.travels([*shown, *outputs])
        member.exchange.send("contribute", call, member.values_of(sent) if travels and sent else None)
        # Copies of results to the card begin here and finish some time after the work has been waited for.
        on_card = [tensor for tensor in (*outputs, *(kept if isinstance(kept, list) else ())) if tensor.is_cuda]
        queue = member.copies_back.begin(on_card) if self._is_gloo and on_card else None
        noted = member.note(self._group, operation, max(_card_bytes(shown), _card_bytes(outputs)))
        if not travels:
            member.forget(outputs)
            return DoneWork(outputs, kept=(list(shown), list(outputs), kept), waited=queue, noted=noted)

        def finish() -> None:
            member.forget(outputs)
            parts, places = member.exchange.ask("collect", call)
            _fill(outputs, combine([parts[place] for place in places]))

        return DoneWork(outputs, kept=(list(shown), kept), finish=finish, waited=queue, noted=noted)

    def _call(self, operation: str, tensors: Tensors, manner: str = "") -> Collective:
        number, self._number = self._number, self._number + 1
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        stream = self._member.uses_card(self._group) if tensors and tensors[0].is_cuda else 0
        line = self._member.line()
        return Collective(self._member.rank, self._group, number, operation, shapes, dtype, stream, line, manner)

    def _message(self, tensor: torch.Tensor, source: int, target: int, *, is_send: bool) -> SendReceive:
        number = self._messages[source, target]
        self._messages[source, target] += 1
        if tensor.is_cuda:
            self._member.uses_card(self._group)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return SendReceive(
            self._member.rank, self._group, source, target, number, tensor.numel(), dtype, self._member.line(), is_send
        )


def _card_bytes(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.is_cuda)


def _fill(tensors: Tensors, values: Payload) -> None:
    if values is None:
        return
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            if value is not None:
                tensor.copy_(value.view(tensor.shape) if value.shape != tensor.shape else value)


def _each(
    combine: Callable[[Tensors], torch.Tensor], places: Sequence[int] | None = None
) -> Callable[[list[Payload]], Payload]:
    """Combine the tensors at each place (default: all) of all parts; None if a part is unknown."""

    def combined(parts: list[Payload]) -> Payload:
        if any(part is None for part in parts):
            return None
        return [combine([part[at] for part in parts]) for at in places or range(len(parts[0]))]

    return combined


def _nth(parts: list[Payload], place: int) -> list[Any]:
    """Return the tensor at this place of each part; None where a part is unknown."""
    return [part and part[place] for part in parts]


def _manner(how: Any) -> str:
    """Return the name of a ReduceOp, such as "sum" or "max"."""
    kind = getattr(how, "op", how)
    return str(getattr(kind, "name", kind)).rpartition(".")[2].lower()


def _joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the values: a tensor on the card is known as a whole or not at all."""
    return torch.cat([value.reshape(-1) for value in values])


def reduced(parts: Tensors, how: Any) -> torch.Tensor:
    """Reduce the parts to one tensor by a ReduceOp, on the host."""
    if how == ReduceOp.AVG:
        total = reduce(torch.add, parts)
        return total / len(parts) if total.is_floating_point() else total // len(parts)
    known = {
        ReduceOp.PRODUCT: torch.mul, ReduceOp.MIN: torch.minimum, ReduceOp.MAX: torch.maximum,
        ReduceOp.BAND: torch.bitwise_and, ReduceOp.BOR: torch.bitwise_or, ReduceOp.BXOR: torch.bitwise_xor,
    }  # fmt: skip
    # A ReduceOp and its kind compare equal but hash differently. A premultiplied sum counts as a sum.
    return reduce(next((combine for kind, combine in known.items() if how == kind), torch.add), parts)
