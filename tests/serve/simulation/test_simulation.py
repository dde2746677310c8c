"""Ten thousand seeds, each a run of scheduler and blocks with faults; see the package for what must hold."""

import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from serve.simulation.bugs import first_failure
from serve.simulation.run import Run, play
from serve.simulation.scenario import scenario_of

TESTS = Path(__file__).parents[2]
RUNS = 10_000
RUNS_A_TEST = 500
QUICK_RUNS = 3_000  # the others are more of the same


@pytest.mark.parametrize(
    "first",
    [pytest.param(n, marks=pytest.mark.slow if n >= QUICK_RUNS else ()) for n in range(0, RUNS, RUNS_A_TEST)],
)
def test_every_seed_ends_well(first: int) -> None:
    for seed in range(first, first + RUNS_A_TEST):
        play(seed)


def test_the_seeds_meet_what_they_are_for() -> None:
    met = Counter[str]()
    for seed in range(300):
        run = Run(scenario_of(seed))
        run.play()
        met += run.refusals + Counter(str(sequence.finish_reason) for sequence in run.sequences)
        met += Counter(asdict(run.scheduler.counters))
        met += Counter(copies=sum(len(flight.step.copies) for flight in run.past))
        met += Counter(failures=sum(flight.tokens is None for flight in run.past))
    wanted = "QueueFull NeverFits stop length abort error preemptions swaps prefix_hits copies failures"
    assert not [name for name in wanted.split() if met[name] < 20], met


def test_a_seed_plays_the_same_again() -> None:
    traces: list[list[str]] = [[], []]
    for trace in traces:
        play(7, trace.append)
    assert traces[0] == traces[1] != []


def test_a_failing_seed_says_how_to_replay_it() -> None:
    failure = str(first_failure("LastComeFirstServed"))
    command = failure.partition("python ")[2].split()
    assert command[:2] == ["-m", "serve.simulation"]
    replay = subprocess.run([sys.executable, *command], cwd=TESTS, capture_output=True, text=True, check=False)
    assert replay.returncode == 1
    assert "add #1" in replay.stdout and replay.stdout.endswith(failure + "\n")
