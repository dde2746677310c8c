"""Choose which operators of a block to save and which to rerun: for each byte level, the fastest choice.

Plain arithmetic over profiled operators; it does not know torch, or more than one block.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from tonnage.fit.choose.choosing import Row, linear_constraint
from tonnage.fit.survey.profile import OperatorProfile

_LEVELS = 24  # byte levels between saving nothing and saving everything


@dataclass(frozen=True, kw_only=True)
class OperatorChoice:
    """One way to recompute a block: the outputs of `kept` stay, the rest runs again."""

    kept: tuple[int, ...]
    mode: list[str]  # for `Recompute(modes=...)`: each index with the operator name expected there
    kept_bytes: int  # including the block's input
    seconds: float  # of what runs again


@dataclass(frozen=True)
class _Group:
    """An operator that allocates a storage, with those that write into it: saved or rerun together."""

    root: OperatorProfile
    seconds: float
    inputs: frozenset[int]
    forced: bool  # cannot run again


def frontier(
    operators: Sequence[OperatorProfile], input_bytes: int, levels: int = _LEVELS
) -> tuple[OperatorChoice, ...]:
    """Return choices from the fewest bytes to the most; each one with more bytes takes strictly less time."""
    program = _KeepProgram(operators, _groups(operators))
    least, most = program.least_bytes, program.most_bytes
    limits = sorted({least + (most - least) * level // levels for level in range(levels + 1)})
    solved = [program.solve(limit, input_bytes) for limit in limits]
    found: list[OperatorChoice] = []
    for choice in sorted((c for c in solved if c is not None), key=lambda c: (c.kept_bytes, c.seconds)):
        if not found or choice.seconds < found[-1].seconds:
            found.append(choice)
    assert all(a.kept_bytes < b.kept_bytes for a, b in pairwise(found))
    return tuple(found)


def _groups(operators: Sequence[OperatorProfile]) -> list[_Group]:
    writers: dict[int, list[OperatorProfile]] = {}
    for operator in operators:
        if operator.writes and operator.base is not None:
            writers.setdefault(operator.base, []).append(operator)
    groups = []
    for root in (operator for operator in operators if operator.output_bytes):
        members = (root, *writers.get(root.index, []))
        seconds = sum(member.seconds for member in members)
        inputs = frozenset(index for member in members for index in member.inputs) - {root.index}
        groups.append(_Group(root, seconds, inputs, forced=not all(member.repeatable for member in members)))
    return groups


def needed(operators: Sequence[OperatorProfile], kept: Collection[int], always: Iterable[int] = ()) -> frozenset[int]:
    """Return the operators that must run again for backward if `kept` stay. Views are free and not included."""
    groups = {group.root.index: group for group in _groups(operators)}
    wanted = [index for index, group in groups.items() if group.root.kept_bytes]
    found = {index for index in always if index not in groups}
    wanted += [index for index in always if index in groups]
    wanted += [source for index in found for source in operators[index].inputs]
    while wanted:
        index = wanted.pop()
        if index in kept or index in found:
            continue
        found.add(index)
        wanted.extend(groups[index].inputs)
    return frozenset(found | {o.index for o in operators if o.writes and o.base in found})


class _KeepProgram:
    """An integer program with binary `keep`, and `again` in [0, 1], for each storage that the block allocates.

    again[i] >= 1 - keep[i]               if backward reads i
    again[j] >= again[i] - keep[j]        if i reads j
    """

    def __init__(self, operators: Sequence[OperatorProfile], groups: Sequence[_Group]) -> None:
        self._operators = operators
        self._groups = groups
        self._bytes = np.array([group.root.output_bytes for group in groups], dtype=float)
        self._seconds = np.array([group.seconds for group in groups])
        self._may_keep = np.array([group.root.keepable or group.forced for group in groups], dtype=float)
        self._must_keep = np.array([group.forced for group in groups], dtype=float)
        read = [group for group in groups if group.root.kept_bytes and group.root.keepable]
        self.least_bytes = int(self._bytes @ self._must_keep)
        self.most_bytes = max(self.least_bytes, sum(group.root.output_bytes for group in read))
        count, places = len(groups), {group.root.index: place for place, group in enumerate(groups)}
        rows: list[Row] = []
        for place, group in enumerate(groups):
            if group.root.kept_bytes:
                rows.append(({place: 1.0, count + place: 1.0}, 1.0, np.inf))
            for at in (places[source] for source in group.inputs):
                rows.append(({at: 1.0, count + at: 1.0, count + place: -1.0}, 0.0, np.inf))
        self._dependencies = linear_constraint(rows, 2 * count)

    def solve(self, limit_bytes: int, input_bytes: int) -> OperatorChoice | None:
        count = len(self._groups)
        if not count:
            return OperatorChoice(kept=(), mode=[], kept_bytes=input_bytes, seconds=0.0)
        scale = max(self._seconds.sum(), 1e-12)
        unit = max(float(self._bytes.max()), 1.0)
        row = np.append(self._bytes / unit, np.zeros(count)).reshape(1, -1)
        budget = LinearConstraint(row, ub=np.array([limit_bytes / unit + 1e-9]))
        result = milp(
            np.append(np.zeros(count), self._seconds / scale),
            integrality=np.repeat([1, 0], count),
            bounds=Bounds(
                np.concatenate([self._must_keep, np.zeros(count)]), np.append(self._may_keep, np.ones(count))
            ),
            constraints=[self._dependencies, budget],
        )
        if result.x is None:
            return None
        keep = result.x[:count] > 0.5
        chosen = {group.root.index for group, is_kept in zip(self._groups, keep, strict=True) if is_kept}
        # Drop what need not be saved: within the solver's tolerance, small storages are saved for nothing.
        forced = {group.root.index for group in self._groups if group.forced}
        for index in sorted(chosen - forced):
            if self._again_s(chosen - {index}) <= self._again_s(chosen):
                chosen = chosen - {index}
        kept = [self._operators[index] for index in sorted(chosen)]
        return OperatorChoice(
            kept=tuple(root.index for root in kept),
            mode=[f"{root.index}:{root.name}" for root in kept],
            kept_bytes=input_bytes + sum(root.output_bytes for root in kept),
            seconds=self._again_s({root.index for root in kept}),
        )

    def _again_s(self, kept: set[int]) -> float:
        return sum(self._operators[index].seconds for index in sorted(needed(self._operators, kept)))
