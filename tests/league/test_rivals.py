"""What other predictors say of a script, asked as the league asks them."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

LEAGUE = Path(__file__).parents[2] / "benchmarks" / "league"
sys.path.insert(0, str(LEAGUE))

import rivals  # noqa: E402
import running  # noqa: E402
from rows import Prediction, Row  # noqa: E402

SCRIPT = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024)).cuda()
optimizer = getattr(torch.optim, sys.argv[1])(model.parameters(), lr=1e-3)
for step in range(3):
    loss = model(torch.randn(256, 1024, device="cuda")).square().mean()
    if "twice" in sys.argv:
        loss = loss + model(torch.randn(256, 1024, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if loss.item() < 0:
        raise SystemExit("a loss below zero")
"""
WEIGHTS = 2 * (1024 * 1024 + 1024)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Prediction]:
    script = tmp_path_factory.mktemp("rivals") / "train.py"
    script.write_text(SCRIPT)
    running.preload()
    ways = rivals.of_script(lambda row: (script, row.case["words"]))
    return lambda name, words: ways[name](Row(words, "h200", "2.11", {"words": words.split()}))


def test_memtracker_counts_the_tensors_of_a_step(asked: Callable[[str, str], Prediction]) -> None:
    said = asked("MemTracker", "AdamW")
    states = 4 * 4 * WEIGHTS
    assert said.refused == ""
    assert states < said.predicted < 1.5 * states  # type: ignore[operator]


def test_arithmetic_is_that_of_the_publisher(asked: Callable[[str, str], Prediction]) -> None:
    assert asked("accelerate", "AdamW").predicted == 4 * 4 * WEIGHTS
    if rivals.ZERO.exists():
        assert asked("DeepSpeed ZeRO-2", "AdamW").predicted == 20 * WEIGHTS
        assert asked("DeepSpeed ZeRO-3", "AdamW").predicted == 18 * WEIGHTS + 4 * (WEIGHTS // 2)


def test_arithmetic_of_adam_says_nothing_of_other_optimizers(asked: Callable[[str, str], Prediction]) -> None:
    assert asked("MemTracker", "SGD").predicted
    assert asked("accelerate", "SGD").refused == "estimates Adam, not SGD"
    assert asked("DeepSpeed ZeRO-2", "SGD").refused == "estimates Adam, not SGD"


def test_arithmetic_is_asked_where_memtracker_refuses(asked: Callable[[str, str], Prediction]) -> None:
    assert "multiple iterative calls" in asked("MemTracker", "AdamW twice").refused
    assert asked("accelerate", "AdamW twice").predicted == 4 * 4 * WEIGHTS


def test_of_a_large_source_a_sample_is_asked() -> None:
    ways = rivals.of_script(lambda row: (Path(row.name), []), one_in=10**9)
    assert ways["MemTracker"](Row("some/row", "h200", "2.11", {})).refused == "not asked"


def test_a_script_that_fails_is_refused_with_its_reason(asked: Callable[[str, str], Prediction]) -> None:
    said = asked("MemTracker", "NoSuchOptimizer")
    assert said.predicted is None
    assert "NoSuchOptimizer" in said.refused
