"""The environment of a rank, as torchrun makes it."""

from hypothesis import given
from hypothesis import strategies as st

from tonnage.hardware.cluster import find_cluster
from tonnage.virtual.cluster.rank import environment_of


@given(st.integers(1, 5), st.integers(1, 8), st.data())
def test_every_rank_has_its_place(hosts: int, cards: int, data: st.DataObject) -> None:
    cluster = find_cluster(f"{hosts}x{cards}xh100")
    rank = data.draw(st.integers(0, cluster.gpus - 1))
    found = environment_of(rank, cluster)
    assert int(found["GROUP_RANK"]) * int(found["LOCAL_WORLD_SIZE"]) + int(found["LOCAL_RANK"]) == rank
    assert (found["RANK"], found["WORLD_SIZE"]) == (str(rank), str(hosts * cards))
