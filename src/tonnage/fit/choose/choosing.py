"""Choose which blocks to keep, recompute or offload: an integer program over bytes and seconds. No torch.

Each moment of a step at which memory may peak is one constraint: the forward of each block, the loss, the backward
of each block. So the answer holds at every moment, and a smaller budget never yields more memory. Host links are
resources too: transfers that overlap with computation are free, the rest costs time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from tonnage.fit.survey.profile import BlockProfile, OutsideProfile

Row = tuple[dict[int, float], float, float]  # of a linear program: coefficients by column, lower and upper limit
GIB = float(1 << 30)  # the program's unit of memory: numbers near one keep the solver accurate
# Host states are copied in pieces of this size: one arrives, one is stepped, one leaves.
PIECE_BYTES = 64 << 20
STAGED_PIECES = 3


@dataclass(frozen=True, kw_only=True)
class MemoryContext:
    """Everything but the blocks' activations in one micro-batch."""

    budget_bytes: int
    fixed_bytes: int  # parameters, states and gradients that stay throughout
    outside: OutsideProfile
    gradient_bytes: Sequence[int] = ()  # per block, if gradients accumulate during backward; else ()
    outside_gradient_bytes: int = 0  # of the head, which come first
    waiting_bytes: int | None = None  # limit of gradients that wait for their states from the host
    passing_bytes: Sequence[int] = ()  # gradients in transit to the host: in the stem's backward, in each block's
    gradients_per_state: float = 0.0  # bytes of gradients per byte of states
    step_peak_bytes: int = 0  # above `fixed_bytes` while the optimizer steps: all gradients, temporaries
    movable_states_bytes: int = 0  # optimizer states that may be on the host instead
    states_s_per_byte: float = 0.0  # link time per byte of states on the host
    states_window_s: float = 0.0  # how much of that time overlaps with computation
    parameter_states_bytes: Sequence[int] = ()  # movable states per parameter; the first ones stay
    host_bytes: int = 0  # free for offloaded activations and states
    link_bytes_per_s: float = 50e9
    s_per_moved_byte: float = 4.2e-12  # a copy there and back slows the kernels it overlaps with (measured on an H200)
    micro_batches: int = 1


@dataclass(frozen=True, kw_only=True)
class ModeChoice:
    modes: tuple[str, ...]  # per block, in order
    unmoved_bytes: int  # states that could be on the host but are not
    micro_batch_s: float
    host_s: float = 0.0  # host time of a micro-batch
    exposed_states_s: float
    peak_bytes: int
    moved_bytes: int


def choose_modes(blocks: Sequence[Sequence[BlockProfile]], around: MemoryContext) -> ModeChoice | None:
    """Return the fastest modes within the budget, or None if nothing fits."""
    program = _ModeProgram(blocks, around)
    solution = program.solve(whole=True)
    if solution.x is None:
        return None
    choice = program.read(solution.x)
    over_bytes = choice.peak_bytes - around.budget_bytes
    if over_bytes <= 0:
        return choice
    # The solver's tolerance is a millionth, about a KiB here: tighten the budget and solve again.
    return choose_modes(blocks, replace(around, budget_bytes=around.budget_bytes - 2 * over_bytes))


def least_seconds(blocks: Sequence[Sequence[BlockProfile]], around: MemoryContext) -> float:
    """Return a lower bound on any choice, from the LP relaxation; infinite if nothing fits."""
    relaxed = _ModeProgram(blocks, around).solve(whole=False)
    return float(relaxed.fun) if relaxed.x is not None else np.inf


def spread(taken: Sequence[BlockProfile], kinds: Sequence[object]) -> list[BlockProfile]:
    """Spread modes that use the link evenly over equal blocks, sparing the last one.

    The program only counts the total link time; consecutive blocks would wait for each other.
    """
    spread_out = list(taken)
    for kind in dict.fromkeys(kinds):
        places = [index for index, other in enumerate(kinds) if other == kind]
        moving = [taken[index] for index in places if taken[index].moved_bytes]
        staying = [taken[index] for index in places if not taken[index].moved_bytes]
        room = max(1, len(places) - 1)
        chosen = {int((turn + 0.5) * room / len(moving)) for turn in range(len(moving))} if staying else set()
        if len(chosen) != len(moving):
            continue
        for turn, index in enumerate(places):
            spread_out[index] = moving.pop() if turn in chosen else staying.pop()
    return spread_out


