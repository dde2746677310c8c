"""A parameter's states in pieces: ranges of its elements, each with states of its own, on the device or packed on the host.

A piece's states are whatever a step function makes when it is given that range alone, so that any optimizer that works
element by element can be cut. This module does not know when a piece is stepped nor where.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tonnage.fit.stepping.parameter_step import Group, State, StepFunction, own_state, plain_state

_ALIGNMENT_BYTES = 16  # of each state inside a packed buffer, for vectorised kernels
_PROBED_ELEMENTS = 65536
_COUNTS = frozenset({"step", "mu_product", "eta", "mu"})  # of torch.optim's states, one number a parameter


def flat(tensor: Tensor) -> Tensor:
    """All elements in the order of memory, without a copy."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def flat_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient's elements in the order of the parameter's."""
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
    return flat(gradient)


@dataclass(frozen=True)
class Packing:
    """Where each state of a piece stands in one buffer."""

    entries: dict[str, tuple[int, torch.dtype, int]]  # offset in bytes, type, elements
    byte_count: int

    @classmethod
    def of(cls, lengths: Iterable[tuple[str, torch.dtype, int]]) -> "Packing":
        entries: dict[str, tuple[int, torch.dtype, int]] = {}
        end = 0
        for name, dtype, count in lengths:
            entries[name] = (end, dtype, count)
            end += -(-count * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return cls(entries, end)

    @property
    def state_bytes(self) -> int:
        return sum(dtype.itemsize * count for _, dtype, count in self.entries.values())

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        return {
            name: buffer[offset : offset + count * dtype.itemsize].view(dtype)
            for name, (offset, dtype, count) in self.entries.items()
        }

    def store(self, state: State, buffer: Tensor) -> State:
        """Copy the states that are not in the buffer already; what is returned are counts and the like."""
        for name, view in self.views(buffer).items():
            if state[name].data_ptr() != view.data_ptr() or state[name].device != view.device:
                view.copy_(state[name])
        return {name: value for name, value in state.items() if name not in self.entries}


@dataclass
class Piece:
    """Elements `start` to `stop` of a parameter. On the host: a pinned buffer; on the device: tensors in `state`."""

    start: int
    stop: int
    packing: Packing
    buffer: Tensor | None = None
    state: State = field(default_factory=dict)  # of a piece on the host: what is not in the buffer
    started: bool = False
    written: "torch.cuda.Event | None" = None  # when the last copy into the buffer is done
    gradient: Tensor | None = None  # summed on the host over micro-batches
    has_gradient: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Piece":
        raise TypeError(
            "States on the host cannot be copied with their optimizer; copy optimizer.state_dict() instead."
        )

    def of(self, flat_tensor: Tensor) -> Tensor:
        return flat_tensor[self.start : self.stop]

    def forget(self) -> None:
        self.state, self.started, self.has_gradient = {}, False, False

    def whole_state(self) -> State:
        if self.written is not None:
            self.written.synchronize()
        return self.state if self.buffer is None else {**self.state, **self.packing.views(self.buffer)}

    def keep(self, state: State) -> None:
        self.state = state if self.buffer is None else self.packing.store(state, self.buffer)
        self.started = True


class Probe:
    """What states a step function makes, found out by stepping a few zeros."""

    def __init__(self, function: StepFunction) -> None:
        self._function = function
        self._known: dict[tuple[Any, ...], list[tuple[str, torch.dtype, int]]] = {}

    @torch.no_grad()
    def packing(self, parameter: Tensor, count: int, plain: State, group: Group) -> Packing:
        """Return the packing of `count` elements of a parameter that has these plain states, or none yet."""
        if count == 0:
            return Packing.of(())
        probed = min(count, _PROBED_ELEMENTS)
        options = repr([(name, value) for name, value in group.items() if name != "params"])
        key = (options, parameter.dtype, parameter.device, probed)
        if key not in self._known:
            zeros = torch.zeros(probed, dtype=parameter.dtype, device=parameter.device)
            state = self._state_of_zeros(zeros, parameter, plain, group)
            self._known[key] = [(n, v.dtype, v.numel()) for n, v in state.items() if isinstance(v, Tensor) and v.dim()]
        return Packing.of((name, dtype, -(-count // -(-probed // length))) for name, dtype, length in self._known[key])

    def _state_of_zeros(self, zeros: Tensor, parameter: Tensor, plain: State, group: Group) -> State:
        state: State = {}
        if plain:
            of_zeros = {n: zeros.to(v.dtype) if _like(n, v, parameter) else v for n, v in plain.items()}
            return own_state(self._function, zeros, of_zeros, group)
        self._function(zeros, torch.zeros_like(zeros), state, group)
        return state


def _like(name: str, value: Any, parameter: Tensor) -> bool:
    """Whether a state has an element for each of the parameter's; a parameter may itself be a single number."""
    return isinstance(value, Tensor) and value.shape == parameter.shape and name not in _COUNTS


def join(function: StepFunction, parameter: Tensor, pieces: Sequence[Piece]) -> State:
    """The plain states of a parameter from those of its pieces, on the host unless all of it is on the device."""
    if not all(piece.started for piece in pieces):
        return {}
    found = [(piece, plain_state(function, piece.of(flat(parameter)), piece.whole_state())) for piece in pieces]
    return {name: _join_one(name, value, parameter, found) for name, value in found[0][1].items()}


def _join_one(name: str, value: Any, parameter: Tensor, found: list[tuple[Piece, State]]) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value.clone() if isinstance(value, Tensor) else value
    on_device = all(piece.buffer is None for piece, _ in found)
    joined = torch.empty_like(parameter, dtype=value.dtype, device=parameter.device if on_device else "cpu")
    for piece, state in found:
        piece.of(flat(joined)).copy_(state[name].view(-1))
    return joined


def cut_state(plain: State, parameter: Tensor, piece: Piece) -> State:
    """The part of plain states that belongs to a piece."""
    return {
        name: piece.of(flat_like(value, parameter)) if _like(name, value, parameter) else value
        for name, value in plain.items()
    }
