"""The meeting place of ranks, without processes: who is answered, who is refused, and with what words."""

from typing import Any

from tonnage.virtual.cluster.exchange import Collective, ProcessGroup, SendReceive
from tonnage.virtual.cluster.hub import Hub

WORLD = ProcessGroup((0, 1), 0, 0, "nccl")


class Rank:
    """One end of a line: calls, and the answers so far."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub, self.rank, self.answers = hub, rank, []

    def says(self, *words: Any) -> None:
        self.hub.hear(self.rank, words, self.answers.append)

    def reduces(self, payload: Any, number: int = 0, group: ProcessGroup = WORLD, **changes: Any) -> Collective:
        given = {"operation": "all_reduce", "shapes": ((8,),), "dtype": "int64", "line": f"train.py:{10 + self.rank}"}
        call = Collective(self.rank, group, number, **(given | changes))
        self.says("contribute", call, payload)
        return call


def ranks_of(standing: dict[int, int]) -> tuple[Hub, list[Rank]]:
    hub = Hub(standing)
    return hub, [Rank(hub, rank) for rank in sorted(set(standing.values()))]


def message(rank: int, source: int, target: int, *, is_send: bool, elements: int = 4) -> SendReceive:
    return SendReceive(rank, WORLD, source, target, 0, elements, "int64", "train.py:5", is_send)


def test_whoever_collects_waits_for_all_parts() -> None:
    _, (zero, one) = ranks_of({0: 0, 1: 1})
    zero.says("collect", zero.reduces("a"))
    assert zero.answers == []
    one.reduces("b")
    assert zero.answers == [("ok", (["a", "b"], [0, 1]))]


def test_a_rank_that_does_not_run_gives_what_its_stand_in_gives() -> None:
    wide = ProcessGroup((0, 1, 2, 3), 0, 0, "nccl")
    _, (zero, one) = ranks_of({0: 0, 1: 1, 2: 1, 3: 1})
    zero.says("collect", zero.reduces("a", group=wide))
    one.reduces("b", group=wide)
    assert zero.answers == [("ok", (["a", "b"], [0, 1, 1, 1]))]


def test_a_stand_in_of_another_group_gives_its_part_there() -> None:
    here, there = ProcessGroup((0, 1), 0, 1, "nccl"), ProcessGroup((2, 3), 0, 1, "nccl")
    _, (zero, three) = ranks_of({0: 0, 1: 3, 2: 0, 3: 3})
    zero.says("collect", zero.reduces("a", group=here))
    three.reduces("d", group=there)
    assert zero.answers == [("ok", (["a", "d"], [0, 1]))]


def test_values_of_long_before_are_let_go() -> None:
    hub, (zero, one) = ranks_of({0: 0, 1: 1})
    for number in range(200):
        calls = [zero.reduces("a", number), one.reduces("b", number)]
        zero.says("collect", calls[0])
        one.says("collect", calls[1])
    assert zero.answers == one.answers == [("ok", (["a", "b"], [0, 1]))] * 200
    held = [payload for parts in hub._parts.values() for _, payload in parts.values() if payload in ("a", "b")]
    assert len(held) < 300


def test_two_ranks_of_a_group_that_disagree_are_named_with_both_lines() -> None:
    hub, (zero, one) = ranks_of({0: 0, 1: 1})
    zero.reduces("a")
    one.reduces("b", shapes=((9,),))
    assert "rank 0 calls all_reduce of int64 [8] at train.py:10" in hub.journal.trouble
    assert "rank 1 calls all_reduce of int64 [9] at train.py:11" in hub.journal.trouble


def test_ranks_of_different_groups_may_differ() -> None:
    hub, (zero, two) = ranks_of({0: 0, 1: 0, 2: 2, 3: 2})
    zero.reduces("a", group=ProcessGroup((0, 1), 0, 1, "nccl"))
    two.reduces("b", group=ProcessGroup((2, 3), 0, 1, "nccl"), shapes=((9,),))
    assert hub.journal.trouble == ""


def test_gathered_lists_may_be_uneven() -> None:
    hub, (zero, one) = ranks_of({0: 0, 1: 1})
    zero.reduces("a", operation="all_gather")
    one.reduces("b", operation="all_gather", shapes=((9,),))
    assert hub.journal.trouble == ""


def test_who_waits_for_an_ended_rank_is_told() -> None:
    hub, (zero, _) = ranks_of({0: 0, 1: 1})
    zero.says("collect", zero.reduces("a"))
    hub.end(1, "")
    ((kind, words),) = zero.answers
    assert kind == "fail"
    assert words == hub.journal.trouble
    assert "waits for rank 1, which has ended" in words


def test_who_waits_for_a_failed_rank_is_not_the_trouble() -> None:
    hub, (zero, _) = ranks_of({0: 0, 1: 1})
    hub.end(1, "ran out of memory")
    zero.says("collect", zero.reduces("a"))
    assert zero.answers[0][0] == "fail"
    assert hub.journal.trouble == ""


def test_everybody_waiting_is_a_circle() -> None:
    hub, (zero, one) = ranks_of({0: 0, 1: 1})
    zero.says("receive", message(0, 1, 0, is_send=False))
    one.says("receive", message(1, 0, 1, is_send=False))
    assert [answer[0] for answer in zero.answers + one.answers] == ["fail", "fail"]
    assert hub.journal.trouble.startswith("Nobody goes on: rank 0 receives 4 elements of int64 from rank 1")


def test_a_message_arrives_whoever_comes_first() -> None:
    for first in ("send", "receive"):
        hub, (zero, one) = ranks_of({0: 0, 1: 1})
        if first == "receive":
            one.says("receive", message(1, 0, 1, is_send=False))
        zero.says("tell", message(0, 0, 1, is_send=True), "values")
        if first == "send":
            one.says("receive", message(1, 0, 1, is_send=False))
        assert one.answers == [("ok", "values")]
        assert hub.journal.with_messages == {(0, 1)}


def test_a_message_of_another_size_is_named() -> None:
    hub, (zero, one) = ranks_of({0: 0, 1: 1})
    zero.says("tell", message(0, 0, 1, is_send=True), None)
    one.says("tell", message(1, 0, 1, is_send=False, elements=8), None)
    assert "rank 0 sends 4 elements" in hub.journal.trouble
    assert "rank 1 receives 8 elements" in hub.journal.trouble


def test_a_collective_that_a_peer_never_calls_shows_at_the_end() -> None:
    hub, (zero, one) = ranks_of({0: 0, 1: 1})
    zero.reduces(None)
    one.reduces(None)
    zero.reduces(None, number=1)
    hub.end(0, "")
    hub.end(1, "")
    assert (
        "rank 0 calls all_reduce of int64 [8] at train.py:10 and waits for rank 1, which has ended "
        "(its last call: all_reduce of int64 [8] at train.py:11)"
    ) in hub.unmatched()


def test_a_message_that_nobody_receives_shows_at_the_end() -> None:
    hub, (zero, _) = ranks_of({0: 0, 1: 1})
    zero.says("tell", message(0, 0, 1, is_send=True), None)
    assert "which never receives it" in hub.unmatched()


def test_counts_in_the_store_count_for_all_who_are_stood_for() -> None:
    _, (zero, one) = ranks_of({0: 0, 1: 1, 2: 1, 3: 1})
    one.says("keep", "add", "here", 1)
    zero.says("keep", "add", "here", 1)
    assert (one.answers, zero.answers) == ([("ok", 3)], [("ok", 4)])


def test_a_key_that_nobody_sets_is_a_circle() -> None:
    hub, (zero, one) = ranks_of({0: 0, 1: 1})
    zero.says("keep", "get", "word", None)
    one.says("keep", "set", "word", b"hello")
    assert zero.answers == [("ok", b"hello")]
    zero.says("keep", "get", "other", None)
    one.says("keep", "get", "third", None)
    assert "reads 'other' from the store" in hub.journal.trouble


# Who joins later


def joined(given: str) -> tuple[Hub, Rank, Rank]:
    """Rank 0 was answered for all three; then rank 2, for whom rank 1 stood, joins and gives something."""
    wide = ProcessGroup((0, 1, 2), 0, 0, "nccl")
    hub, (zero, one) = ranks_of({0: 0, 1: 1, 2: 1})
    one.reduces("b", group=wide)
    zero.says("collect", zero.reduces("a", group=wide))
    hub.join({0: 0, 1: 1, 2: 2})
    two = Rank(hub, 2)
    two.says("collect", two.reduces(given, group=wide))
    return hub, zero, two


def test_who_joins_late_and_gives_the_same_is_answered_from_what_was_kept() -> None:
    hub, zero, two = joined("b")
    assert zero.answers == [("ok", (["a", "b"], [0, 1, 1]))]
    assert two.answers == [("ok", (["a", "b", "b"], [0, 1, 2]))]
    assert not hub.journal.stale


def test_who_joins_late_and_gives_something_else_makes_the_round_stale() -> None:
    assert joined("c")[0].journal.stale


def test_new_groups_make_more_ranks_run_once_one_of_them_is_used() -> None:
    widened = []

    def widen(standing: Any, journal: Any) -> dict[int, int]:
        widened.append(list(journal.groups))
        return {0: 0, 1: 1}

    hub = Hub({0: 0, 1: 0}, widen)
    zero = Rank(hub, 0)
    zero.says("made", (0, 1))
    zero.says("made", (0,))
    assert hub.running == {0}
    zero.says("collect", zero.reduces("a"))
    assert (hub.running, widened, zero.answers) == ({0, 1}, [[(0, 1), (0,)]], [])
    Rank(hub, 1).reduces("b")
    assert zero.answers == [("ok", (["a", "b"], [0, 1]))]


def test_who_asks_again_and_again_is_named_once_all_others_wait() -> None:
    hub, (zero, one) = ranks_of({0: 0, 1: 1})
    zero.says("keep", "check", "ready", "train.py:3")
    assert hub.nobody_answers() == ""
    one.says("collect", one.reduces("b"))
    assert "rank 0 asks for 'ready' in the store at train.py:3 again and again" in hub.nobody_answers()
    one.says("keep", "set", "ready", b"1")
    zero.says("keep", "check", "ready", "train.py:3")
    assert hub.nobody_answers() == ""
