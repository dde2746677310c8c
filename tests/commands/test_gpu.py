import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tonnage.commands import run
from tonnage.commands.app import app
from tonnage.errors import UnknownGpu
from tonnage.hardware import all_gpus, all_hosts


def said(*words: str) -> str:
    done = CliRunner().invoke(app, ["gpu", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_catalogue_is_listed() -> None:
    lines = said().splitlines()
    assert all(any(line.startswith(f"   {card.key} ") for line in lines) for card in all_gpus())
    assert max(map(len, lines)) <= 80


def test_hosts_are_listed() -> None:
    lines = said("--hosts").splitlines()
    assert all(any(line.startswith(f"  {host.key} ") for line in lines) for host in all_hosts())
    assert max(map(len, lines)) <= 80


def test_two_cards_side_by_side() -> None:
    text = said("h200", "rtx-4090")
    assert "NVIDIA H200" in text and "NVIDIA GeForce RTX 4090" in text
    assert "150,109,880,320 B" in text


def test_hosts_and_files_are_shown_too(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('name = "Mine"\nlike = "h100"\n')
    text = said("p5.48xlarge", str(mine))
    assert "in AWS p5.48xlarge" in text and "Mine" in text


def test_json_has_the_fields_of_the_catalogue(tmp_path: Path) -> None:
    target = tmp_path / "gpu.json"
    said("h200", "--json", str(target))
    (card,) = json.loads(target.read_text())["gpus"]
    assert card["memory_bytes"] == 150_109_880_320
    assert card["host"]["key"] == "hgx-h200"
    memory = next(level for level in card["levels"] if level["name"] == "memory")
    assert memory["bytes_per_s"] == 4.8e12
    assert memory["flop_per_byte"]["bf16"] == pytest.approx(206.1, abs=0.1)


def test_json_on_standard_output_is_data_alone() -> None:
    figures = json.loads(said("--json", "-"))
    assert len(figures["gpus"]) == len(all_gpus())
    assert len(figures["hosts"]) == len(all_hosts())


def test_an_unknown_card_names_close_ones() -> None:
    done = CliRunner().invoke(app, ["gpu", "h300"])
    assert isinstance(done.exception, UnknownGpu)
    assert "h200" in done.exception.hint


def test_a_card_without_cuda_cannot_run_scripts() -> None:
    with pytest.raises(UnknownGpu, match="CUDA's cards alone"):
        run.command(["--gpu", "mi300x", __file__])
