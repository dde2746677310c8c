"""Collectives as they are told to whoever captures a step."""

import pytest

from tonnage.script import profiler
from tonnage.virtual.cluster.calls import ProcessGroup
from tonnage.virtual.cluster.work import CollectiveNotes

WORLD, HALF = ProcessGroup(tuple(range(8)), 0, 0, "nccl"), ProcessGroup((1, 3, 5, 7), 0, 1, "nccl")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    monkeypatch.setattr(profiler, "note", lambda *words: found.append(words))
    return found


def test_a_group_has_a_lane_and_its_ranks_a_distance(told: list[tuple[object, ...]]) -> None:
    notes = CollectiveNotes()
    notes.called(WORLD, "all_reduce", 4096)
    notes.called(HALF, "all_gather_into_tensor", 512)
    notes.called(WORLD, "broadcast", 64)
    assert told == [
        ("collective", "all_reduce", 1, 4096, 8, 1, 1),
        ("collective", "all_gather_into_tensor", 2, 512, 4, 2, 2),
        ("collective", "broadcast", 3, 64, 8, 1, 1),
    ]


def test_messages_with_a_peer_have_a_lane_of_their_own(told: list[tuple[object, ...]]) -> None:
    notes = CollectiveNotes()
    notes.called(WORLD, "send", 128, (0, 4))
    assert told == [("collective", "send", 1, 128, 2, 4, 1)]


def test_who_waits_is_told_and_host_tensors_are_not(told: list[tuple[object, ...]]) -> None:
    notes = CollectiveNotes()
    assert notes.called(WORLD, "all_reduce", 0) is None
    noted = notes.called(WORLD, "all_reduce", 8)
    assert noted is not None
    noted.waited()
    noted.promised()
    assert told[1:] == [("stream", "wait_collective", 1), ("stream", "future_collective", 1)]