def linear_constraint(rows: Sequence[Row], columns: int) -> LinearConstraint:
    """Build the constraint of a linear program from its rows."""
    entries = [(value, row, column) for row, (cells, _, _) in enumerate(rows) for column, value in cells.items()]
    values, at_row, at_column = zip(*entries, strict=True) if entries else ((), (), ())
    matrix = csr_array((values, (at_row, at_column)), shape=(len(rows), columns))
    return LinearConstraint(matrix, np.array([row[1] for row in rows]), np.array([row[2] for row in rows]))


class _ModeProgram:
    """Columns: one per block and mode, then states on the host (GiB), exposed seconds of forward, backward, states."""

    def __init__(self, blocks: Sequence[Sequence[BlockProfile]], around: MemoryContext) -> None:
        self.around = around
        ends = list(accumulate((len(modes) for modes in blocks), initial=0))
        self.blocks = list(zip(blocks, ends[:-1], strict=True))  # the modes of each, and the column of the first
        self.modes = [(start + place, mode) for modes, start in self.blocks for place, mode in enumerate(modes)]
        self.states, self.late_out, self.late_in, self.late_states = range(ends[-1], ends[-1] + 4)
        self.columns = ends[-1] + 4

    def solve(self, *, whole: bool) -> Any:
        """Solve for one mode per block, or the LP relaxation, whose blocks may mix modes."""
        around = self.around
        costs, upper = np.zeros(self.columns), np.ones(self.columns)
        for column, mode in self.modes:
            costs[column] = mode.forward_s + mode.backward_s + mode.moved_bytes * around.s_per_moved_byte
        costs[self.late_out] = costs[self.late_in] = 1.0
        costs[self.late_states] = 1.0 / around.micro_batches
        costs[self.states] = GIB * around.s_per_moved_byte / around.micro_batches
        upper[self.states] = around.movable_states_bytes / GIB
        upper[self.late_out :] = np.inf
        # Constraints: coefficients by column, lower and upper limit.
        one_mode_each = [({start + i: 1.0 for i in range(len(modes))}, 1.0, 1.0) for modes, start in self.blocks]
        return milp(
            costs,
            constraints=linear_constraint([*one_mode_each, *self._moments(), *self._links()], self.columns),
            bounds=Bounds(np.zeros(self.columns), upper),
            integrality=np.array([1] * len(self.modes) + [0] * 4) if whole else None,
            options={"mip_rel_gap": 2e-3, "time_limit": 2.0} if whole else None,
        )

    def read(self, values: np.ndarray[Any, Any]) -> ModeChoice:
        taken = [modes[int(np.argmax(values[start : start + len(modes)]))] for modes, start in self.blocks]
        moved_states = round(float(values[self.states]) * GIB)
        even = spread(taken, [id(modes) for modes, _ in self.blocks])
        if peak_of(even, self.around, moved_states) <= self.around.budget_bytes:
            taken = even
        seconds = sum(mode.forward_s + mode.backward_s for mode in taken)
        return ModeChoice(
            modes=tuple(mode.name for mode in taken),
            unmoved_bytes=self.around.movable_states_bytes - moved_states,
            micro_batch_s=seconds + float(values[self.late_out] + values[self.late_in]),
            host_s=sum(mode.host_s for mode in taken),
            exposed_states_s=float(values[self.late_states]),
            peak_bytes=peak_of(taken, self.around, moved_states),
            moved_bytes=sum(mode.moved_bytes for mode in taken),
        )

    def _moments(self) -> list[Row]:
        """Limit each moment: what earlier blocks left, plus what this one needs, minus moved states."""
        around, count, movable_bytes = self.around, len(self.blocks), self.around.movable_states_bytes
        held_bytes = around.fixed_bytes + movable_bytes + staged_bytes(around, movable_bytes)
        gradients, between = gradients_from(around, count, movable_bytes), _between(around, count)
        left: dict[int, float] = {}
        moments: list[tuple[dict[int, float], int]] = []  # coefficients, and bytes besides
        for index, (modes, start) in enumerate(self.blocks):
            if between[index]:
                moments.append((left, between[index] + gradients[index]))
            ways = list(enumerate(modes, start))
            moments.append((left | {column: mode.forward_peak_bytes / GIB for column, mode in ways}, 0))
            backward = left | {column: (mode.kept_bytes + mode.backward_peak_bytes) / GIB for column, mode in ways}
            moments.append((backward, around.outside.kept_bytes + gradients[index + 1]))
            left = left | {column: mode.kept_bytes / GIB for column, mode in ways}
        moments.append((left, around.outside.peak_bytes))
        moments += [({}, around.outside.stem_peak_bytes + gradients[0]), ({}, around.step_peak_bytes)]
        room = around.budget_bytes - held_bytes
        return [(found | {self.states: -1.0}, -np.inf, (room - extra) / GIB) for found, extra in moments]

    def _links(self) -> list[Row]:
        """Constrain exposed seconds to at least the link time beyond the blocks' compute time."""
        around, rate = self.around, self.around.link_bytes_per_s
        out = {column: mode.moved_bytes / rate - mode.forward_s for column, mode in self.modes}
        back = {column: mode.moved_bytes / rate - mode.backward_s for column, mode in self.modes}
        states = {self.states: around.states_s_per_byte * GIB, self.late_states: -1.0}
        host = {column: mode.moved_bytes / GIB for column, mode in self.modes} | {self.states: 1.0}
        return [
            (out | {self.late_out: -1.0}, -np.inf, 0.0),
            (back | {self.late_in: -1.0}, -np.inf, 0.0),
            (states, -np.inf, around.states_window_s),
            (host, -np.inf, around.host_bytes / GIB),
        ]


