import json
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from support import training_run
from tonnage.commands.app import app
from tonnage.commands.run import command
from tonnage.errors import OutputExists, RequestError
from tonnage.recording import Recording, read_recording


class Virtual(types.ModuleType):
    """A stand-in for the virtual GPU, which answers with a recording made by hand and notes what it was asked."""

    def __init__(self, **options) -> None:
        super().__init__("tonnage.virtual")
        self.options = options
        self.asked: dict = {}

    def run_script(
        self, script, arguments, *, gpu, torch_version, progress, unlimited=False, redirection=None
    ) -> Recording:
        self.asked = {"script": Path(script.name), "arguments": arguments, "gpu": gpu.key, "torch": torch_version}
        print("the script's own words")
        return training_run(gpu=gpu.key, **self.options)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("pass\n")
    return str(path)


@dataclass
class Done:
    exit_code: int
    output: str
    virtual: Virtual


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    def invoke(*words: str, **options) -> Done:
        virtual = Virtual(**options)
        monkeypatch.setitem(sys.modules, "tonnage.virtual", virtual)
        redirect = SimpleNamespace(Redirection=lambda **_: None)
        monkeypatch.setitem(sys.modules, "tonnage.virtual.redirect", redirect)
        return Done(command(list(words)), capsys.readouterr().out, virtual)

    return invoke


def test_the_script_s_own_words_follow_untouched(invoke, script: str) -> None:
    own = ["--gpu", "mine", "-o", "x", "--", "--json", "-v", "--help"]
    done = invoke("--gpu", "h200", "--torch", "2.11", script, *own)
    assert done.exit_code == 0, done.output
    assert done.virtual.asked == {"script": Path(script), "arguments": own, "gpu": "h200", "torch": "2.11"}


def test_what_fits_exits_0_with_a_report(invoke, script: str) -> None:
    done = invoke("--gpu", "h200", script)
    assert done.exit_code == 0
    assert "NVIDIA H200" in done.output and "fits" in done.output
    assert done.virtual.asked["torch"] is None


def test_what_does_not_fit_exits_1(invoke, script: str) -> None:
    done = invoke("--gpu", "t4", script, batch=64)
    assert done.exit_code == 1
    assert "does not fit" in done.output


def test_a_script_that_failed_keeps_its_status(invoke, script: str) -> None:
    done = invoke("--gpu", "h200", script, outcome="error", exit_status=7)
    assert done.exit_code == 7


def test_several_cards_are_answered_from_the_run_on_the_largest(invoke, script: str, tmp_path: Path) -> None:
    answer = tmp_path / "answer.json"
    done = invoke("--gpu", "t4,h200,4090,H200", "--json", str(answer), script, batch=32)
    assert done.virtual.asked["gpu"] == "h200"
    assert done.exit_code == 1
    cards = json.loads(answer.read_text())["cards"]
    assert [(card["gpu_key"], card["fits"]) for card in cards] == [("t4", False), ("h200", True), ("rtx-4090", True)]


def test_all_cards_are_answered_from_one_run_without_a_limit(invoke, script: str, tmp_path: Path) -> None:
    done = invoke("--gpu", "all", "--json", str(tmp_path / "all.json"), script, batch=32, layers=12)
    assert done.exit_code == 0, done.output
    assert "these hold it" in done.output and "these do not" in done.output
    figures = json.loads((tmp_path / "all.json").read_text())
    assert figures["smallest_card"] in {row["gpu_key"] for row in figures["cards"] if row["fits"]}
    assert figures["gpu_key"] == done.virtual.asked["gpu"] == "h200"
    page = tmp_path / "all.html"
    assert invoke("--gpu", "all", "--html", str(page), script, batch=32, layers=12).exit_code == 0
    assert "Which cards hold it" in page.read_text()


def test_the_recording_is_kept_and_shown_again(invoke, script: str, tmp_path: Path) -> None:
    kept = tmp_path / "run.tonnage"
    done = invoke("--gpu", "h200", "-o", str(kept), script)
    assert done.exit_code == 0
    assert read_recording(kept).allocations == training_run().allocations
    shown = CliRunner().invoke(app, ["show", str(kept)])
    assert shown.exit_code == 0
    assert shown.output.strip() in done.output


def test_a_recording_that_is_there_is_not_overwritten(invoke, script: str, tmp_path: Path) -> None:
    kept = tmp_path / "run.tonnage"
    kept.write_text("precious")
    with pytest.raises(OutputExists):
        invoke("--gpu", "h200", "-o", str(kept), script)
    assert "tonnage.virtual" not in sys.modules or not sys.modules["tonnage.virtual"].asked, "found before the run"
    assert kept.read_text() == "precious"
    done = invoke("--gpu", "h200", "-o", str(kept), "--force", script)
    assert done.exit_code == 0
    assert read_recording(kept).fits


def test_a_run_that_failed_does_not_block_the_next(invoke, script: str, tmp_path: Path) -> None:
    kept = tmp_path / "run.tonnage"
    assert invoke("--gpu", "h200", "-o", str(kept), script, outcome="error", exit_status=7).exit_code == 7
    assert read_recording(kept).header.outcome == "error"
    assert invoke("--gpu", "h200", "-o", str(kept), script).exit_code == 0
    with pytest.raises(OutputExists):
        invoke("--gpu", "h200", "-o", str(kept), script)


def test_a_run_out_of_memory_is_an_answer_and_stays(invoke, script: str, tmp_path: Path) -> None:
    kept = tmp_path / "run.tonnage"
    invoke("--gpu", "t4", "-o", str(kept), script, batch=64, outcome="oom")
    with pytest.raises(OutputExists):
        invoke("--gpu", "h200", "-o", str(kept), script)


def test_json_on_stdout_is_data_alone(script: str) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_run import Virtual
sys.modules["tonnage.virtual"] = Virtual()
sys.modules["tonnage.virtual.redirect"] = type("Redirect", (), {{"Redirection": lambda **_: None}})
from tonnage.commands.main import main
sys.argv = ["tonnage", "run", "--gpu", "h200", "--json", "-", {script!r}]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert json.loads(done.stdout)["outcome"] == "ok"
    assert "the script's own words" in done.stderr and "NVIDIA H200" not in done.stderr


def test_a_card_named_after_the_script_is_the_script_s_and_the_error_says_so(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command([script, "--gpu", "h200"])
    assert "what follows SCRIPT is the script's own: name the card with --gpu before it" in capsys.readouterr().err


def test_only_the_script_is_missing_where_the_script_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command(["--gpu", "h200"])
    assert "required: SCRIPT\n" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["-o", "--json", "--html"])
def test_a_file_that_cannot_be_made_is_refused_before_the_run(option: str, invoke, script: str, tmp_path: Path) -> None:
    for name, why in ((tmp_path / "none" / "x", "there is no folder"), (tmp_path, "it is a folder")):
        with pytest.raises(RequestError, match=why):
            invoke("--gpu", "h200", "--force", option, str(name), script)
    assert invoke("--gpu", "h200", "--json", "-", script).exit_code == 0
    assert invoke("--gpu", "h200", "--json", "/dev/null", script).exit_code == 0
