import io
import re

import pytest

from support import MIB, Run, climbing_run, training_run
from tonnage.explain import advice_for, advise
from tonnage.hardware import find_gpu
from tonnage.ledger import Category
from tonnage.recording import Note, Recording, StandIn
from tonnage.recording.replay import replay_on
from tonnage.report.lines import bar
from tonnage.report.runs.terminal import print_report


def report(*answers: Recording, verbose: bool = False) -> str:
    stream = io.StringIO()
    ran = answers[-1]
    print_report(answers, ran, advise(ran), stream=stream, verbose=verbose)
    return stream.getvalue()


def long_words_run() -> Recording:
    run = Run("rtx-6000-ada")
    run.step(12345)
    run.phase("forward")
    shape = (128, 131072, 12288, 1)
    module = "model.language_model.decoder.layers.31.self_attn.rotary_embedding"
    words = {"shape": shape, "module": module, "operator": "_scaled_dot_product_flash_attention_backward"}
    run.alloc(40 * 2**30, Category.ACTIVATIONS, line="a_script_with_a_long_name.py:1234", dtype="bfloat16", **words)
    return run.recording


RUNS = {
    "fits": training_run(batch=32, layers=12, overhead_bytes=700 * MIB),
    "dies": training_run(batch=64, layers=12, gpu="t4", overhead_bytes=700 * MIB),
    "failed": training_run(outcome="error"),
    "empty": Run().recording,
    "long words": long_words_run(),
    "many steps": training_run(batch=1, steps=20),
}


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_every_line_is_at_home_in_80_columns(name: str, verbose: bool) -> None:
    lines = report(RUNS[name], verbose=verbose).splitlines()
    assert [line for line in lines if len(line) > 80 or line != line.rstrip()] == []


def test_the_report_says_what_it_takes_and_where_it_went() -> None:
    text = report(RUNS["fits"])
    assert "NVIDIA H200, 139.8 GiB · torch 2.11.0 · virtual" in text
    assert text.splitlines()[1].endswith("fits")
    assert "allocated 19.54 GiB   reserved 24.93 GiB   process 25.61 GiB (18 %)" in text
    assert "peak in step 2, backward, at train.py:89" in text
    assert "activations        18.21 GiB  93.2 %" in text
    assert "backward 19.54 GiB" in text
    assert "step 1 18.78 GiB" in text
    assert "\n  3.00 GiB 12 × bfloat16 [32, 1024, 4096] gelu        layers.*.mlp train.py:87\n" in text
    assert "unused    5.39 GiB of the 24.93 GiB reserved (21.6 %), in step 2, backward,\n" in text
    assert "half the batch                 9.11 GiB   twice the steps   --batch 16" in text


def test_a_run_that_dies_says_where_and_by_how_much() -> None:
    text = report(RUNS["dies"])
    assert text.splitlines()[1].endswith("does not fit")
    assert "out of memory in step 1, forward, at train.py:87" in text
    assert "asked for 512.00 MiB, free 193.75 MiB: 318.25 MiB short, in linear of lm_head" in text
    assert "✓ recompute 9 blocks" in text
    assert "the v100-16 gets past that line" in text


def test_fragmentation_is_named_where_a_run_dies_of_it() -> None:
    run = Run(capacity_bytes=200 * MIB)
    run.free(run.alloc(100 * MIB))
    run.alloc(40 * MIB)
    text = report(_dies(run, 120 * MIB))
    assert "60.00 MiB of the 100.00 MiB reserved lay unused in pieces" in text
    assert "✓ expandable segments" in text


def _dies(run: Run, size: int) -> Recording:
    from tonnage.allocator import OutOfMemory

    with pytest.raises(OutOfMemory) as caught:
        run.alloc(size)
    return run.dies(caught.value, line="train.py:5")


