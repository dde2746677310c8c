"""The client of the protocol's own SDK, and the real server in a process of its own at the other end."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="the SDK of the Model Context Protocol is not installed: make setup")

from anyio.from_thread import start_blocking_portal
from mcp import Client, StdioServerParameters, stdio_client
from mcp_types import ElicitResult

NEWEST, BEFORE = "auto", "legacy"  # how the two talk: by the newest protocol, and by those with a handshake


class Person:
    """Says the same to every question, and remembers them."""

    def __init__(self, action: str, **content: Any) -> None:
        self.will(action, **content)

    def will(self, action: str, **content: Any) -> None:
        """Say this from now on, as if never asked before."""
        self.asked: list[str] = []
        self._result = ElicitResult(action=action, content=content if action == "accept" else None)

    async def __call__(self, context: Any, params: Any) -> ElicitResult:
        self.asked.append(params.message)
        return self._result


class Talk:
    """A client that waits for each answer, as a test does."""

    def __init__(self, client: Client, portal: Any) -> None:
        self.client, self.portal = client, portal
        self.progress: list[tuple[float, str]] = []

    def __call__(self, tool: str, **arguments: Any) -> Any:
        return self.portal.call(lambda: self.client.call_tool(tool, arguments, progress_callback=self._tell))

    def words(self, tool: str, **arguments: Any) -> str:
        """What is said to a call that fails."""
        result = self(tool, **arguments)
        assert result.is_error, result
        return result.content[0].text

    async def _tell(self, progress: float, total: float | None, message: str | None) -> None:
        self.progress.append((progress, message or ""))


@contextmanager
def talk(folder: Path, *flags: str, person: Person | None = None, mode: str = NEWEST) -> Iterator[Talk]:
    """Start the server over a folder, and a client that may or may not be able to ask a person."""
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "tonnage", "mcp", "--folder", str(folder), *flags], env=dict(os.environ)
    )
    client = Client(stdio_client(server), elicitation_callback=person, mode=mode)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(client) as connected:
        yield Talk(connected, portal)


def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """What a condition gives once it holds."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def is_alive(pid: int) -> bool:
    """Whether a process still runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
