"""How a script ended: what it raised, and what that was raised from."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tonnage.script.running import run_as_main

TORCH = SimpleNamespace(OutOfMemoryError=MemoryError)  # an error that a script can raise without torch


@pytest.mark.parametrize(
    ("body", "outcome", "error"),
    [
        ("pass", "ok", ""),
        ("raise MemoryError('out of it')", "oom", "out of it"),
        # a pipeline's schedule wraps what its stages raise
        ("try: raise MemoryError('out of it')\nexcept MemoryError as e: raise RuntimeError('stage') from e", "oom", "out of it"),
        # another mistake, made after an error that was caught
        ("try: raise MemoryError('out of it')\nexcept MemoryError: raise RuntimeError('stage')", "error", "RuntimeError: stage"),
        ("raise ValueError('no')", "error", "ValueError: no"),
    ],
)  # fmt: skip
def test_how_it_ended(tmp_path: Path, body: str, outcome: str, error: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(body + "\n")
    ending = run_as_main(script, [], TORCH)
    assert (ending.outcome, ending.error) == (outcome, error)
