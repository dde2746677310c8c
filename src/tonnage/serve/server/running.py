"""The server's life cycle: it listens and serves; on SIGTERM or Ctrl-C it drains and stops.

A second signal stops at once.
"""

import asyncio
import signal
import socket
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

from tonnage.errors import MissingPart, RequestError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from tonnage.serve.server.worker import Worker

try:
    import fastapi  # noqa: F401
    import prometheus_client  # noqa: F401
    import uvicorn
except ImportError as missing:
    raise MissingPart(f"The server needs {missing.name}.", hint="Install it: pip install 'tonnage[serve]'") from None

from tonnage.serve.server.limits import HEADER_BYTES

_CLOSING_S = 5


class Server(uvicorn.Server):
    """uvicorn with a drain before shutdown, during which new requests are answered with 503."""

    def __init__(self, app: "FastAPI", worker: "Worker", *, drain_s: float) -> None:
        # h11 limits the headers; the other parsers do not.
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                h11_max_incomplete_event_size=HEADER_BYTES,
                timeout_graceful_shutdown=_CLOSING_S,
                log_level="warning",
                access_log=False,
                server_header=False,
            )
        )
        self._worker = worker
        self._drain_s = drain_s
        self._drain: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal, or `stop`."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on the first signal; stop at once on the next."""
        if self._worker.draining:
            self.should_exit = self._worker.hurried = True
            self.force_exit = sig == signal.SIGINT
        else:
            self.stop()

    def stop(self) -> None:
        """Drain, then stop. May be called from any thread."""
        self._worker.draining = True
        self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        self._drain = self._drain or asyncio.create_task(self._drained())

    async def _drained(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                while self._worker.open and not self.should_exit:
                    await asyncio.sleep(0.02)
        self._worker.close_all()
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket before the model is loaded, so that a port in use is reported at once."""
    if not 0 <= port < 2**16:  # the system would take it modulo 2^16
        raise _cannot_listen(host, port, OverflowError("ports are 0 to 65535"))
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(host, port, error) from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _cannot_listen(host, port, error) from None
    bound.setblocking(False)
    return bound


def _cannot_listen(host: str, port: int, error: Exception) -> RequestError:
    reason = getattr(error, "strerror", None) or error
    return RequestError(f"Cannot listen on {host} port {port}: {reason}.", hint="Choose another --port or --host.")
