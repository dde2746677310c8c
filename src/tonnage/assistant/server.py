"""The MCP server, over standard input and output, or over HTTP on this machine. Errors become readable messages here."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.resources import FileResource
from mcp_types import CallToolResult, InputRequiredResult, TextContent
from pydantic import ValidationError

from tonnage import __version__
from tonnage.assistant import child
from tonnage.assistant.session import AssistantSession, Folder
from tonnage.assistant.tools import all_tools
from tonnage.errors import TonnageError

_INSTRUCTIONS = (
    "Tonnage predicts GPU memory. `plan` answers what a model needs before there is a script; `run` what a script needs, on a "
    "GPU that is not there; `explain` why something ran out; `show` and `diff` where memory went and what grew. Answers are "
    "short; each links a page with everything, for the person. Sizes are in GiB."
)


class AssistantServer(MCPServer[AssistantSession]):
    """Tonnage's tools over one folder; errors of a call become a sentence."""

    def __init__(self, folder: Folder, *, allow_run: bool) -> None:
        self.session = AssistantSession(folder, allow_run, self._publish)
        self._tools = {tool.name: tool for tool in all_tools()}
        super().__init__(
            "tonnage",
            title="Tonnage",
            version=__version__,
            instructions=_INSTRUCTIONS,
            tools=list(self._tools.values()),
            lifespan=_lifespan,
            log_level="ERROR",
        )

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[AssistantSession] | None = None
    ) -> CallToolResult | InputRequiredResult:
        """Call a tool; on failure, the result says what was asked, what was found and what to do."""
        try:
            known = self._tools.get(name)
            if known is None:
                raise TonnageError(f"There is no tool {name[:100]!r}.", hint=f"There are {', '.join(self._tools)}.")
            names = list(known.parameters["properties"])
            for unknown in (argument for argument in arguments if argument not in names):
                close = get_close_matches(unknown, names, 1)
                hint = f"Did you mean {close[0]}? " if close else ""
                raise TonnageError(f"{name} takes no {unknown[:100]!r}.", hint=f"{hint}It takes {', '.join(names)}.")
            return await super().call_tool(name, arguments, context)
        except TonnageError as error:
            words = error.words
        except ToolError as error:
            words = _words(name, error)
        return CallToolResult(content=[TextContent(text=words)], is_error=True)

    def _publish(self, path: Path, mime_type: str, about: str) -> None:
        file = FileResource(uri=path.as_uri(), name=path.name, description=about, mime_type=mime_type, path=path)
        self.add_resource(file)


def _words(name: str, error: ToolError) -> str:
    cause = error.__cause__
    if isinstance(cause, TonnageError):
        return cause.words
    if isinstance(cause, ValidationError):
        wrong = [f"{'.'.join(map(str, e['loc'][:1]))}: {e['msg']}" for e in cause.errors(include_url=False)]
        return f"{name} was called with arguments that it cannot use. {'; '.join(dict.fromkeys(wrong))}."
    if isinstance(cause, ToolError):
        return str(cause)
    return f"{name} failed, and it is Tonnage's fault: {type(cause).__name__}. The server's log has the details."


@asynccontextmanager
async def _lifespan(server: MCPServer[AssistantSession]) -> AsyncIterator[AssistantSession]:
    """Run the server's lifetime; its end terminates the commands it runs."""

    async def end_on_signal() -> None:
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            async for _ in signals:
                child.end_all()
                os._exit(128 + signal.SIGTERM)

    assert isinstance(server, AssistantServer)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(end_on_signal)
        yield server.session
        tasks.cancel_scope.cancel()


def serve(folder: Path, *, allow_run: bool = False, port: int | None = None) -> None:
    """Serve until the client disconnects, or until interrupted."""
    server = AssistantServer(Folder(folder), allow_run=allow_run)
    with suppress(KeyboardInterrupt):
        if port is None:
            server.run("stdio")
        else:
            server.run("streamable-http", host="127.0.0.1", port=port)
