"""README and docs are true: their links lead somewhere, their commands and keys exist."""

import re
from pathlib import Path

import pytest
import typer.main

from clock.test_step import PRODUCT, step
from support import training_run
from tonnage.commands.app import app
from tonnage.commands.options import parser_of
from tonnage.explain import Advice
from tonnage.hardware import find_cluster, find_gpu
from tonnage.report.runs.terminal import card_figures
from tonnage.report.step_time import Campaign

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}
CALL = re.compile(r"^(?:\$ )?(?:\w+=\S+ )?tonnage (.+)$", re.M)
CALLS = [(name, call) for name, text in TEXTS.items() for call in CALL.findall(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize(("page", "call"), CALLS)
def test_commands_exist(page: str, call: str) -> None:
    known = set(typer.main.get_command(app).commands) | {"--help", "--version"}
    assert call.split()[0] in known, f"{page} calls tonnage {call}"


@pytest.mark.parametrize(("page", "call"), [(page, call) for page, call in CALLS if call.startswith("run --gpu")])
def test_options_of_run_and_names_of_cards_exist(page: str, call: str) -> None:
    words = call.split("#")[0].split()[1:]
    if "SCRIPT" in words:
        return
    options = parser_of("run").parse_args(words)
    assert (
        find_cluster(options.gpus)
        if options.gpus
        else [name == "all" or find_gpu(name) for name in options.gpu.split(",")]
    )


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {target for text in TEXTS.values() for target in re.findall(r"\bmake ([a-z]+)\b(?=`|\s+#|$)", text, re.M)}
    assert named <= targets
    assert {"setup", "lint", "test", "demo", "bench", "docs", "truth"} <= targets


def test_ci_runs_the_readme_s_test_command() -> None:
    assert "make test" in TEXTS["README.md"]
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_keys_of_the_json_are_documented_and_exist() -> None:
    table = TEXTS["docs/run.md"].split("## For programs")[1]
    documented = {key for row in re.findall(r"^\| (`.+?) \|", table, re.M) for key in re.findall(r"`(\w+)`", row)}
    run = training_run()
    run.captured = step(PRODUCT)
    assert documented - {"cards", "ranks"} <= set(card_figures(run, Advice(), Campaign(tokens=1e9, price=1.0)))


def test_every_file_named_is_there() -> None:
    named = {path for text in TEXTS.values() for path in re.findall(r"`((?:src|tests|docs|examples)/[\w/.]+\w)`", text)}
    assert [path for path in named if not (ROOT / path).exists()] == []
