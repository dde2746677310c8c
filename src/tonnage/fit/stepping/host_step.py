"""Keep optimizer states on the host, and step them in one of two ways.

`DeviceStep` copies a piece's states to the device through a few staging slots, steps there and copies them back;
copies in both directions overlap with the computation. `HostStep` copies gradient and parameter to the host, steps
on a thread and copies the new parameter back. Neither knows which optimizer it is or when backward runs.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, pairwise
from queue import SimpleQueue

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Optimizer

from tonnage.fit.moving.host import CopyInFlight, CopyLane, pinned, queued
from tonnage.fit.stepping.parameter_step import Group, State, Step, is_small
from tonnage.fit.stepping.pieces import Probe, StatePiece, cut_state, flat, flat_like, join
from tonnage.fit.virtual import on_virtual_gpu

_PIECES = "pieces"  # the only state key of a parameter here
DEVICE_SLOTS = 3  # one arriving, one being stepped, one leaving
HOST_SLOTS = 6
LEAST_ELEMENTS = 4096  # pieces are multiples of this: kernels stay aligned, 8-bit states keep their blocks


def pieces_of(state: State) -> list[StatePiece]:
    """Return the pieces of a parameter whose states are kept here."""
    pieces: list[StatePiece] = state[_PIECES]
    return pieces


class _Held:
    """Gradients that another stream still reads; above a byte limit, the computation waits for the oldest.

    They are released at the same points of every step. If a thread freed them, each step would have another peak,
    which no rehearsal could predict.
    """

    def __init__(self, device: torch.device, most_bytes: int) -> None:
        self._device, self._most_bytes = device, most_bytes
        self._gradients: deque[tuple[Tensor, CopyInFlight]] = deque()
        self._bytes = 0

    def add(self, gradient: Tensor, done: CopyInFlight) -> None:
        """Hold a gradient until the other stream has read it."""
        self._gradients.append((gradient, done))
        self._bytes += gradient.nbytes
        self.let_go(self._most_bytes)

    def let_go(self, down_to_bytes: int = 0) -> None:
        """Release the oldest gradients; the current stream waits for their readers."""
        while self._gradients and self._bytes > down_to_bytes:
            gradient, done = self._gradients.popleft()
            self._bytes -= gradient.nbytes
            if done.event is not None:
                torch.cuda.current_stream(self._device).wait_event(done.event)


@dataclass
class _Slot:
    """A buffer for states, or for a parameter and its gradient, in transit."""

    buffer: Tensor
    free: CopyInFlight = field(default_factory=CopyInFlight)  # after it, the buffer may be overwritten


class PiecewiseStep(Step):
    """Steps a parameter piece by piece: pieces on the device in place, the others as the subclass defines."""

    converts = True

    def __init__(
        self, inner: Step, device: torch.device, *, gpu_bytes: int, piece_bytes: int, largest: int = 0
    ) -> None:
        self.inner = inner
        self.largest = largest  # elements of the largest parameter; states of small ones stay on the device
        self.device = device
        self.piece_bytes = piece_bytes
        self.largest_bytes = 0  # of the parameter's share in a host piece
        self.largest_state_bytes = 0
        self._gpu_bytes_left = gpu_bytes
        self._pieces: dict[int, list[StatePiece]] = {}  # by id of the parameter
        self._probe = Probe(inner)
        self.in_lane = CopyLane(device)
        self.out_lane = CopyLane(device)

    @abstractmethod
    def step_on_host(self, parameter: Tensor, gradient: Tensor, piece: StatePiece, group: Group) -> None:
        """Step a piece whose states are on the host; `parameter` and `gradient` are its flat slices."""

    @torch.no_grad()
    def __call__(self, parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        pieces = self.pieces(parameter, state, group)
        parameter, gradient = flat(parameter), flat_like(gradient, parameter)
        for piece in pieces:
            if piece.buffer is None:
                self.inner(piece.of(parameter), piece.of(gradient), piece.state, group)
                piece.started = True
            else:
                self.step_on_host(piece.of(parameter), piece.of(gradient), piece, group)

    @torch.no_grad()
    def step_all(self, steps: Sequence[tuple[Tensor, Tensor, State, Group]]) -> None:
        """Step parameters together if their states are on the device in one piece, else one by one."""
        together: list[tuple[Tensor, Tensor, State, Group]] = []
        for parameter, gradient, state, group in steps:
            pieces = self.pieces(parameter, state, group)
            if len(pieces) == 1 and pieces[0].buffer is None:
                whole = flat(parameter)
                together.append((whole, flat_like(gradient, parameter), pieces[0].state, group))
                pieces[0].started = True
            else:
                self(parameter, gradient, state, group)
        if together:
            self.inner.step_all(together)

    def pieces(self, parameter: Tensor, state: State, group: Group) -> list[StatePiece]:
        """Return the parameter's pieces, cut if they were not yet."""
        if _PIECES not in state:
            state.update(self.own_state(parameter, {}, group))
        return pieces_of(state)

    def plain_state(self, parameter: Tensor, state: State) -> State:
        return join(self.inner, parameter, state[_PIECES]) if state else {}

    def own_state(self, parameter: Tensor, plain: State, group: Group) -> State:
        if id(parameter) not in self._pieces:
            self._pieces[id(parameter)] = self._cut(parameter, plain, group)
        pieces = self._pieces[id(parameter)]
        for piece in pieces:
            piece.state, piece.started, piece.has_gradient = {}, False, False
            if plain:
                target = self.home(piece.of(flat(parameter)), piece)
                piece.keep(self.inner.own_state(target, cut_state(plain, parameter, piece), group))
        return {_PIECES: pieces}

    def state_bytes(self, parameter: Tensor, state: State, group: Group) -> int:
        """Return the bytes of a parameter's states, existing or expected."""
        if state:
            return sum(value.nbytes for value in state.values() if isinstance(value, Tensor) and value.dim())
        return self._probe.packing(parameter, parameter.numel(), {}, group).tensor_bytes

    @abstractmethod
    def finish(self) -> None:
        """Make the current stream, and the host if necessary, wait for the new parameters."""

    def home(self, parameter: Tensor, piece: StatePiece) -> Tensor:
        """Return a tensor of the piece's elements on the device where its states are stepped."""
        return parameter

    def _cut(self, parameter: Tensor, plain: State, group: Group) -> list[StatePiece]:
        """Cut a parameter into pieces: first what fits the device's share, then those on the host."""
        count = parameter.numel()
        packing = partial(self._probe.packing, parameter, plain=plain, group=group)
        per_element = max(1, packing(count).tensor_bytes / max(1, count))
        # What fits the remaining share of the device. Shared scales make bytes not quite proportional.
        on_device = count
        if not is_small(parameter, self.largest):
            on_device = min(count, int(self._gpu_bytes_left / per_element))
            while (needed := packing(on_device).tensor_bytes) > self._gpu_bytes_left:
                on_device = min(on_device - 1, int(on_device * self._gpu_bytes_left / needed))
        stride = max(1, int(self.piece_bytes / per_element / LEAST_ELEMENTS)) * LEAST_ELEMENTS
        edges = [0, *([on_device] if on_device else []), *range(on_device + stride, count, stride), count]
        pieces = [
            StatePiece(start, stop, packing(stop - start))
            for start, stop in pairwise(edges)
            if stop > start or count == 0
        ]
        for piece in pieces:
            if piece.start >= on_device and count > 0:
                itemsize, byte_count = parameter.dtype.itemsize, piece.packing.byte_count
                self.largest_bytes = max(self.largest_bytes, (piece.stop - piece.start) * itemsize)
                self.largest_state_bytes = max(self.largest_state_bytes, byte_count)
                piece.buffer = pinned(byte_count, self.device)
            else:
                self._gpu_bytes_left = max(0, self._gpu_bytes_left - piece.packing.tensor_bytes)
        return pieces


