"""A virtual H200 for the tests, modelled as torch 2.11: the version that the measurements were taken with."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tonnage.hardware import find_gpu
from tonnage.virtual.session import Session

SCRIPTS = Path(__file__).parent / "scripts"
TONNAGE = Path(sys.executable).with_name("tonnage")


@pytest.fixture(scope="module")
def gpu() -> Iterator[Session]:
    """One open virtual GPU for all tests of a module."""
    session = Session(find_gpu("h200"), "2.11")
    session.open()
    yield session
    session.close()


def run_tonnage(*words: str, timeout_s: float = 120, **options: object) -> "subprocess.CompletedProcess[str]":
    """The command as a person types it."""
    return subprocess.run([str(TONNAGE), *words], capture_output=True, text=True, timeout=timeout_s, **options)  # type: ignore[call-overload, no-any-return]