def test_the_source_of_the_line_is_shown_where_it_is_at_hand(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text("\n" * 88 + "    loss.backward()  # the peak\n")
    recording = training_run()
    recording.header.script = str(script)
    assert "at train.py:89  loss.backward()" in report(recording)


def test_a_script_that_failed_is_not_said_to_fit() -> None:
    first = report(RUNS["failed"]).splitlines()[1]
    assert first.endswith("script failed")


def test_a_script_that_failed_says_why_for_nothing_else_does_later() -> None:
    text = report(training_run(outcome="error", error="exit status 3"))
    assert "  failed: exit status 3\n  the figures are of what ran until then\n" in text
    long = report(training_run(outcome="error", error=f"ValueError: {'no such thing, ' * 90}\nand more"))
    assert "failed: ValueError: no such thing" in long and "and more" not in long
    assert max(map(len, long.splitlines())) <= 80


def test_a_run_without_a_gpu_says_so() -> None:
    text = report(RUNS["empty"])
    assert "nothing was allocated on the GPU" in text
    assert "peak of" not in text


def test_what_the_figures_rest_on_is_named() -> None:
    recording = training_run(pinned_host_bytes=3 * MIB, ooms_caught=2)
    recording.stand_ins += [
        StandIn("loss.item()", "train.py:90", 3, "1.0"),
        StandIn("x.tolist()", "train.py:91", 1, "0"),
    ]
    recording.notes.append(Note("not_modelled", "my::kernel", 2, "an extension's kernel"))
    recording.notes.append(Note("assumption", "nonzero", 1, "every element counts"))
    text = report(recording)
    assert "4 values were read from the virtual GPU (loss.item() ×3, …): --verbose" in text
    assert "not modelled: my::kernel ×2: an extension's kernel" in text
    assert "assumed: nonzero: every element counts" in text
    assert "pinned host memory 3.00 MiB" in text
    assert "ran out of memory 2 times" in text
    assert "x.tolist()" in report(recording, verbose=True)


def test_steps_alike_are_one_entry() -> None:
    assert "step 1 1.27 GiB   steps 2–20 1.34 GiB" in report(RUNS["many steps"])


def test_steps_past_the_first_few_wait_for_verbose() -> None:
    run = Run()
    for number in range(1, 21):
        run.step(number)
        run.alloc(100 * MIB)
    assert "and 14 more: --verbose" in report(run.recording)
    assert "step 20 1.95 GiB" in report(run.recording, verbose=True)


def test_several_cards_are_one_table() -> None:
    ran = training_run(batch=32, layers=12)
    small, large = (replay_on(ran, find_gpu(name)) for name in ("4090", "a100-80"))
    lines = report(small, large, ran).splitlines()
    assert lines[2].startswith("  rtx-4090") and lines[2].endswith("train.py:88")
    assert lines[3].startswith("  a100-80") and lines[3].endswith("fits")
    assert lines[4].startswith("  h200")
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize(
    ("share", "drawn"), [(0, ""), (1, "████"), (2, "████"), (0.5, "██"), (1 / 32, "▏"), (0.28, "█▏")]
)
def test_bars_are_drawn_to_an_eighth(share: float, drawn: str) -> None:
    assert bar(share, 4) == drawn


def test_a_run_that_climbs_is_not_called_a_fit() -> None:
    recording = climbing_run()
    advice = advice_for(recording)
    stream = io.StringIO()
    print_report([recording], recording, advice, stream=stream, verbose=False)
    lines = stream.getvalue().splitlines()
    assert lines[1].endswith("fits so far, but climbs")
    assert "the steps climb by 64.00 MiB each" in stream.getvalue()
    assert "keep nothing across steps" in stream.getvalue()
    assert "half the batch" not in stream.getvalue()
    assert max(map(len, lines)) <= 80
    cards = io.StringIO()
    print_report([replay_on(recording, find_gpu("t4")), recording], recording, advice, stream=cards, verbose=False)
    assert re.search(r"t4 .* fits so far, but climbs", cards.getvalue())


def test_phases_that_people_name_have_peaks_and_batches_one_where_it_is_the_highest() -> None:
    run = Run()
    run.alloc(64 * MIB, Category.PARAMETERS)
    run.phase("evaluation")
    run.free(run.alloc(32 * MIB, Category.ACTIVATIONS))
    run.phase("saving")
    run.phase("other")
    run.free(run.alloc(8 * MIB, Category.INPUTS, operator="aten::_to_copy"))
    assert "peak of   evaluation 96.00 MiB   saving 64.00 MiB" in report(run.recording)
    run.free(run.alloc(64 * MIB, Category.INPUTS, operator="aten::_to_copy"))
    del run.recording.__dict__["timeline"], run.recording.__dict__["phases"]
    assert "saving 64.00 MiB   data 128.00 MiB" in report(run.recording)
