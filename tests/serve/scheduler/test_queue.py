from hypothesis import given
from hypothesis import strategies as st

from tonnage.serve.sampling import Sampling
from tonnage.serve.scheduler.queue import FinishRate, Queue
from tonnage.serve.scheduler.sequence import Sequence


def sequence(number: int = 0, salt: str = "", parent: Sequence | None = None, rank: int = -1) -> Sequence:
    return Sequence(number, [1], Sampling(), 1, salt=salt, parent=parent, rank=rank)


def emptied(queue: Queue) -> list[int]:
    """The numbers of those who wait, in the order in which they are admitted."""
    order = []
    while (first := queue.first()) is not None:
        queue.pop()
        order.append(first.id)
    return order


def test_a_tenant_with_many_does_not_keep_the_others_waiting() -> None:
    queue = Queue()
    for number, salt in enumerate("aaaabbc"):
        queue.add(sequence(number, salt))
    assert emptied(queue) == [0, 4, 6, 1, 5, 2, 3]


def test_who_leaves_does_not_cost_the_tenant_its_turn() -> None:
    queue = Queue()
    a, b = [sequence(number, "a") for number in (0, 1)], [sequence(number, "b") for number in (2, 3)]
    for each in (*a, *b):
        queue.add(each)
    queue.remove(a[0])
    assert emptied(queue) == [1, 2, 3]


def test_the_preempted_go_first_and_the_oldest_of_them_before_all() -> None:
    queue = Queue()
    queue.add(sequence(0))
    for number, rank in ((1, 7), (2, 3), (3, 5)):
        queue.put_back(sequence(number, rank=rank))
    assert (len(queue), queue.fresh) == (4, 1)
    assert emptied(queue) == [2, 3, 1, 0]


def test_draws_stand_aside_until_they_are_called_and_are_next_then() -> None:
    queue = Queue()
    parent, other = sequence(0), sequence(9)
    siblings = [sequence(number, parent=parent) for number in (1, 2)]
    queue.add(other)
    for sibling in siblings:
        queue.add(sibling, aside=True)
    assert queue.first() is other and len(queue) == 3 and siblings[0] in queue
    queue.remove(siblings[0])
    assert siblings[0] not in queue
    queue.call(parent)
    queue.call(parent)
    assert emptied(queue) == [2, 9]
    assert len(queue) == 0


def test_an_empty_queue() -> None:
    queue = Queue()
    assert (queue.first(), len(queue), list(queue), sequence() in queue) == (None, 0, [], False)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans())), st.lists(st.integers(0, 20), unique=True))
def test_all_who_wait_are_counted_listed_and_served_once(tenants: list[tuple[str, bool]], gone: list[int]) -> None:
    queue, parent = Queue(), sequence(-1, "b")
    everyone = [sequence(number, salt, parent) for number, (salt, _) in enumerate(tenants)]
    for each, (_, aside) in zip(everyone, tenants, strict=True):
        queue.add(each, aside=aside)
    for number in gone:
        if number < len(everyone):
            queue.remove(everyone[number])
    left = {each.id for each in everyone} - set(gone)
    assert {each.id for each in queue} == left and len(queue) == len(left) == queue.fresh
    assert all((each in queue) == (each.id in left) for each in everyone)
    queue.call(parent)
    order = emptied(queue)
    assert sorted(order) == sorted(left) and len(queue) == 0


def test_the_time_to_come_back_is_that_in_which_half_the_queue_is_served() -> None:
    pace = FinishRate()
    assert pace.retry_after_s(100) == 1.0
    for second in range(10):
        pace.note(float(second))
    assert pace.retry_after_s(100) == 50.0
    assert pace.retry_after_s(10_000) == 60.0
    assert pace.retry_after_s(1) == 1.0


@given(st.lists(st.floats()), st.integers(0, 10**6))
def test_no_clock_makes_it_less_than_a_second_or_more_than_a_minute(times_s: list[float], waiting: int) -> None:
    pace = FinishRate()
    for time_s in times_s:
        pace.note(time_s)
    assert 1.0 <= pace.retry_after_s(waiting) <= 60.0
