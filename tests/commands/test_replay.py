"""`tonnage replay`: the report, the figures, the exit status."""

import gzip
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tonnage.commands.replay import replay
from tonnage.errors import BadTrace, RequestError

DATA = Path(__file__).parents[1] / "allocator" / "data"
TRACE = DATA / "default-mlp_train-32.json.gz"


@pytest.fixture
def run():
    app = typer.Typer()
    app.command()(replay)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("path", sorted(DATA.glob("*-*-*.json.gz")))
def test_the_report_fits_eighty_columns(run, path: Path) -> None:
    result = run(path)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "exact" in result.stdout.splitlines()[0]


def test_the_report_names_the_peaks(run) -> None:
    report = run(TRACE).stdout
    assert "peak allocated 6.13 GiB   reserved 6.25 GiB" in report
    assert "101 segments" in report
    assert "PYTORCH_ALLOC_CONF" not in report  # 2 % of what is reserved lies unused
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in run(DATA / "default-vision_train-21.json.gz").stdout


def test_json_goes_to_a_file(run, tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    result = run(TRACE, "--json", target)
    figures = json.loads(target.read_text())
    assert figures["peak_allocated_bytes"] == 6_578_867_200
    assert figures["peak_reserved_bytes"] == 6_715_080_704
    assert len(figures["segments"]) == 101
    assert figures["exact"] is True
    assert "peak allocated" in result.stdout


def test_json_on_standard_output_is_data_alone(run) -> None:
    result = run(TRACE, "--json", "-")
    assert json.loads(result.stdout)["events"] == 1967
    assert result.stderr == ""


def test_a_trace_that_the_model_contradicts_exits_1(run, tmp_path: Path) -> None:
    events = json.loads(gzip.decompress(TRACE.read_bytes()))
    events[1][1] += 512
    bent = tmp_path / "bent.json"
    bent.write_text(json.dumps(events))
    result = run(bent)
    assert result.exit_code == 1
    assert "differences" in result.stdout
    assert "event 1:" in result.stdout


def test_requests_that_are_wrong(run, tmp_path: Path) -> None:
    assert isinstance(run(tmp_path / "no.json").exception, BadTrace)
    assert isinstance(run(TRACE, "--json", tmp_path / "no" / "where.json").exception, RequestError)
