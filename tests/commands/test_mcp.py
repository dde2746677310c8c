"""`tonnage mcp`: what is refused before there is a server."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tonnage.commands.app import app
from tonnage.errors import MissingPart, RequestError


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["mcp", "--folder", str(tmp_path / "none")])
    assert isinstance(done.exception, RequestError) and "--folder" in done.exception.words


def test_the_whole_machine_is_given_by_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    done = CliRunner().invoke(app, ["mcp"])
    assert isinstance(done.exception, RequestError) and "--folder DIR" in done.exception.words


def test_without_the_sdk_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mcp", "mcp_types")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("server", "session", "tools"):
        monkeypatch.delitem(sys.modules, f"tonnage.assistant.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    done = CliRunner().invoke(app, ["mcp", "--folder", str(tmp_path)])
    assert isinstance(done.exception, MissingPart) and "tonnage[mcp]" in done.exception.words


def test_no_other_command_waits_for_the_sdk() -> None:
    code = (
        "import sys, tonnage.commands.app; print([m for m in sys.modules if m.partition('.')[0] in ('mcp', 'anyio')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
