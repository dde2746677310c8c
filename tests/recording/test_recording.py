from hypothesis import given
from hypothesis import strategies as st

from support import MIB, Run, training_run
from tonnage.ledger import Category
from tonnage.recording import Recording, module_pattern

# Each number is a size to allocate, or, where negative, which of the living blocks to free.
programs = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 40 * MIB), st.sampled_from(Category)),
        st.tuples(st.integers(-10, -1), st.just(Category.OTHER)),
    ),
    max_size=60,
)


def recorded(program: list[tuple[int, Category]]) -> tuple[Run, Recording]:
    run, living = Run(), []
    for number, category in program:
        if number > 0:
            living.append(run.alloc(number, category))
        elif living:
            run.free(living.pop(number % len(living)))
    return run, run.recording


@given(programs)
def test_the_peaks_are_the_allocator_s_own(program: list[tuple[int, Category]]) -> None:
    run, recording = recorded(program)
    stats = run.allocator.memory_stats()
    assert recording.peak_allocated_bytes == stats["allocated_bytes.all.peak"]
    assert recording.peak_reserved_bytes == stats["reserved_bytes.all.peak"]


@given(programs)
def test_the_ledger_sums_to_the_peak_exactly(program: list[tuple[int, Category]]) -> None:
    _, recording = recorded(program)
    assert recording.ledger().total_bytes == recording.peak_allocated_bytes
    assert sum(a.block_bytes for a in recording.live_at_peak) == recording.peak_allocated_bytes
    assert sum(group.total_bytes for group in recording.largest(1000)) == recording.peak_allocated_bytes


@given(programs)
def test_events_come_in_order_and_each_free_after_its_allocation(program: list[tuple[int, Category]]) -> None:
    _, recording = recorded(program)
    events = list(recording.events())
    assert [sequence for sequence, _, _ in events] == sorted(sequence for sequence, _, _ in events)
    living = set()
    for _, action, allocation in events:
        assert allocation is not None
        (living.add if action == "alloc" else living.remove)(allocation.index)


def test_an_empty_recording_has_peaks_of_nothing() -> None:
    recording = Run().recording
    assert recording.peak_allocated_bytes == recording.peak_reserved_bytes == recording.unused_at_peak_bytes == 0
    assert recording.peak_allocation is None
    assert recording.largest() == recording.live_at_peak == []
    assert [phase.peak_allocated_bytes for phase in recording.phases] == [0]


def test_process_bytes_add_what_the_allocator_does_not_see() -> None:
    run = Run(overhead_bytes=700 * MIB)
    run.alloc(30 * MIB)
    assert run.recording.peak_process_bytes == 730 * MIB


def test_phases_and_steps_have_peaks_of_their_own() -> None:
    run = Run()
    run.alloc(2 * MIB)
    run.step(1)
    run.phase("forward")
    saved = run.alloc(20 * MIB)
    run.phase("backward")
    run.free(saved, run.alloc(10 * MIB))
    run.step(2)
    run.phase("forward")
    run.free(run.alloc(40 * MIB))
    peaks = {phase.name: phase.peak_allocated_bytes // MIB for phase in run.recording.phases}
    assert peaks == {"setup": 2, "forward": 42, "backward": 32}
    steps = {step.step: step for step in run.recording.steps}
    assert {number: step.peak_allocated_bytes // MIB for number, step in steps.items()} == {0: 2, 1: 32, 2: 42}
    assert [(phase.name, phase.peak_allocated_bytes // MIB) for phase in steps[1].phases] == [
        ("forward", 22),
        ("backward", 32),
    ]


def test_a_phase_that_only_frees_still_had_what_it_found() -> None:
    run = Run()
    block = run.alloc(20 * MIB)
    run.phase("backward")
    run.free(block)
    assert {p.name: p.peak_allocated_bytes for p in run.recording.phases}["backward"] == 20 * MIB


def test_unused_bytes_are_those_of_the_reserved_peak() -> None:
    run = Run()
    blocks = [run.alloc(20 * MIB) for _ in range(3)]
    run.free(*blocks[:2])
    run.alloc(50 * MIB)
    assert run.recording.peak_reserved_bytes == 110 * MIB
    assert run.recording.unused_at_peak_bytes == 40 * MIB


def test_alike_tensors_of_layers_are_one_group() -> None:
    groups = training_run(layers=4).largest()
    by_module = {(group.module, group.operator): group for group in groups}
    assert by_module["layers.*.mlp", "gelu"].count == 4
    assert by_module["lm_head", "linear"].count == 1
    assert [group.total_bytes for group in groups] == sorted((group.total_bytes for group in groups), reverse=True)
    assert by_module["", "log_softmax"].shape == (8, 1024, 50304)


def test_module_patterns_replace_whole_numbers_only() -> None:
    assert module_pattern("layers.17.mlp") == "layers.*.mlp"
    assert module_pattern("0.conv2.3") == "*.conv2.*"
    assert module_pattern("conv1.bn2") == "conv1.bn2"
    assert module_pattern("") == ""


def test_the_peak_has_a_place() -> None:
    at = training_run().peak_allocation
    assert at is not None
    assert (at.step, at.phase, at.line) == (2, "backward", "train.py:89")


def test_fits_is_unknown_where_the_script_failed() -> None:
    assert training_run().fits is True
    assert training_run(outcome="error").fits is None
    assert training_run(gpu="t4", batch=64).fits is False


def test_saving_has_a_peak_even_if_it_allocates_nothing() -> None:
    run = Run()
    run.step(1)
    kept = run.alloc(20 * MIB)
    run.phase("saving")
    run.phase("other")
    run.free(kept)
    run.phase("loading")
    assert {p.name: p.peak_allocated_bytes for p in run.recording.phases}["saving"] == 20 * MIB
    assert "loading" not in {p.name for p in run.recording.phases}  # nothing is there
    assert "saving" in {p.name for p in run.recording.steps[-1].phases}


def test_batches_from_the_host_are_data_on_its_way() -> None:
    run = Run()
    run.alloc(20 * MIB, Category.PARAMETERS)
    run.alloc(8 * MIB, Category.INPUTS, operator="aten::_to_copy")
    run.alloc(50 * MIB, Category.INPUTS, operator="aten::randn")
    assert {p.name: p.peak_allocated_bytes for p in run.recording.phases}["data"] == 28 * MIB
