"""What lies ahead of runs that went on: leaks climb; states, warm-up, windows and lengths do not."""

from collections.abc import Callable
from typing import Any

import pytest

import loops
from loops import line_of, recorded
from support import MIB, Run, climbing_run, training_run
from tonnage.explain import advice_for, diagnose
from tonnage.explain.diagnosis import outlook_of
from tonnage.ledger import Category
from tonnage.recording import Recording


def test_steps_that_climb_say_by_how_much_why_and_until_when() -> None:
    found = outlook_of(recorded(loops.keeps_graph))
    assert found.climb is not None
    assert found.climb.each_bytes == pytest.approx(64 * MIB, rel=0.001)
    assert line_of("keeps the graph") in found.lines[0]
    assert "climb by 64.00 MiB each" in found.lines[0]
    assert f"about step {found.climb.dies_at_step:,}" in found.lines[0]


@pytest.mark.parametrize("capacity_bytes", [1000 * MIB, 1300 * MIB, 2048 * MIB])
def test_it_dies_in_the_step_that_was_told(capacity_bytes: int) -> None:
    from tonnage.allocator import OutOfMemory

    climb = outlook_of(climbing_run(5, capacity_bytes)).climb
    assert climb is not None and climb.dies_at_step is not None
    climbing_run(climb.dies_at_step - 1, capacity_bytes)
    with pytest.raises(OutOfMemory):
        climbing_run(climb.dies_at_step + 1, capacity_bytes)


def test_advice_to_one_that_climbs_is_to_stop_that() -> None:
    advice = advice_for(recorded(loops.keeps_graph))
    assert ["detach" in fix.how for fix in advice.fixes] == [True]
    assert len(advice_for(recorded(loops.healthy)).fixes) > 1


@pytest.mark.parametrize(
    "script",
    [
        loops.healthy,
        loops.keeps_a_window,
        loops.keeps_gradients,
        loops.keeps_data,
        loops.keeps_in_cycle,
        loops.tries_kernels_out,
        loops.evaluates,
        loops.evaluates_and_keeps,
        loops.fetches_ahead,
        loops.generates,
        loops.generates_with_scores,
        loops.grows_a_cache,
        loops.grows_a_cache_in_a_list,
        loops.loads_weights,
        loops.loads_shards,
        loops.keeps_at_first,
    ],
)
def test_what_ends_by_itself_does_not_climb(script: Callable[..., Any]) -> None:
    assert outlook_of(recorded(script)).climb is None


@pytest.mark.parametrize(
    ("script", "each_bytes"),
    [
        (loops.keeps_graph, 64 * MIB),
        (loops.keeps_outputs, None),
        (loops.fills_a_replay, 4 * MIB),
        (loops.logs_outputs, 5 * 4 * MIB // 21),
    ],
)
def test_what_every_step_or_every_fifth_keeps_climbs(script: Callable[..., Any], each_bytes: int | None) -> None:
    climb = outlook_of(recorded(script)).climb
    assert climb is not None and climb.dies_at_step is not None
    assert each_bytes is None or climb.each_bytes == pytest.approx(each_bytes, rel=0.01)


@pytest.mark.parametrize("script", [loops.loads_weights, loops.loads_shards])
def test_a_script_that_only_loads_has_nothing_wrong(script: Callable[..., Any]) -> None:
    assert diagnose(recorded(script)).cause == "none"


def test_a_cache_that_grows_is_told_in_a_line() -> None:
    (line,) = outlook_of(recorded(loops.grows_a_cache)).lines
    assert "KV cache" in line and "at every step" in line
    (line,) = outlook_of(recorded(loops.grows_a_cache_in_a_list)).lines
    assert f"{line_of('grows a list')} keeps a cache that grows with the sequence" in line


def test_lines_that_each_keep_something_once_or_twice_do_not_climb() -> None:
    """As where `fit_trainer` surveys, tries and proves before the training."""
    run = Run()
    kept_in = {2: "survey.py:3", 21: "survey.py:3", 25: "train.py:9", 27: "train.py:9"}
    for step in range(1, 31):
        run.step(step)
        run.phase("forward")
        work = run.alloc(8 * MIB, Category.ACTIVATIONS, line="train.py:5", operator="linear")
        if step in kept_in:
            run.alloc(MIB, Category.ACTIVATIONS, line=kept_in[step], operator="linear")
        run.free(work)
    assert outlook_of(run.recording).climb is None


def test_calls_of_generate_that_keep_something_climb() -> None:
    """Each call is one iteration, and what remains of it is compared with that of other calls."""

    def calls(*, keeps: bool) -> Recording:
        run = Run()
        for call in range(6):
            run.phase("generation")
            for token in range(8):
                run.step(8 * call + token + 1)
                scores = run.alloc(MIB, Category.ACTIVATIONS, line="chat.py:7", operator="linear")
                if not keeps:
                    run.free(scores)
            run.phase("other")
        return run.recording

    climb = outlook_of(calls(keeps=True)).climb
    assert climb is not None and climb.each_bytes == 8 * MIB
    assert outlook_of(calls(keeps=False)).climb is None


def test_lengths_that_vary_are_told_and_are_no_climb() -> None:
    run = Run()
    for step, length in enumerate((512, 128, 384, 256, 640), start=1):
        run.step(step)
        run.phase("forward")
        batch = run.alloc(8 * length * 8192, Category.INPUTS, shape=(8, length, 1024), line="train.py:9")
        run.phase("backward")
        run.free(batch)
    found = outlook_of(run.recording)
    assert found.climb is None
    assert "8 × 128 × 1,024 to 8 × 640 × 1,024" in found.lines[0]
    assert outlook_of(training_run(gpu="h200", batch=4)).lines == ()


def test_reserved_memory_that_creeps_up_climbs_though_tensors_do_not() -> None:
    def creeping(until: int) -> Recording:
        run = Run()
        for step in range(1, 17):
            run.step(step)
            run.phase("forward")
            held = run.alloc(400 * MIB, Category.ACTIVATIONS, line="train.py:9")
            if step < until:
                run._segment("segment_alloc", (1 << 45) + (step << 32), 48 * MIB, 0)
            run.free(held)
        return run.recording

    found = outlook_of(creeping(until=17))
    assert found.climb is not None
    assert "reserved memory still climbs, 384.00 MiB in the last 8 steps" in found.lines[0]
    assert "expandable_segments" in found.fixes[0].how
    assert outlook_of(creeping(until=10)).climb is None


def test_a_run_that_died_has_its_cause_and_no_outlook() -> None:
    assert outlook_of(training_run(gpu="t4", batch=64)).lines == ()