class DeviceStep(PiecewiseStep):
    """Copies states to the device through staging slots and back; results equal the device's own step bit for bit.

    It runs on its own stream, so that backward does not wait for the link. Gradients wait for their states: beyond
    `window_bytes` of them, besides the largest, backward waits too.
    """

    def __init__(self, inner: Step, device: torch.device, *, window_bytes: int, **sizes: int) -> None:
        super().__init__(inner, device, **sizes)
        self._slots = cycle([_Slot(torch.empty(0, dtype=torch.uint8, device=device)) for _ in range(DEVICE_SLOTS)])
        self._step_lane = CopyLane(device)
        self._waiting = _Held(device, window_bytes)

    def step_on_host(self, parameter: Tensor, gradient: Tensor, piece: StatePiece, group: Group) -> None:
        assert piece.buffer is not None
        slot, byte_count = next(self._slots), piece.packing.byte_count
        if slot.buffer.numel() < byte_count:  # once per training, unless parameters are added to the optimizer later
            slot.free.done()
            most_bytes = max(byte_count, self.largest_state_bytes)
            slot.buffer = torch.empty(most_bytes, dtype=torch.uint8, device=self.device)
            slot.free = queued(self.device)
        complete, staged = queued(self.device), slot.buffer[:byte_count]
        stream = self._step_lane.stream
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            complete.wait(stream)
            staging = slot.free
            if piece.started:
                staging = self.in_lane.copy_all([(piece.buffer, staged)], after=[slot.free, piece.written])
            staging.wait(stream)
            state = {**piece.state, **piece.packing.views(staged)} if piece.started else {}
            self.inner(parameter, gradient, state, group)
            piece.state = piece.packing.store(state, staged)
            piece.started = True
            stepped = queued(self.device)
            slot.free = piece.written = self.out_lane.copy_all([(staged, piece.buffer)], after=[stepped])
        self._waiting.add(gradient, stepped)

    def finish(self) -> None:
        self._waiting.let_go()


