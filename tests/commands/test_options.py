"""Flags that are not known: the closest one is named; and `plan train` and `plan serve` without cards."""

import json

import pytest

from tonnage.commands import plan_serve, plan_train
from tonnage.commands.options import Parser, parser_of
from tonnage.errors import RequestError


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "h200"], "unrecognized arguments: --gpu h200 (did you mean --gpus?)"),
        (["--sequence=3"], "unrecognized arguments: --sequence=3 (did you mean --seq?)"),
        (["--colour", "red"], "unrecognized arguments: --colour red\n"),
        (["extra"], "unrecognized arguments: extra\n"),
        (["--gpus"], "expected one argument"),
    ],
)
def test_what_is_not_known_is_named_with_the_closest_flag(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = Parser("tonnage plan train")
    parser.add_argument("--gpus")
    parser.add_argument("--seq")
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(words)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "certify"])
def test_a_version_that_is_none_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = parser_of(command)
    assert parser.parse_args(["--gpu", "t4", "--torch", "2.11.0+cu130", "train.py"]).torch == "2.11.0+cu130"
    for version in ("x", "2", "2.x", "v2.11"):
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args(["--gpu", "t4", "--torch", version, "train.py"])
        assert f"{version!r} is not a version of torch. Write it like 2.11." in capsys.readouterr().err


def test_cards_are_listed_by_memory_and_the_smallest_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_serve.command(["llama-3.1-8b"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "GiB" in line]
    sizes = [float(row[row.index("GiB") - 1].replace(",", "")) for row in rows]
    assert sizes == sorted(sizes)
    assert [row[0] for row in rows].index("→") == 0


def test_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_train.command(["qwen2.5-0.5b", "--seq", "1k", "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    row = next(row for row in figures["cards"] if row["gpus"] == figures["smallest"])
    assert row["fits"] and row["micro_batch"] >= 1 and row["tokens_per_s"] > 0


def test_where_none_holds_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_serve.command(["kimi-k2", "--context", "128k", "--users", "4000"]) == 1
    assert "too small: " in capsys.readouterr().out


@pytest.mark.parametrize("command", [plan_train.command, plan_serve.command])
def test_files_are_of_some_cards(command) -> None:
    with pytest.raises(RequestError, match="--export needs --gpus"):
        command(["llama-3.1-8b", "--export", "somewhere"])
