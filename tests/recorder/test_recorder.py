"""The hooks' log laid beside events: phases, modules and categories, without a GPU."""

from tonnage.ledger import Category
from tonnage.recorder.recorder import CUBLAS_BYTES, Entry, Log, LoggedPhases, attribute
from tonnage.recording.records import Allocation
from tonnage.recording.snapshot.phases import Origin

NOWHERE = Origin("script")


def block(
    born: int, died: int | None = None, address: int = 4096, phase: str = "forward", size: int = 512
) -> Allocation:
    return Allocation(0, address, size, size, 0, born, died, phase=phase)


def entry(time_us: float, category: Category, *addresses: int, only: Category | None = None) -> Entry:
    return Entry(time_us, "category", category=category, addresses=addresses, only=only)


def test_phases_and_steps_begin_with_the_first_event_after_their_mark() -> None:
    log = [Entry(10, "step", "1"), Entry(10, "phase", "forward"), Entry(30, "phase", "backward", line="train.py:9")]
    phases = LoggedPhases(log)
    phases.reach(NOWHERE, 5, 0)
    assert (phases.phase, phases.step) == ("setup", 0)
    phases.reach(NOWHERE, 20, 1)
    assert (phases.phase, phases.step, phases.line) == ("forward", 1, "")
    phases.reach(NOWHERE, 40, 2)
    assert (phases.phase, phases.line) == ("backward", "train.py:9")
    assert [(mark.sequence, mark.name) for mark in phases.marks] == [(1, "1"), (1, "forward"), (2, "backward")]


def test_a_block_has_the_module_that_was_at_work_when_it_was_made() -> None:
    phases = LoggedPhases([Entry(10, "module", context=1), Entry(20, "module", context=2)])
    phases.reach(NOWHERE, 15, 3)
    phases.reach(NOWHERE, 25, 5)
    blocks = [block(2, address=1), block(3, address=2), block(5, address=3), block(6, address=4, phase="backward")]
    attribute(blocks, phases, ["", "encoder", "decoder"])
    assert [b.module for b in blocks] == ["", "encoder", "decoder", ""]


def test_a_category_is_of_the_block_that_was_alive_then() -> None:
    phases = LoggedPhases([entry(20, Category.GRADIENTS, 4096)])
    phases.reach(NOWHERE, 30, 5)
    earlier, then, later = block(1, 3), block(4, 8), block(9)
    attribute([earlier, then, later], phases, [""])
    assert [b.category for b in (earlier, then, later)] == [
        Category.ACTIVATIONS, Category.GRADIENTS, Category.ACTIVATIONS,
    ]  # fmt: skip


def test_with_only_other_categories_are_left_alone() -> None:
    phases = LoggedPhases([entry(20, Category.INPUTS, 4096, only=Category.OTHER)])
    phases.finish(9)
    activation, other = block(1), block(1, address=8192, phase="other")
    attribute([activation, other], phases, [""])
    assert (activation.category, other.category) == (Category.ACTIVATIONS, Category.OTHER)


def test_what_nothing_came_between_was_inside_one_operator() -> None:
    phases, temporary = LoggedPhases([]), block(1, 2)
    attribute([temporary], phases, [""])
    assert temporary.category is Category.WORKSPACE


def test_cublas_keeps_one_block_for_each_thread() -> None:
    size = CUBLAS_BYTES[0]
    passing = block(0, died=20, size=size, address=9)
    first, second = block(1, size=size, address=1), block(3, size=size, address=2)
    behind = block(5, size=size, address=3, phase="backward")
    attribute([passing, first, second, behind], LoggedPhases([]), [""])
    kinds = [b.category for b in (passing, first, second, behind)]
    assert kinds == [Category.ACTIVATIONS, Category.WORKSPACE, Category.ACTIVATIONS, Category.WORKSPACE]


def test_the_log_keeps_times_in_order_and_repeats_addresses_once() -> None:
    log = Log(most_entries=3)
    log.held_line = "train.py:9"
    log.mark("phase", "backward")
    for _ in range(3):
        log.categorise(Category.GRADIENTS, [1, 2], None)
    log.at_module(4)
    kinds = [e.kind for e in log.entries]
    assert kinds == ["category", "category", "module"]
    assert log.entries[0].addresses is log.entries[1].addresses
    assert [e.time_us for e in log.entries] == sorted(e.time_us for e in log.entries)
