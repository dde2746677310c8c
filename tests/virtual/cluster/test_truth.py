"""Real ranks of FSDP2 and DDP, measured over gloo on one H200, beside the ranks of a virtual cluster."""

import json
import statistics
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from virtual_runs import run_tonnage

TRUTH = Path(__file__).parents[3] / "benchmarks" / "truth"
ROWS = [json.loads(line) for line in (TRUTH / "h200-sharded.jsonl").read_text().splitlines()]
BACKEND = ("--backend", "cuda:gloo,cpu:gloo")
Answers = list[Callable[[], dict[str, Any]]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Every row's JSON, made when it is asked for."""
    folder = tmp_path_factory.mktemp("sharded")
    return [cache(partial(predict, row, folder / f"{number}.json")) for number, row in enumerate(ROWS)]


def predict(row: dict[str, Any], answer: Path) -> dict[str, Any]:
    script, *words = row["case"].split()
    options = ["--gpus", f"{row['world']}xh200", "--torch", "2.11", "--json", str(answer)]
    done = run_tonnage("run", *options, str(TRUTH / "scripts" / script), *words, *BACKEND)
    assert answer.exists(), done.stderr[-2000:]
    said: dict[str, Any] = json.loads(answer.read_text())
    return said


def errors(said: dict[str, Any], row: dict[str, Any], key: str) -> list[float]:
    """Of every rank that ran, against the real rank of that number."""
    return [
        abs(rank[f"peak_{key}_bytes"] / row["ranks"][rank["rank"]][f"{key}_bytes.all.peak"] - 1)
        for rank in said["ranks"]
    ]


QUICK = (0,)  # FSDP2 with two ranks; all of them take half a minute or more each


@pytest.mark.truth
@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in range(len(ROWS))]
)
def test_a_rank_holds_what_the_real_one_held(number: int, answers: Answers) -> None:
    said = answers[number]()
    assert said["outcome"] == ROWS[number]["outcome"]
    assert sum(rank["ranks_alike"] for rank in said["ranks"]) == ROWS[number]["world"]
    assert max(errors(said, ROWS[number], "allocated")) <= 0.005
    assert max(errors(said, ROWS[number], "reserved")) <= 0.04


@pytest.mark.slow
@pytest.mark.truth
def test_ranks_are_close_on_the_whole(answers: Answers) -> None:
    said = [answer() for answer in answers]
    allocated = [max(errors(each, row, "allocated")) for each, row in zip(said, ROWS, strict=True)]
    reserved = [max(errors(each, row, "reserved")) for each, row in zip(said, ROWS, strict=True)]
    assert statistics.median(allocated) <= 0.001
    assert statistics.median(reserved) <= 0.01
    assert sum(error == 0 for error in allocated) >= 4
    assert sum(error == 0 for error in reserved) >= 4