def peak_of(taken: Sequence[BlockProfile], around: MemoryContext, moved_states_bytes: int = 0) -> int:
    """Return the peak over all moments of one micro-batch and the optimizer step."""
    states_bytes = around.movable_states_bytes - moved_states_bytes + staged_bytes(around, moved_states_bytes)
    base, gradients = around.fixed_bytes + states_bytes, gradients_from(around, len(taken), moved_states_bytes)
    left, highest = 0, max(around.step_peak_bytes, around.outside.stem_peak_bytes + gradients[0])
    between = _between(around, len(taken))
    for index, mode in enumerate(taken):
        if between[index]:
            highest = max(highest, left + between[index] + gradients[index])
        backward = mode.kept_bytes + mode.backward_peak_bytes + around.outside.kept_bytes + gradients[index + 1]
        highest = max(highest, left + mode.forward_peak_bytes, left + backward)
        left += mode.kept_bytes
    return base + max(highest, left + around.outside.peak_bytes)


def _between(around: MemoryContext, blocks: int) -> Sequence[int]:
    """Return the peak before each block; what runs before the first is the stem."""
    between = around.outside.between_peak_bytes
    return (0, *between) if between else (0,) * blocks


def gradients_from(around: MemoryContext, blocks: int, moved_bytes: int) -> list[int]:
    """Return the gradient bytes after each block's backward, first block first; last, those before any."""
    if not around.gradient_bytes:
        return list(around.passing_bytes or [0] * (blocks + 1))
    back = accumulate(reversed(around.gradient_bytes), initial=around.outside_gradient_bytes)
    at_most = math.inf
    if around.waiting_bytes is not None:
        at_most = min(around.waiting_bytes, round(moved_bytes * around.gradients_per_state))
    return [int(min(there, at_most)) for there in back][::-1]


def staged_bytes(around: MemoryContext, moved_bytes: int) -> int:
    """Return the GPU bytes that host states still need: pieces in transit."""
    room_bytes, largest_bytes = around.movable_states_bytes - moved_bytes, 0
    for states_bytes in around.parameter_states_bytes:
        stay_bytes = min(room_bytes, states_bytes)
        room_bytes -= stay_bytes
        largest_bytes = max(largest_bytes, states_bytes - stay_bytes)
    return STAGED_PIECES * min(PIECE_BYTES, largest_bytes)
