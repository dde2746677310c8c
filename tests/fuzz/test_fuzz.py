"""The first cases of every kind of file keep the contract, and each way to break it is seen.

A case that fails is run again by its name: tools/fuzz.py --case trace/12 --keep FOLDER.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fuzz import running
from fuzz.kinds import KINDS, Kind

TOOL = Path(__file__).parents[2] / "tools" / "fuzz.py"
CASES = 30


def test_spoilt_files_are_refused_in_words() -> None:
    """Files of every kind, in one process: it says which kind a failure is of."""
    done = subprocess.run([sys.executable, TOOL, "--cases", str(CASES)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{CASES * len(KINDS):,} cases in" in done.stdout + done.stderr


def _uncaught() -> None:
    raise StopIteration


def _hangs() -> None:
    while True:
        pass


def _grows() -> None:
    assert len(b"x" * (running.MOST_BYTES + 2**20))


def _writes() -> None:
    Path("../elsewhere").write_text("x")


def _colours() -> None:
    print("\x1b[31mred")


def _rambles() -> None:
    error = running.TonnageError("")
    error.args = ("x" * 9000,)
    raise error


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory and time are counted as Linux does")
@pytest.mark.parametrize(
    ("call", "sign"),
    [
        (_uncaught, "StopIteration in"),
        (_hangs, "took more than"),
        (_grows, "took more than 1 GiB"),
        (_writes, "trespassed: wrote"),
        (_colours, "an escape sequence"),
        (_rambles, "a sentence of 9,000 characters"),
        (lambda: time.sleep(9), "took more than"),
        (lambda: None, ""),
    ],
)
def test_whatever_breaks_the_contract_is_seen(
    call: Callable[[], None], sign: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(running.KINDS, "planted", Kind(lambda rng, _: b"", lambda rng, _: call, is_file=False))
    if sign == "took more than":
        # Only what never ends is cut off early: a slow machine takes a second to fill a GiB.
        monkeypatch.setattr(running, "MOST_S", 1)
        monkeypatch.setattr(running, "_PATIENCE_S", 2)
    failure = running.run_case("planted", 0, tmp_path / "case")
    assert (failure.sign if failure else "").startswith(sign) and bool(failure) == bool(sign)


def test_a_case_is_made_again_from_its_name(tmp_path: Path) -> None:
    for folder in ("one", "other"):
        running.run_case("config", 5, tmp_path / folder)
    made = [
        {path.name: path.read_bytes() for path in (tmp_path / folder / "work").glob("*.json")}
        for folder in ("one", "other")
    ]
    assert made[0] == made[1] and made[0]
