"""`tonnage plan train` and `plan serve` of models that make images."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tonnage.commands import plan_serve, plan_train


@pytest.mark.parametrize(
    "words",
    [
        ["sdxl", "--gpus", "rtx-4090", "--lora", "16", "--resolution", "1024", "--explain"],
        ["--gpus", "rtx-4060-ti-16", "flux", "--lora", "16"],
        ["wan-2.1-14b", "--gpus", "8xh100", "--lora", "32", "--frames", "17"],
        ["sdxl", "--lora", "16"],
    ],
)
def test_reports_of_trainings_keep_to_80_columns(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_train.command(words) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 8
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    "words",
    [
        ["flux-dev", "--gpus", "rtx-4090", "--resolution", "1024", "--offload", "model", "--explain"],
        ["wan-2.1-14b", "--gpus", "rtx-3060", "--resolution", "720x1280", "--frames", "81"],
        ["sd3-medium", "--gpus", "h100", "--batch", "16", "--weights", "fp8"],
        ["flux-schnell"],
    ],
)
def test_reports_of_images_keep_to_80_columns(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_serve.command(words) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 8
    assert max(map(len, lines)) <= 80


def test_without_cards_it_says_which_hold_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_serve.command(["flux-dev", "--offload", "none", "--json", "-"]) == 0
    cards = {row["gpus"]: row["fits"] for row in json.loads(capsys.readouterr().out)["cards"]}
    assert cards["a100-40"] and not cards["rtx-4090"]


def test_help_is_that_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        plan_train.command(["sdxl", "--help"])
    assert ended.value.code == 0
    assert "--text-encoders" in capsys.readouterr().out


def test_language_models_are_planned_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_train.command(["gpt2", "--gpus", "h100", "--seq", "512"]) == 0
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "words", "parts"),
    [
        (plan_serve.command, "flux-dev --gpus rtx-4090", []),
        (plan_serve.command, "flux-dev --gpus rtx-3060 --offload none", ["GPU"]),
        (plan_train.command, "sdxl --gpus rtx-3060", ["GPU"]),
    ],
)
def test_report_status_and_figures_say_the_same_and_the_next_plan_fits(
    command: Callable[[list[str]], int],
    words: str,
    parts: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    file = tmp_path / "plan.json"
    status = command([*words.split(), "--json", str(file)])
    report, found = capsys.readouterr().out, json.loads(file.read_text())
    assert found["fits"] == found["best"]["fits"] == (status == 0) == (not parts)
    assert [short["part"] for short in found["best"]["shortages"]] == parts
    assert ("does not fit" in report.splitlines()[1]) == ("next plan that fits" in report) == bool(parts)
    assert max(map(len, report.splitlines())) <= 80
    for remedy in found["remedies"]:
        more = " ".join(remedy["flags"]).split()
        assert command([*words.split(), *more, "--json", str(file)]) == 0, more
        assert json.loads(file.read_text())["best"]["choices"] == remedy["plan"]["choices"]
