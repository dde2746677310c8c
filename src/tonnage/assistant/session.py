"""The state of one server: its folder, whether it asks before it runs a script, and how commands become answers."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from mcp.server.mcpserver import Context
from mcp_types import CallToolResult, ResourceLink, TextContent

from tonnage.assistant.answers import sentence, small
from tonnage.assistant.child import run_command
from tonnage.assistant.folder import Folder
from tonnage.errors import TonnageError

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
        failed = bool(program) and found.get("outcome") == "error"
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
