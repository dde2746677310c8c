"""Choose which operators of a block to save and which to rerun: for each byte level, the fastest choice.

Plain arithmetic over profiled operators; it does not know torch, or more than one block.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.optimize import Bounds, milp

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
    groups = _groups(operators)
    least = sum(group.root.output_bytes for group in groups if group.forced)
    read = (group.root.output_bytes for group in groups if group.root.kept_bytes and group.root.keepable)
    most = max(least, sum(read))
    limits = sorted({least + (most - least) * level // levels for level in range(levels + 1)})
    solved = [_fastest(operators, groups, limit, input_bytes) for limit in limits]
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


def _fastest(
    operators: Sequence[OperatorProfile], groups: Sequence[_Group], limit_bytes: int, input_bytes: int
) -> OperatorChoice | None:
    """Return the fastest choice that keeps at most so many bytes: binary `keep`, and `again` in [0, 1], per storage.

    again[i] >= 1 - keep[i]               if backward reads i
    again[j] >= again[i] - keep[j]        if i reads j
    """
    if not groups:
        return OperatorChoice(kept=(), mode=[], kept_bytes=input_bytes, seconds=0.0)
    count, places = len(groups), {group.root.index: place for place, group in enumerate(groups)}
    rows: list[Row] = []
    for place, group in enumerate(groups):
        if group.root.kept_bytes:
            rows.append(({place: 1.0, count + place: 1.0}, 1.0, np.inf))
        for at in (places[source] for source in group.inputs):
            rows.append(({at: 1.0, count + at: 1.0, count + place: -1.0}, 0.0, np.inf))
    sizes = np.array([group.root.output_bytes for group in groups], dtype=float)
    unit = max(float(sizes.max()), 1.0)
    rows.append((dict(enumerate(sizes / unit)), -np.inf, limit_bytes / unit + 1e-9))
    seconds = np.array([group.seconds for group in groups])
    may_keep = np.array([group.root.keepable or group.forced for group in groups], dtype=float)
    must_keep = np.array([group.forced for group in groups], dtype=float)
    result = milp(
        np.append(np.zeros(count), seconds / max(seconds.sum(), 1e-12)),
        integrality=np.repeat([1, 0], count),
        bounds=Bounds(np.append(must_keep, np.zeros(count)), np.append(may_keep, np.ones(count))),
        constraints=linear_constraint(rows, 2 * count),
    )
    if result.x is None:
        return None

    def again_s(kept: set[int]) -> float:
        return sum(operators[index].seconds for index in sorted(needed(operators, kept)))

    # Drop what need not be saved: within the solver's tolerance, small storages are saved for nothing.
    chosen = {group.root.index for group, keep in zip(groups, result.x[:count], strict=True) if keep > 0.5}
    for index in sorted(chosen - {group.root.index for group in groups if group.forced}):
        if again_s(chosen - {index}) <= again_s(chosen):
            chosen = chosen - {index}
    kept = [operators[index] for index in sorted(chosen)]
    return OperatorChoice(
        kept=tuple(root.index for root in kept),
        mode=[f"{root.index}:{root.name}" for root in kept],
        kept_bytes=input_bytes + sum(root.output_bytes for root in kept),
        seconds=again_s(chosen),
    )
