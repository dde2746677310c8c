"""The state of one server: its folders, whether it asks before it runs a script, and how commands become answers.

Requests are limited to one folder; another keeps this session's pages and recordings. That does not restrict a script
that is run: the confirmation before a run is for that.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import anyio
from mcp.server.mcpserver import Context
from mcp_types import CallToolResult, ResourceLink, TextContent

from tonnage.assistant.answers import sentence, small
from tonnage.assistant.child import run_command
from tonnage.errors import RequestError, TonnageError
from tonnage.untrusted import open_file, printable

_SEPARATORS = re.compile(r"""[=,\s'"\\]+""")


@dataclass
class Folder:
    """Files may be read below `root`, and in `session` by their bare names."""

    root: Path
    session: Path = field(default_factory=lambda: Path(mkdtemp(prefix="tonnage-mcp-")))
    _numbers: "count[int]" = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        self.root, self.session = self.root.resolve(), self.session.resolve()

    def new(self, stem: str, suffix: str) -> Path:
        """Return an unused path in the session's folder: run-1.tonnage, plan-2.json."""
        return self.session / f"{stem}-{next(self._numbers)}{suffix}"

    def pasted(self, text: str) -> Path:
        """Write pasted text to a file of the session."""
        path = self.new("pasted", ".txt")
        path.write_text(text, encoding="utf-8", errors="replace")
        return path

    def file(self, name: str) -> Path:
        """Return the file of that name in the session or below the root; raises RequestError for others."""
        if not name.strip():
            raise RequestError("No file was named.", hint=f"Name one below {self.root}.")
        path = self._resolved(name)
        if path is not None and "/" not in name and (self.session / name).is_file():
            return self.session / name
        if path is None or not (path.is_relative_to(self.root) or path.is_relative_to(self.session)):
            raise self._refusal(name)
        return path

    def check(self, words: Iterable[str]) -> None:
        """Reject arguments whose path leads out of the folder; the command itself checks everything else."""
        for piece in (piece for word in words for piece in _SEPARATORS.split(word)):
            path = self._resolved(piece)
            if path is None or not path.is_relative_to(self.root):
                raise self._refusal(piece)

    def _resolved(self, name: str) -> Path | None:
        """Return the resolved path, following links; None if it cannot be a path."""
        try:
            path = (self.root / Path(name).expanduser()).resolve()
            path.exists()
            return path
        except (ValueError, OSError, RuntimeError):  # a null, a name too long, a loop of links, an unknown user
            return None

    def _refusal(self, name: str) -> RequestError:
        problem = f"{printable(name)[:200]!r} is not below {self.root}, which is all that this server may read."
        return RequestError(problem, hint="Name a file there, or start the server with --folder.")


def is_text(path: Path) -> bool:
    """Say whether a file is text, like a log: recordings and snapshots have null bytes near their beginning."""
    try:
        with open_file(path) as file:
            return b"\0" not in file.read(4096)
    except OSError:
        return False  # the command reports what is wrong with it


PAGE, RECORDING = "text/html", "application/octet-stream"
_AT_ONCE = 2  # concurrent commands; others wait


@dataclass
class AssistantSession:
    """The state of one server; `publish` is called with every page and recording, its type and a description."""

    folder: Folder
    allow_run: bool = False
    publish: Callable[[Path, str, str], None] = lambda path, mime_type, about: None
    _turn: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(_AT_ONCE))

    async def answer(
        self, ctx: Context[Any], command: str, words: Sequence[str], *, files: Sequence[Path | str] = (),
        program: Sequence[str] = (), page: bool = True, records: bool = False, limit_s: float | None = None,
    ) -> CallToolResult:  # fmt: skip
        """Run a command with files, or with a program and its arguments, and return the relevant figures."""
        figures = self.folder.new(command, ".json")
        html, recording = figures.with_suffix(".html"), figures.with_suffix(".tonnage")
        outputs = [f"--json={figures}", *[f"--html={html}"] * page, *[f"--output={recording}"] * records]
        behind = [*["--"] * bool(files), *map(str, files), *program]
        async with self._turn:
            ended = await run_command(
                [*words, *outputs, *behind],
                folder=self.folder.root,
                figures=figures,
                tell=lambda seconds, said: ctx.report_progress(seconds, message=said),
                limit_s=limit_s,
            )
        stopped = f"Stopped after {limit_s} s, and this is what was seen until then. " if ended.timed_out else ""
        if ended.figures is None:
            said = ended.words or f"tonnage {command} ended with status {ended.status} and said nothing."
            raise TonnageError(f"{stopped}{said}")
        found = ended.figures | ({"outcome": "stopped"} if stopped else {})
        line, links = f"{stopped}{sentence(command, found)}", []
        for path, kind, about in (
            (html, PAGE, "The whole report, to open in a browser"),
            (recording, RECORDING, "The recording, for show, explain and diff"),
        ):
            if path.is_file():
                self.publish(path, kind, line)
                uri, size = path.as_uri(), path.stat().st_size
                links.append(ResourceLink(uri=uri, name=path.name, description=about, mime_type=kind, size=size))
        failed = bool(program) and found.get("outcome") in ("error", "depends")
        return self.result(line, small(command, found), links, failed=failed)

    async def printed(self, words: Sequence[str]) -> CallToolResult:
        """Return what a command prints."""
        call = [sys.executable, "-m", "tonnage", *words]
        done = await anyio.run_process(call, cwd=self.folder.root, stderr=subprocess.STDOUT, check=False)
        return CallToolResult(content=[TextContent(text=done.stdout.decode(errors="replace").strip())])

    def result(
        self, line: str, figures: dict[str, Any], links: Sequence[ResourceLink] = (), *, failed: bool = False
    ) -> CallToolResult:
        """Return a line, the figures (also as text: not every client reads structured content), and links."""
        text = json.dumps(figures, separators=(",", ":"), ensure_ascii=False)
        content = [TextContent(text=line), TextContent(text=text), *links]
        return CallToolResult(content=content, structured_content=figures, is_error=failed)
