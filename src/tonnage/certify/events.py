"""Write the events of a virtual GPU into a program: which block is taken or dropped, in which call and part.

A call is recorded between `_start` and `_stop`. A replayed call (`_replay`) takes the blocks that it took when it
was run, and tensors made for its result are bound to them (`_tensors`).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from sys import intern
from typing import Any

from tonnage.certify.program import (
    CannotRepeat,
    Key,
    Op,
    Owner,
    PendingBackward,
    ProgramPart,
    RecordedCall,
    RecordedProgram,
    Template,
    TemplateOp,
    TensorLayout,
)
from tonnage.recording.records import Allocation
from tonnage.script.attribution import address_of
from tonnage.script.lines import ScriptPlace
from tonnage.virtual.device import _WITHOUT_KERNELS
from tonnage.virtual.going_on import Stopped

_FEW = 16
_APART = 4096  # addresses only need to differ
_TRUSTED_RUN = 3  # what a call leaves behind after this many runs is its own


class Events:
    """The sink of a virtual GPU's events. Make it before the session is opened."""

    def __init__(
        self, session: Any, program: RecordedProgram, *, replays: bool = True, most_epochs: int = 0, most_steps: int = 0
    ) -> None:
        self.program, self.replays = program, replays
        self.most_epochs, self.most_steps = most_epochs, most_steps
        self.step = self.micro_batch = self.replayed_parts = 0
        # Blocks that the script itself took in a step, before its optimizer: in run steps (True), and in replayed ones.
        self.own_blocks: dict[bool, list[int]] = {True: [], False: []}
        self.notes: set[str] = set()
        self.on_step: Callable[[], None] | None = None
        self._session, self._device, self._torch = session, session.device, session.torch
        self._drain = getattr(session.device, "drain", lambda: None)
        self._owners: dict[int, Owner] = {}
        self._address = self._muted = self._takes = self._handling_gradients = 0
        self._calls: dict[Key, RecordedCall] = {}
        self._by_instance: dict[int, RecordedCall] = {}  # of calls that were run, while their blocks live
        self._template: Template | None = None
        self._instance = -1
        self._arguments: list[int] = []
        self._deferred: list[Owner] = []
        self._binding: list[Owner] = []
        self._pending: list[PendingBackward] = []
        self._replaying: RecordedCall | None = None
        self._last_forward: dict[int, int] = {}
        self._stepped = self._present_is_real = True
        self._virtual_gradients: list[tuple[int, RecordedCall]] = []
        self._materialises = False  # the script handles gradients itself
        self._parameters: dict[int, list[Any]] = {}
        self._loose_later: list[Owner] = []
        self._loose_before_backward: list[Owner] = []
        self._fresh: list[tuple[Key, int, RecordedCall]] = []  # what was run in the current part
        self._runs: Counter[Key] = Counter()
        self._outside = -1
        self._waiting: list[int] | None = None  # for a backward to reach what was run
        self._replaying_arguments: list[int] = []
        self._anchor: Any = None  # a tensor with a gradient, so that autograd follows replayed calls
        self._loader = 0  # of the last batch
        self._epochs: Counter[int] = Counter()  # passes over each loader so far
        self._training_loaders: set[int] = set()
        dtypes = [value for value in vars(self._torch).values() if isinstance(value, self._torch.dtype)]
        self._itemsize = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in dtypes}
        if hasattr(self._device, "allocator"):  # on a CPU build, hand out addresses instead of the card's allocator
            self._device.malloc, self._device.free = self._malloc, self._free
            self._device.record_stream = lambda address, stream: None

    # -- events of the card

    def _malloc(
        self, size: int, index: int, stream: int, operator: str, context: int, serial: int, shape: Any, dtype: str
    ) -> int:
        self._address += _APART
        if not self._muted:
            device = self._device
            self._take(self._address, size, stream, "" if self._binding else device.attribution.place().line)
            device.cards.add(index)
            if device._no_kernel_yet and operator not in _WITHOUT_KERNELS:
                device._no_kernel_yet = False
                device.use("kernels")
        return self._address

    def _free(self, address: int, serial: int) -> None:
        owner = self._owners.pop(address, None)
        if owner is not None:
            self._drop(owner)

    def _take(self, address: int, size: int, stream: int, line: str) -> None:
        if self._binding:
            self._owners[address] = self._binding.pop(0)
        elif self._template is not None:
            slot = self._template.slots
            self._template.lines.append(intern(line))
            self._template.events.extend((TemplateOp.TAKE, slot, size, stream))
            self._owners[address] = (self._instance, slot)
        else:
            self._takes += 1
            self._owners[address] = self.program.take(size, stream, line)

    def _allocated(
        self, address: int, size: int, block_size: int, stream: int, operator: str, module: str, serial: int, shape: Any,
        dtype: str, place: ScriptPlace,
    ) -> Allocation:  # fmt: skip
        device, who = self._device, self._device.attribution
        device.sequence += 1
        allocation = Allocation(
            0, address, size, block_size, stream, device.sequence, None, who.category, operator, module, who.phase, who.step,
            place.line, place.stack, shape, dtype,
        )  # fmt: skip
        device.live[address] = allocation
        device.serials[address] = serial
        if self._muted:
            return allocation
        if shape is not None and dtype in self._itemsize and size == block_size:
            # torch's own allocator reports the block, which may be larger by a remainder not worth splitting.
            wanted = prod(shape) * self._itemsize[dtype]
            size = wanted if 0 <= size - wanted <= 2**20 + 512 and wanted else size
        self._take(address, size, stream, place.line)
        return allocation

    def _freed(self, address: int, serial: int) -> Allocation | None:
        device = self._device
        allocation: Allocation | None = device.live.pop(address, None)
        device.serials.pop(address, None)
        owner = self._owners.pop(address, None)
        if owner is not None:
            device.sequence += 1
            self._drop(owner)
        return allocation

    def _drop(self, owner: Owner) -> None:
        if self._template is None:
            self._give(owner)
        elif owner[0] == self._instance:
            self._template.events.extend((TemplateOp.GIVE, owner[1], 0, 0))
        elif owner[0] in self._arguments:
            self._template.events.extend((TemplateOp.GIVE_ARGUMENT, self._arguments.index(owner[0]), owner[1], 0))
        else:
            self._template.repeats &= owner[0] < 0  # the script itself drops its own blocks in a replay, too
            self._deferred.append(owner)

    def _give(self, owner: Owner) -> None:
        """Record that the script dropped a block; for a call that was run, note it for replays."""
        self.program.give(owner)
        instance, slot = owner
        call = self._by_instance.get(instance)
        if call is None:
            return
        if any(one == slot for _, one in call.gradients):
            self._materialises |= not self._handling_gradients
        elif call.output is None or all(layout.slot != slot for layout in call.output.layouts):
            is_pending = any(one.instance == instance for one in self._pending)
            later = call.loose_before_backward if is_pending else call.loose
            (later if self._takes else call.loose_at_once).append(slot)

    # -- one call

    def _start(self, name: str, arguments: list[int]) -> int:
        self._drain()
        self._template = self.program.new_template(name)
        self._instance = self.program.new_instance()
        self._arguments, self._deferred = arguments, []
        return self._instance

    def _stop(self) -> RecordedCall:
        self._drain()
        template, self._template = self._template, None
        assert template is not None
        self._note_outside()
        self.program.call(template, self._instance, self._arguments)
        for owner in self._deferred:
            self._give(owner)
        call = RecordedCall(template)
        self._by_instance[self._instance] = call
        while len(self._by_instance) > 64:
            del self._by_instance[next(iter(self._by_instance))]
        rows = zip(template.events[::4], template.events[1::4], strict=True)
        dropped = {slot for kind, slot in rows if kind == TemplateOp.GIVE}
        call.left = [slot for slot in range(template.slots) if slot not in dropped]
        return call

    def _layout_of(self, instance: int, arguments: list[Any]) -> Callable[[Any], TensorLayout]:
        def layout(tensor: Any) -> TensorLayout:
            for number, argument in enumerate(arguments):
                if argument is tensor:
                    return TensorLayout(-1, argument=number)
            owner = self._owners.get(address_of(tensor)) if tensor.is_cuda and tensor.numel() else None
            if owner is None:
                return TensorLayout(-1, kept=tensor)
            if owner[0] != instance:
                raise CannotRepeat("its result lies in memory that was there before")
            values = None
            if tensor.numel() <= _FEW and self._session.is_known(tensor):
                with self._unseen():
                    values = tensor.detach().cpu()
            return TensorLayout(
                owner[1], tensor.untyped_storage().nbytes(), tuple(tensor.shape), tensor.stride(), tensor.storage_offset(),
                tensor.dtype, tensor.requires_grad,
                tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(),
                values,
            )  # fmt: skip

        return layout

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Hide what is done inside from the program."""
        self._drain()
        self._muted += 1
        try:
            yield
        finally:
            self._drain()
            self._muted -= 1

    def _tensors(self, call: RecordedCall, instance: int, arguments: list[Any]) -> list[Any]:
        """Return new tensors in the blocks of a replayed call."""
        torch, layouts = self._torch, call.output.layouts if call.output else []
        storages: dict[int, Any] = {}
        shared = Counter(one.slot for one in layouts)
        found: list[Any] = []
        self._drain()
        for one in layouts:
            if one.slot < 0:
                found.append(one.kept if one.argument < 0 else arguments[one.argument])
                continue
            fills_block = one.is_whole and shared[one.slot] == 1
            if one.slot not in storages:
                shape, dtype = (one.shape, one.dtype) if fills_block else (one.block_bytes, torch.uint8)
                self._binding.append((instance, one.slot))
                tensor = torch.empty(shape, dtype=dtype, device="cuda")
                self._drain()
                storages[one.slot] = tensor.untyped_storage()
            if not fills_block:
                tensor = torch.empty(0, dtype=one.dtype, device="cuda")
                tensor.set_(storages[one.slot], one.offset, one.shape, one.stride)
            found.append(tensor)
            if one.values is not None:
                with self._unseen():
                    tensor.copy_(one.values)
        return found

    def _replay(self, call: RecordedCall, arguments: list[int]) -> int:
        instance = self.program.new_instance()
        self.program.call(call.template, instance, arguments)
        for slot in call.loose_at_once:
            self.program.give((instance, slot))
        self._loose_before_backward += [(instance, slot) for slot in call.loose_before_backward]
        self._loose_later += [(instance, slot) for slot in call.loose]
        return instance

    # -- parts of the training

    def _begin(self, part: ProgramPart) -> None:
        self._drain()
        self._takes = 0
        # Forget calls that left unreturned blocks: libraries allocate workspaces once, in whatever runs first.
        fresh, self._fresh = self._fresh, []
        held = set(self._owners.values()) if fresh else set()
        for _, instance, call in fresh:
            held -= {(instance, layout.slot) for layout in (call.output.layouts if call.output else [])}
            held -= {(instance, slot) for _, slot in call.gradients}
        if {instance for instance, _ in held} & {instance for _, instance, _ in fresh}:
            for key, _, _ in fresh:
                self._runs[key] += 1
                if self._runs[key] < _TRUSTED_RUN:
                    self._calls.pop(key, None)
        for owner in (*self._loose_before_backward, *self._loose_later):
            self.program.give(owner)
        self._loose_before_backward, self._loose_later = [], []
        self.program.begin(part)
        if self._present_is_real:
            self._note_outside()

    def _note_outside(self) -> None:
        """Record the process memory outside the allocator: libraries are loaded by the call that first needs them."""
        outside = sum(self._device.overhead_parts.values())
        if outside != self._outside:
            self._outside = outside
            self.program.operations.extend((Op.OUTSIDE, outside))

    def _root_begins(self, trains: bool, shape: tuple[int, ...], replayed: bool) -> None:
        if trains:
            self._training_loaders.add(self._loader)
            if self._stepped and 0 < self.most_steps <= self.step:
                raise Stopped
            self.micro_batch = 1 if self._stepped else self.micro_batch + 1
            self.step += self._stepped
            self._stepped = False
        part = ProgramPart("step" if trains else "evaluation", self.step, self.micro_batch, shape, replayed)
        if self.program.parts[-1].kind == "data":
            self.program.parts[-1] = part
        else:
            self._begin(part)
        self.replayed_parts += replayed
        if self.on_step is not None:
            self.on_step()