class HostStep(PiecewiseStep):
    """Steps on a host thread during backward. Gradients may be accumulated on the host first.

    At most `HOST_SLOTS` pieces are in flight: a backward pass faster than the host waits here.
    """

    def __init__(self, inner: Step, optimizer: Optimizer, device: torch.device, **sizes: int) -> None:
        super().__init__(inner, device, **sizes)
        self._has_fused = isinstance(optimizer, Adam | SGD | Adagrad)
        self._has_values = not on_virtual_gpu(device)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tonnage-host-step")
        self._under_way: list[Future[None]] = []
        self._leaving = _Held(device, sizes["piece_bytes"])
        self._slots: SimpleQueue[_Slot] = SimpleQueue()
        for _ in range(HOST_SLOTS):
            self._slots.put(_Slot(torch.empty(0, dtype=torch.uint8)))

    def close(self) -> None:
        self._worker.shutdown()

    def finish(self) -> None:
        under_way, self._under_way = self._under_way, []
        wait(under_way)
        for future in under_way:
            future.result()
        self._leaving.let_go()
        if self.in_lane.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.in_lane.stream)

    def home(self, parameter: Tensor, piece: StatePiece) -> Tensor:
        return parameter if piece.buffer is None else torch.empty_like(parameter, device="cpu")

    def step_on_host(self, parameter: Tensor, gradient: Tensor | None, piece: StatePiece, group: Group) -> None:
        """Step on the host thread with this gradient plus what was accumulated before."""
        slot, here, gradient_here = self._take_slot(parameter)
        pairs = [(parameter, here)] if gradient is None else [(parameter, here), (gradient, gradient_here)]
        copied = self.out_lane.copy_all(pairs, after=[slot.free, queued(self.device)])
        if gradient is not None:
            self._leaving.add(gradient, copied)
        added = piece.gradient if piece.has_gradient else None
        gradients = [g for g in (added, None if gradient is None else gradient_here) if g is not None]
        piece.has_gradient = False
        # The same options with the fastest CPU implementation: one vectorized pass over all threads.
        options = dict(group)
        if self._has_fused and not group.get("differentiable"):
            # PyTorch's fused CPU SGD computes wrong momenta for 16-bit types (as of 2.13).
            fused = parameter.dtype.itemsize >= 4 or "momentum" not in group
            options |= {"fused": fused, "foreach": None, "capturable": False}

        def step() -> None:
            total = gradients[0] if len(gradients) == 1 else gradients[0].add_(gradients[1])
            state = piece.whole_state() if piece.started else {}
            self.inner(here, total, state, options)
            piece.keep(state)
            slot.free = self.in_lane.copy_all([(here, parameter)], after=[])

        self._send(slot, copied, step)

    @torch.no_grad()
    def add(self, parameter: Tensor, gradient: Tensor, pieces: Sequence[StatePiece]) -> None:
        """Accumulate a micro-batch's gradient on the host."""
        gradient = flat_like(gradient, parameter)
        for piece in pieces:
            part = piece.of(gradient)
            if piece.gradient is None:
                piece.gradient = pinned(part.nbytes, self.device).view(part.dtype)
            total = piece.gradient
            slot, _, here = self._take_slot(part)
            target = here if piece.has_gradient else total
            copied = self.out_lane.copy_all([(part, target)], after=[slot.free, queued(self.device)])
            self._leaving.add(part, copied)
            self._send(slot, copied, partial(total.add_, here) if piece.has_gradient else None)
            piece.has_gradient = True

    def _take_slot(self, part: Tensor) -> tuple[_Slot, Tensor, Tensor]:
        """Return a free slot and views in it for two tensors like this part; waits while all are in flight."""
        slot, size = self._slots.get(), part.numel() * part.dtype.itemsize
        try:
            if slot.buffer.numel() < 2 * size:
                slot.free.done()
                slot.buffer = pinned(2 * max(size, self.largest_bytes), self.device)
            return slot, slot.buffer[:size].view(part.dtype), slot.buffer[size : 2 * size].view(part.dtype)
        except BaseException:
            self._slots.put(slot)
            raise

    def _send(self, slot: _Slot, copied: CopyInFlight, work: Callable[[], object] | None) -> None:
        """After the copy, run the work on the host thread and free the slot."""

        def run() -> None:
            try:
                copied.done()
                if work is not None:
                    with torch.no_grad():
                        work()
            finally:
                self._slots.put(slot)

        if self._has_values:
            self._under_way.append(self._worker.submit(run))
        else:  # a virtual device has nothing to compute
            self._slots.put(slot)
