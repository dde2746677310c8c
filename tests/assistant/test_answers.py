import json

import pytest

from support import training_run
from tonnage.assistant.answers import sentence, small
from tonnage.explain import advice_for, diagnose
from tonnage.explain.diff import compare
from tonnage.report.runs.diff import ComparedRuns, diff_figures
from tonnage.report.runs.explain import explain_figures
from tonnage.report.runs.terminal import figures_of

RECORDING = training_run(batch=8)
FIGURES = figures_of([RECORDING], [advice_for(RECORDING)])


def test_sizes_are_in_gib_and_say_so() -> None:
    kept = small("run", FIGURES)
    assert kept["peak_process_gib"] == pytest.approx(RECORDING.peak_process_bytes / 2**30, rel=1e-3)
    sizes = {f"{category}_gib": size / 2**30 for category, size in RECORDING.ledger().bytes_by_category.items() if size}
    assert kept["ledger"] == pytest.approx(sizes, rel=1e-3)
    assert "bytes" not in json.dumps(kept)


def test_the_few_that_matter_are_kept() -> None:
    kept = small("run", FIGURES)
    assert set(kept) < {key.replace("bytes", "gib") for key in FIGURES}
    assert len(kept.get("fixes", [])) <= 4 and len(kept["largest"]) <= 3
    assert set(kept["largest"][0]) <= {"line", "total_gib", "count", "shape", "dtype", "module"}
    assert len(json.dumps(kept)) < 2500


@pytest.mark.parametrize("figures", [{}, {"peak": 3, "fixes": "none", "ledger": None}, {"fixes": [1, None], "oom": []}])
def test_figures_that_another_version_writes_are_no_obstacle(figures: dict) -> None:
    for command in ("run", "show", "explain", "diff", "plan", "gpu", "certify"):
        assert isinstance(small(command, figures), dict)


def test_sentences_say_what_was_found() -> None:
    assert sentence("run", FIGURES).startswith("train.py fits on NVIDIA H200: ")
    short = {"requested_bytes": 2**31, "free_bytes": 2**30, "line": "train.py:9"}
    assert sentence("show", FIGURES | {"oom": short, "fits": False}) == (
        "train.py runs out of memory on NVIDIA H200 at train.py:9: it asked for 2.00 GiB, and 1.00 GiB were free."
    )
    failed = FIGURES | {"outcome": "error", "error": "ValueError: no\n data"}
    assert sentence("run", failed) == "train.py failed for reasons of its own: ValueError: no data"
    before, after = training_run(batch=4), RECORDING
    figures = diff_figures(ComparedRuns(("a", "b"), (before, after), compare(before, after)))
    assert sentence("diff", figures).startswith("The peak of allocated memory grew by ")
    figures = diff_figures(ComparedRuns(("a", "b"), (after, after), compare(after, after)))
    assert "did not change" in sentence("diff", figures)
    diagnosis = diagnose(RECORDING)
    assert sentence("explain", explain_figures(RECORDING, diagnosis)) == " ".join(diagnosis.sentence.split())
    assert (
        sentence("certify", {"sentence": "safe, at most 22.1 GiB in step 8,113"})
        == "safe, at most 22.1 GiB in step 8,113"
    )


def test_what_lies_beyond_and_ahead_is_said() -> None:
    short = {"requested_bytes": 2**31, "free_bytes": 2**30, "line": "train.py:9"}
    dies = FIGURES | {"oom": short, "fits": False, "total": {"needed_bytes": 33 * 2**30, "batch": 5}}
    assert sentence("run", dies).endswith("In all it needs 33.00 GiB; a batch of 5 fits.")
    assert small("run", dies)["total"] == {"needed_gib": 33.0, "batch": 5}
    climbs = FIGURES | {"outlook": ["Each step needs 16 GiB more than the one before.", "And so on."]}
    assert sentence("run", climbs).endswith(" Each step needs 16 GiB more than the one before.")


def test_what_a_text_proves_is_kept() -> None:
    figures = {
        "cause": "fragmentation",
        "certainty": "certain",
        "sentence": "Fragmentation: 8 GiB are unused.",
        "numbers": {},
    }
    figures |= {"proved": ["8 GiB are reserved and unused"], "numbers": {"free_bytes": 2**30, "device": 0}}
    assert small("explain", figures) == figures | {"numbers": {"free_gib": 1.0, "device": 0}}
    assert sentence("explain", figures) == "Fragmentation: 8 GiB are unused."
