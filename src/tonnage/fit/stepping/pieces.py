"""A parameter's states in pieces: ranges of its elements with their own states, on the device or packed on the host.

A piece's states are what a step creates for that range alone, so any elementwise optimizer can be cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tonnage.fit.moving.host import CopyInFlight, Packing
from tonnage.fit.stepping.parameter_step import Group, State, Step

_PROBED_ELEMENTS = 65536
_COUNTS = frozenset({"step", "mu_product", "eta", "mu"})  # states of torch.optim with one number per parameter


def flat(tensor: Tensor) -> Tensor:
    """Return all elements in memory order, as a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def flat_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient's elements in the memory order of the parameter."""
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
    return flat(gradient)


@dataclass
class StatePiece:
    """Elements `start` to `stop` of a parameter: a pinned buffer on the host, or tensors in `state` on the device."""

    start: int
    stop: int
    packing: Packing
    buffer: Tensor | None = None
    state: State = field(default_factory=dict)  # for a piece on the host: what is not in the buffer
    started: bool = False
    written: CopyInFlight = field(default_factory=CopyInFlight)  # the last copy into the buffer
    gradient: Tensor | None = None  # accumulated on the host over micro-batches
    has_gradient: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "StatePiece":
        raise TypeError(
            "States on the host cannot be copied with their optimizer; copy optimizer.state_dict() instead."
        )

    def of(self, flat_tensor: Tensor) -> Tensor:
        return flat_tensor[self.start : self.stop]

    def whole_state(self) -> State:
        self.written.done()
        return self.state if self.buffer is None else {**self.state, **self.packing.views(self.buffer)}

    def keep(self, state: State) -> None:
        self.state = state if self.buffer is None else self.packing.store(state, self.buffer)
        self.started = True


class Probe:
    """Finds out which states a step function creates, by stepping a few zeros."""

    def __init__(self, function: Step) -> None:
        self._function = function
        self._known: dict[tuple[Any, ...], list[tuple[str, torch.dtype, int]]] = {}

    @torch.no_grad()
    def packing(self, parameter: Tensor, count: int, plain: State, group: Group) -> Packing:
        """Return the packing of `count` elements of a parameter with these plain states, or with none yet."""
        if count == 0:
            return Packing.of(())
        probed = min(count, _PROBED_ELEMENTS)
        options = repr([(name, value) for name, value in group.items() if name != "params"])
        key = (options, parameter.dtype, parameter.device, probed)
        if key not in self._known:
            zeros = torch.zeros(probed, dtype=parameter.dtype, device=parameter.device)
            state: State = {}
            if plain:
                of_zeros = {n: zeros.to(v.dtype) if _like(n, v, parameter) else v for n, v in plain.items()}
                state = self._function.own_state(zeros, of_zeros, group)
            else:
                self._function(zeros, torch.zeros_like(zeros), state, group)
            self._known[key] = [(n, v.dtype, v.numel()) for n, v in state.items() if isinstance(v, Tensor) and v.dim()]
        lengths = ((name, dtype, -(-count // -(-probed // length))) for name, dtype, length in self._known[key])
        return Packing.of(((name, dtype, (length,), (1,)) for name, dtype, length in lengths))


def _like(name: str, value: Any, parameter: Tensor) -> bool:
    """Return whether a state has one element per element of the parameter, which may itself be a scalar."""
    return isinstance(value, Tensor) and value.shape == parameter.shape and name not in _COUNTS


def join(function: Step, parameter: Tensor, pieces: Sequence[StatePiece]) -> State:
    """Join the pieces' states into plain ones, on the host unless all of them are on the device."""
    if not all(piece.started for piece in pieces):
        return {}
    found = [(piece, function.plain_state(piece.of(flat(parameter)), piece.whole_state())) for piece in pieces]
    on_device = all(piece.buffer is None for piece in pieces)
    joined: State = {}
    for name, value in found[0][1].items():
        if not isinstance(value, Tensor) or not value.dim():
            joined[name] = value.clone() if isinstance(value, Tensor) else value
        else:
            device = parameter.device if on_device else "cpu"
            joined[name] = torch.empty_like(parameter, dtype=value.dtype, device=device)
            for piece, state in found:
                piece.of(flat(joined[name])).copy_(state[name].view(-1))
    return joined


def cut_state(plain: State, parameter: Tensor, piece: StatePiece) -> State:
    """Return the slice of plain states that belongs to a piece."""
    return {n: piece.of(flat_like(v, parameter)) if _like(n, v, parameter) else v for n, v in plain.items()}
