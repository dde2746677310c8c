"""TAB, as bash asks for it, also of the commands that parse their own words."""

import os
import subprocess
from pathlib import Path

import pytest

from virtual_runs import TONNAGE


def offered(line: str) -> list[str]:
    """What the shell is told for a line whose last word is being typed."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_TONNAGE_COMPLETE": "complete_bash"}
    done = subprocess.run([str(TONNAGE)], env=os.environ | words, capture_output=True, text=True)
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("tonnage ro", {"roofline"}),
        ("tonnage gpu --h", {"--hosts"}),
        ("tonnage run --g", {"--gpu", "--gpus"}),
        ("tonnage run --gpu h2", {"h200", "h20"}),
        ("tonnage plan tr", {"train"}),
        ("tonnage plan train llama-3.1", {"llama-3.1-8b", "llama-3.1-70b"}),
        ("tonnage plan train llama-3.1-8b --gpus b2", {"b200"}),
        ("tonnage plan train llama-3.1-8b --optimizer ada", {"adam", "adamw", "adafactor"}),
        ("tonnage serve m --kv f", {"fp8"}),
    ],
)
def test_tab_offers_what_fits(line: str, some: set[str]) -> None:
    found = offered(line)
    assert some <= set(found)
    assert all(name.startswith(line.rpartition(" ")[2]) for name in found)


def test_files_are_left_to_the_shell() -> None:
    assert offered("tonnage run --gpu h200 train") == []
    assert offered("tonnage show run") == []


def test_completion_is_installed_for_the_shell_that_is_named(tmp_path: Path) -> None:
    known = os.environ | {
        "HOME": str(tmp_path),
        "SHELL": "/bin/bash",
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }
    done = subprocess.run([str(TONNAGE), "--install-completion", "bash"], env=known, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "tonnage" in (tmp_path / ".bashrc").read_text()
