"""Each rule on a virtual recording that it is about, and on one that it is not."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import loops
from loops import line_of, recorded
from support import MIB, Run, training_run
from tonnage.allocator import OutOfMemory
from tonnage.explain import Diagnosis, Finding, diagnose
from tonnage.ledger import Category
from tonnage.recording import Recording


@cache
def of(script: Callable[..., Any]) -> Diagnosis:
    return diagnose(recorded(script))


def finding(diagnosis: Diagnosis, rule: str) -> Finding:
    return next(found for found in diagnosis.evidence if found.rule == rule)


def rules(diagnosis: Diagnosis) -> set[str]:
    return {found.rule for found in diagnosis.evidence}


def test_a_healthy_run_has_no_cause_and_says_where_its_peak_is() -> None:
    diagnosis = of(loops.healthy)
    assert diagnosis.cause == "none"
    assert rules(diagnosis) == {"peak"}
    assert all(guilty.line.startswith("loops.py:") for guilty in diagnosis.evidence[0].lines)


def test_a_loss_kept_with_its_graph_is_a_leak_with_the_line_that_keeps_it() -> None:
    diagnosis = of(loops.keeps_graph)
    assert diagnosis.cause == "leak"
    assert line_of("keeps the graph") in diagnosis.sentence
    assert "graph" in diagnosis.sentence
    leak = finding(diagnosis, "leak")
    assert leak.lines[0].line == line_of("keeps the graph")
    assert "detach" in diagnosis.fixes[0].how


def test_what_the_fix_of_a_leak_saves_is_what_the_run_without_it_takes() -> None:
    leaking, healthy = recorded(loops.keeps_graph), recorded(loops.healthy)
    saved = diagnose(leaking).fixes[0].saves_bytes
    assert saved == pytest.approx(leaking.peak_allocated_bytes - healthy.peak_allocated_bytes, rel=0.15)


@pytest.mark.parametrize(
    ("script", "mark"),
    [(loops.keeps_outputs, "keeps the output"), (loops.keeps_by_hook, "keeps by hook")],
)
def test_lists_and_hooks_that_keep_are_leaks(script: Callable[..., Any], mark: str) -> None:
    diagnosis = of(script)
    assert diagnosis.cause == "leak"
    assert line_of(mark) in diagnosis.sentence
    assert diagnosis.fixes[0].saves_bytes > 0


def test_a_reference_cycle_is_a_leak_until_the_collector_comes() -> None:
    diagnosis = of(loops.keeps_in_cycle)
    assert diagnosis.cause == "leak"
    assert "reference cycle" in diagnosis.sentence
    assert "gc.collect()" in diagnosis.fixes[0].how


def test_a_window_of_fixed_length_is_no_leak() -> None:
    assert of(loops.keeps_a_window).cause == "none"


def test_a_leak_without_its_script_names_the_line_that_made_it() -> None:
    recording = recorded(loops.keeps_outputs)
    recording.header.script = ""
    assert "loops.py:" in diagnose(recording).sentence


def test_a_cache_that_grows_at_every_step_is_unbounded() -> None:
    diagnosis = of(loops.grows_a_cache)
    assert diagnosis.cause == "unbounded-cache"
    cache = finding(diagnosis, "unbounded-cache")
    assert cache.lines[0].line == line_of("grows the cache")
    assert diagnosis.fixes[0].saves_bytes > 0


def test_gradients_that_zero_grad_keeps_are_found() -> None:
    diagnosis = of(loops.keeps_gradients)
    assert diagnosis.cause == "none"
    assert finding(diagnosis, "kept-gradients").size_bytes == pytest.approx(
        4 * (512 * 2048 * 2 + 6 * 512 * 512), rel=0.02
    )
    assert "kept-gradients" not in rules(of(loops.healthy))


def test_data_that_stays_on_the_gpu_is_found() -> None:
    diagnosis = of(loops.keeps_data)
    resident = finding(diagnosis, "resident-data")
    assert (resident.size_bytes, resident.lines[0].line) == (40 * loops.BATCH * 512 * 4, line_of("keeps the data"))
    assert resident.fixes[0].saves_bytes == resident.size_bytes


def test_attention_matrices_are_told_from_square_hidden_states() -> None:
    matrices = finding(of(loops.attends), "attention-matrices")
    assert line_of("attends") in {guilty.line for guilty in matrices.lines}
    assert matrices.size_bytes >= 2 * 2 * 8 * 1024 * 1024 * 4
    assert matrices.fixes[0].saves_bytes > 0
    run = Run()
    run.alloc(32 * MIB, Category.ACTIVATIONS, shape=(8, 1024, 1024), dtype="float32", operator="linear")
    assert "attention-matrices" not in rules(diagnose(run.recording))


def test_logits_in_float32_are_found() -> None:
    logits = finding(of(loops.projects_to_a_vocabulary), "fp32-logits")
    assert line_of("loss") in {guilty.line for guilty in logits.lines}
    assert logits.size_bytes >= 2 * 1024 * 32000 * 4


def test_temporaries_of_the_optimizer_are_found() -> None:
    temporaries = finding(of(loops.steps_with_lists), "optimizer-temporaries")
    assert temporaries.lines[0].line == line_of("steps")
    assert temporaries.size_bytes >= 4096 * 4096 * 4


def test_a_first_step_that_needs_more_is_found() -> None:
    peak = finding(of(loops.tries_kernels_out), "first-step-peak")
    assert peak.lines[0].line == line_of("tries")
    assert peak.fixes[0].saves_bytes == peak.size_bytes > 400 * MIB
    assert "first-step-peak" not in rules(of(loops.healthy))


def test_lengths_that_vary_are_found_where_much_lies_unused() -> None:
    varying = finding(of(loops.varies_lengths), "varying-lengths")
    assert line_of("varies") in {guilty.line for guilty in varying.lines}
    assert "varying-lengths" not in rules(of(loops.healthy))


def test_capacity_is_what_nothing_else_explains() -> None:
    diagnosis = diagnose(training_run(gpu="t4", batch=64))
    assert diagnosis.cause == "capacity"
    assert "train.py:87" in diagnosis.sentence
    assert finding(diagnosis, "capacity").lines[0].line.startswith("train.py:")
    assert diagnosis.fixes and diagnosis.larger_card


def dies(run: Run, size: int, **words: Any) -> Recording:
    with pytest.raises(OutOfMemory) as caught:
        run.alloc(size)
    return run.dies(caught.value, **({"line": "train.py:5"} | words))


def test_one_surprising_tensor_is_named_with_capacity() -> None:
    run = Run(capacity_bytes=1024 * MIB)
    run.alloc(100 * MIB, Category.PARAMETERS, line="train.py:1")
    diagnosis = diagnose(dies(run, 4096 * MIB, operator="aten::repeat"))
    assert diagnosis.cause == "capacity"
    assert "one tensor is 97 %" in diagnosis.sentence and "repeat" in diagnosis.sentence


def with_holes(settings: str = "") -> Recording:
    run = Run(capacity_bytes=400 * MIB, settings=settings)
    run.phase("setup")
    for number in range(10):
        large = run.alloc(30 * MIB, line="train.py:1")
        run.free(large)
        run.alloc(10 * MIB, line=f"train.py:{20 + number % 2}")
        run.alloc(20 * MIB, line="train.py:30")
    pads = [a for a in run.recording.allocations if a.line == "train.py:30" and a.died is None]
    run.free(*pads)
    return dies(run, 150 * MIB)


def test_fragmentation_names_the_largest_hole_and_the_blocks_in_the_way() -> None:
    recording = with_holes()
    diagnosis = diagnose(recording)
    assert diagnosis.cause == "fragmentation"
    assert finding(diagnosis, "fragmentation").size_bytes == 200 * MIB
    assert "the largest hole 20.00 MiB" in diagnosis.sentence
    assert {guilty.line for guilty in finding(diagnosis, "fragmentation").lines} == {"train.py:20", "train.py:21"}
    assert diagnosis.fixes[0].how == "PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert diagnosis.fixes[0].rescues


def test_what_is_set_already_is_not_advised_again() -> None:
    recording = with_holes()
    recording.header.settings = "expandable_segments:True"
    assert not [fix for fix in diagnose(recording).fixes if fix.how == "PYTORCH_ALLOC_CONF=expandable_segments:True"]


def test_little_that_lies_unused_is_no_fragmentation() -> None:
    run = Run(capacity_bytes=1000 * MIB)
    kept = [run.alloc(30 * MIB) for _ in range(31)]
    run.free(kept[0])
    assert diagnose(dies(run, 120 * MIB)).cause == "capacity"


def test_a_run_that_goes_on_is_fragmented_only_where_most_lies_unused() -> None:
    run = Run()
    blocks = [run.alloc(40 * MIB, line="train.py:3") for _ in range(20)]
    run.free(*blocks)
    run.alloc(900 * MIB, line="train.py:4")
    diagnosis = diagnose(run.recording)
    assert diagnosis.cause == "fragmentation"
    assert diagnosis.evidence[0].lines[0].line == "train.py:3"


def died_beside(message: str = "", **header: Any) -> Diagnosis:
    run = Run(capacity_bytes=24_000 * MIB, **header)
    run.alloc(5000 * MIB, Category.PARAMETERS, line="train.py:1")
    recording = dies(run, 20_000 * MIB)
    assert recording.oom
    recording.oom = replace(recording.oom, message=message, free_bytes=100 * MIB, requested_bytes=2000 * MIB)
    return diagnose(recording)


def test_another_process_is_read_from_pytorchs_message() -> None:
    message = "Process 7 has 8.00 GiB memory in use. Process 9 has 6.00 GiB memory in use. "
    diagnosis = died_beside(message)
    assert diagnosis.cause == "other-process"
    assert diagnosis.fixes[0].saves_bytes == 14 * 2**30
    assert died_beside("Process 7 has 500.00 MiB memory in use.").cause == "capacity"


def test_memory_outside_pytorch_is_named_by_its_parts() -> None:
    parts = {"context": 500 * MIB, "NCCL": 6000 * MIB}
    diagnosis = died_beside(overhead_bytes=6500 * MIB, overhead_parts=parts)
    assert diagnosis.cause == "outside"
    assert "NCCL 5.86 GiB" in diagnosis.sentence and "NCCL_BUFFSIZE" in diagnosis.fixes[0].how
    message = "Including non-PyTorch memory, this process has 12.00 GiB memory in use."
    assert died_beside(message).cause == "outside"
    assert died_beside(overhead_bytes=700 * MIB, overhead_parts={"context": 700 * MIB}).cause == "capacity"


def test_a_limit_of_the_process_s_own_is_told_from_the_card_s() -> None:
    run = Run(capacity_bytes=1000 * MIB)
    run.alloc(90 * MIB, line="train.py:1")
    recording = dies(run, 2000 * MIB)
    assert recording.oom
    message = "100.00 MiB allowed; Of the allocated memory 90.00 MiB is allocated by PyTorch"
    recording.oom = replace(recording.oom, requested_bytes=50 * MIB, free_bytes=900 * MIB, message=message)
    diagnosis = diagnose(recording)
    assert diagnosis.cause == "capacity"
    assert diagnosis.sentence.startswith("Its own limit is too small")
    assert "set_per_process_memory_fraction" in " ".join(fix.how for fix in diagnosis.fixes)


def test_pinned_host_memory_is_the_cause_where_the_host_refused() -> None:
    run = Run(outcome="error", pinned_host_bytes=60 * 2**30, error="RuntimeError: CUDA error in cudaHostAlloc")
    run.alloc(MIB)
    assert diagnose(run.recording).cause == "pinned-host"
    run.header.error = "KeyError: 7"
    assert diagnose(run.recording).cause == "none"


def test_accumulation_under_ddp_without_no_sync(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("model = DistributedDataParallel(model)\nfor batch in data:\n    loss.backward()\n")
    run = Run(script=str(script))
    for step in range(1, 3):
        run.step(step)
        for _ in range(4):
            for phase in ("forward", "backward"):
                run.phase(phase)
                run.free(run.alloc(MIB))
        run.phase("optimizer")
        run.free(run.alloc(MIB))
    found = finding(diagnose(run.recording), "ddp-accumulation")
    assert found.lines[0].line == "train.py:1" and "4 backwards a step" in found.sentence
    script.write_text("model = DistributedDataParallel(model)\nwith model.no_sync():\n    pass\n")
    assert "ddp-accumulation" not in rules(diagnose(run.recording))


def test_a_leak_that_kills_is_the_cause_and_its_fix_rescues() -> None:
    run = Run(capacity_bytes=1000 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        for step in range(1, 50):
            run.step(step)
            run.phase("forward")
            work = run.alloc(300 * MIB, Category.ACTIVATIONS, line="train.py:7")
            run.alloc(40 * MIB, Category.ACTIVATIONS, line="train.py:9")
            run.free(work)
    diagnosis = diagnose(run.dies(caught.value, line="train.py:7"))
    assert diagnosis.cause == "leak"
    assert diagnosis.evidence[0].lines[0].line == "train.py:9"
    assert diagnosis.fixes[0].rescues


def test_loading_that_finds_no_room_is_no_leak() -> None:
    run = Run(capacity_bytes=1000 * MIB)
    run.phase("setup")
    with pytest.raises(OutOfMemory) as caught:
        for _ in range(50):
            run.alloc(60 * MIB, line="load.py:4", stack=("load.py:4",), operator="aten::empty")
            run.alloc(MIB, line="load.py:5", stack=("load.py:5",), operator="aten::zeros")
    diagnosis = diagnose(run.dies(caught.value, line="load.py:4"))
    assert diagnosis.cause == "capacity" and "leak" not in rules(diagnosis)


def test_a_graph_that_kills_the_second_step_is_a_leak_already() -> None:
    run = Run(capacity_bytes=1000 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        for step in range(1, 4):
            run.step(step)
            run.phase("forward")
            for layer in range(15):
                run.alloc(40 * MIB, Category.ACTIVATIONS, line="train.py:7", module=f"layers.{layer}")
            run.phase("backward")
            run.free(run.alloc(MIB, line="train.py:8"))
    diagnosis = diagnose(run.dies(caught.value, line="train.py:7"))
    assert diagnosis.cause == "leak"
    assert "the turn before left 600.00 MiB" in diagnosis.sentence


def test_a_recording_without_any_event_is_explained_too() -> None:
    diagnosis = diagnose(Run().recording)
    assert (diagnosis.cause, diagnosis.evidence, diagnosis.fixes) == ("none", (), ())
    assert diagnosis.sentence == "It allocated nothing."
