import subprocess
import sys
from pathlib import Path

import pytest

from tonnage import __version__ as tonnage_version
from tonnage.commands.main import main

TONNAGE = str(Path(sys.executable).parent / "tonnage")


def tonnage(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TONNAGE, *words], capture_output=True, text=True, check=False)


def test_the_version_is_printed() -> None:
    assert tonnage("--version").stdout.startswith("tonnage 0.")


def test_help_names_every_command() -> None:
    said = tonnage("--help")
    assert said.returncode == 0
    assert all(command in said.stdout for command in ("run", "show", "replay"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--gpu", "h300", "x.py"], "There is no GPU called 'h300'"),
        (["run", "--gpu", "h200", "missing.py"], "There is no script at missing.py"),
        (["run", "--gpu", "h200", "."], "found a folder"),
        (["run", "missing.py"], "--gpu"),
        (["run", "--gpu", "h200"], "SCRIPT"),
        (["run", "--gpu", "h200", "--gpuu", __file__], "--gpuu"),
        (["show", "missing.tonnage"], "There is no recording at missing.tonnage"),
        (["sail"], "sail"),
    ],
)
def test_a_wrong_request_exits_2_and_says_what_was_wrong(words: list[str], said: str) -> None:
    done = tonnage(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    done = subprocess.run(f"{TONNAGE} --help | head -1", shell=True, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


WAY_TO_A_RUN = """
import sys, time, types
start = time.process_time()
virtual = types.ModuleType("tonnage.virtual")
redirect = types.ModuleType("tonnage.virtual.redirect")
redirect.Redirection = lambda **_: None
sys.modules["tonnage.virtual.redirect"] = redirect
def run_script(*_, **__):
    print(time.process_time() - start, *{"torch", "numpy", "typer", "rich"} & sys.modules.keys())
    raise SystemExit
virtual.run_script = run_script
sys.modules["tonnage.virtual"] = virtual
from tonnage.commands.main import main
sys.argv = ["tonnage", "run", "--gpu", "h200", sys.argv[1]]
main()
"""
LIBRARIES_OF_A_COMMAND_LINE = """
import time
start = time.process_time()
import typer, rich.console
print(time.process_time() - start)
"""


def test_the_way_to_a_run_is_short() -> None:
    """Up to the call of `run_script`, against importing what the other commands use: the best processor time of five."""
    best = {WAY_TO_A_RUN: 1e9, LIBRARIES_OF_A_COMMAND_LINE: 1e9}
    for program in [*best] * 5:
        command = [sys.executable, "-c", program, __file__]
        took, *heavy = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert not heavy
        best[program] = min(best[program], float(took))
    assert best[WAY_TO_A_RUN] < 1.75 * best[LIBRARIES_OF_A_COMMAND_LINE], best


def test_errors_become_words_and_their_own_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tonnage", "run", "--gpu", "h300", __file__])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("tonnage: There is no GPU called 'h300' in the catalogue.\nDid you mean")


def test_other_commands_go_through_the_application(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tonnage", "--version"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"tonnage {tonnage_version}\n"


LEAVES_LATE = """
import atexit, threading, time
atexit.register(print, "handler ran")
threading.Thread(target=lambda: (time.sleep(0.5), print("thread ended"))).start()
print("script ended", end="")
"""


def test_a_run_that_ends_waits_for_threads_runs_exit_handlers_and_flushes(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(LEAVES_LATE)
    done = tonnage("run", "--gpu", "h200", str(script))
    assert done.returncode == 0
    # All of it belongs to the run, and comes before the report.
    assert done.stdout.startswith("script endedthread ended\nhandler ran\n")
    assert "NVIDIA H200" in done.stdout


def test_an_interrupted_command_says_so_and_shows_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tonnage.commands.main._run", interrupted)
    monkeypatch.setattr(sys, "argv", ["tonnage", "run"])
    with pytest.raises(SystemExit, match="130"):
        main()
    assert capsys.readouterr().err == "tonnage: interrupted\n"


@pytest.mark.parametrize("redirected", [">&-", ">&- 2>&-"])
def test_a_closed_stream_is_no_error(redirected: str) -> None:
    assert subprocess.run(["bash", "-c", f"{TONNAGE} gpu h200 {redirected}"], check=False).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_behind_the_output_is_told_in_words() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([TONNAGE, "gpu", "h200"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "tonnage: the output cannot be written: No space left on device\n"
