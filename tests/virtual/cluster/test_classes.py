"""Which ranks stand for which: meshes of any shape."""

from hypothesis import given
from hypothesis import strategies as st

from tonnage.virtual.cluster.cluster import checks, nearest, stand_ins

meshes = st.lists(st.integers(1, 8), min_size=1, max_size=3)


def groups_of(mesh: list[int]) -> list[tuple[int, ...]]:
    """The groups of a mesh: the world, then one family a dimension."""
    world = 1
    for extent in mesh:
        world *= extent
    groups, step = [tuple(range(world))], world
    for extent in mesh:
        step //= extent
        starts = [rank for rank in range(world) if rank // step % extent == 0]
        groups += [tuple(start + i * step for i in range(extent)) for start in starts]
    return groups


@given(meshes)
def test_who_stands_for_others_stands_for_itself(mesh: list[int]) -> None:
    groups = groups_of(mesh)
    world = len(groups[0])
    standing = stand_ins(world, world, groups, [])
    assert list(standing) == list(range(world))
    assert all(standing[other] == other for other in standing.values())
    assert all(other <= rank for rank, other in standing.items())
    assert standing[0] == 0


@given(meshes)
def test_stages_are_never_stood_for_by_another_stage(mesh: list[int]) -> None:
    groups = groups_of([4, *mesh])
    world = len(groups[0])
    pipeline = next(group for group in groups if len(group) == 4 and group[1] - group[0] == world // 4)
    standing = stand_ins(world, world, groups, [pipeline])
    per_stage = world // 4
    assert all(rank // per_stage == other // per_stage for rank, other in standing.items())


@given(st.integers(3, 2000))
def test_of_one_group_the_first_and_the_last_are_their_own(world: int) -> None:
    standing = stand_ins(world, world, [tuple(range(world))], [])
    assert set(standing.values()) == {0, 1, world - 1} if world > 2 else {0, world - 1}


def test_too_many_classes_are_made_fewer() -> None:
    groups = groups_of([8, 8, 8, 2])
    assert len(set(stand_ins(1024, 8, groups, []).values())) <= 24


def test_a_ring_of_very_many_ranks_is_no_pipeline() -> None:
    world = tuple(range(1024))
    assert len(set(stand_ins(1024, 8, [world], [world]).values())) <= 24
    assert len(set(stand_ins(32, 8, [world[:32]], [world[:32]]).values())) == 32


@given(meshes, st.integers(0, 6), st.integers(0, 3))
def test_more_ranks_stand_for_their_own_class_only(mesh: list[int], count: int, seed: int) -> None:
    groups = groups_of(mesh)
    world = len(groups[0])
    standing = stand_ins(world, world, groups, [])
    more = checks(standing, count, seed)
    finer = nearest(standing, more)
    assert set(finer.values()) == {*standing.values(), *more}
    assert all(standing[rank] == standing[other] and other <= rank for rank, other in finer.items())
