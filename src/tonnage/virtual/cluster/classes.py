"""Groups equivalent ranks into classes, so that one rank of each class runs and represents the others.

Two ranks are equivalent if they have the same place in every group. In a group whose ranks send messages to each
other, every place is distinct (pipeline stages differ); in any other, the first and the last differ from the rest
(uneven shards, work that only the first of a group or host does). If that makes too many classes, only the first
differs, then none; a ring of very many ranks does not count as a pipeline.
"""

import random
from collections.abc import Iterable, Mapping, Sequence

Ranks = tuple[int, ...]
_MOST_CLASSES = 24
_MOST_STAGES = 64
_FINENESS = (("first", "last"), ("first",), ())


def stand_ins(world: int, per_host: int, groups: Sequence[Ranks], with_messages: Iterable[Ranks]) -> dict[int, int]:
    """Map each rank to its representative, the lowest rank of its class."""
    hosts = [tuple(range(start, start + per_host)) for start in range(0, world, per_host)]
    every = [*dict.fromkeys(groups), *(hosts if len(hosts) > 1 else ())]
    staged = {_family(ranks) for ranks in with_messages}
    for told_apart in _FINENESS:
        standing = _standing(world, every, staged, told_apart)
        if len(set(standing.values())) <= _MOST_CLASSES:
            return standing
    if len(set(standing.values())) <= _MOST_STAGES or not staged:
        return standing
    return stand_ins(world, per_host, groups, ())


def checks(standing: Mapping[int, int], count: int, seed: int = 0) -> list[int]:
    """Sample up to `count` ranks that do not run, to verify that their representatives behave like them."""
    stood_for = [rank for rank, other in standing.items() if rank != other]
    return sorted(random.Random(seed).sample(stood_for, min(count, len(stood_for))))


def nearest(standing: Mapping[int, int], more: Iterable[int]) -> dict[int, int]:
    """Return the mapping with more ranks running: each represents the ranks of its class from itself up to the next one."""
    by_class: dict[int, int] = dict.fromkeys(set(standing.values()), -1)
    running, result = {*standing.values(), *more}, {}
    for rank, other in sorted(standing.items()):
        if rank in running:
            by_class[other] = rank
        result[rank] = by_class[other]
    return result


def _standing(world: int, groups: Sequence[Ranks], staged: set[Ranks], told_apart: tuple[str, ...]) -> dict[int, int]:
    places: dict[int, list[object]] = {rank: [] for rank in range(world)}
    for ranks in groups:
        family = _family(ranks)
        ends = {"first": 0, "last": len(ranks) - 1}
        for index, rank in enumerate(ranks):
            named = next((end for end in told_apart if index == ends[end]), "")
            places[rank].append((family, index if family in staged else named))
    first: dict[tuple[object, ...], int] = {}
    return {rank: first.setdefault(tuple(found), rank) for rank, found in places.items()}


def _family(ranks: Ranks) -> Ranks:
    """Return the ranks relative to the first: groups along one mesh dimension differ only in their start."""
    return tuple(rank - ranks[0] for rank in ranks)
