"""The server's life: it serves until SIGTERM or Ctrl-C, drains, and stops; at once on a second signal."""

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from tonnage.errors import MissingPart, RequestError

try:
    import fastapi
    import prometheus_client  # noqa: F401
    import uvicorn
except ImportError as missing:
    raise MissingPart(f"The server needs {missing.name}.", hint="Install it: pip install 'tonnage[serve]'") from None

from tonnage.report.serve import Load, kv_frame, kv_line
from tonnage.serve.server.app import Service, create_app
from tonnage.serve.server.limits import HEADER_BYTES, ApiError
from tonnage.serve.server.worker import Worker
from tonnage.serve.stats import EngineState

if TYPE_CHECKING:
    from tonnage.serve.engine import Engine

Show = Callable[[EngineState, Load], None]


class Server(uvicorn.Server):
    """uvicorn with a drain before shutdown, during which new requests are answered with 503.

    `ready` is called once connections are accepted.
    """

    def __init__(
        self, app: "fastapi.FastAPI", worker: Worker, *, drain_s: float, ready: Callable[[], None] | None = None
    ) -> None:
        # h11 limits the headers; the other parsers do not.
        super().__init__(
            uvicorn.Config(
                app, http="h11", ws="none", h11_max_incomplete_event_size=HEADER_BYTES, timeout_graceful_shutdown=5,
                log_level="warning", access_log=False, server_header=False,
            )
        )  # fmt: skip
        self._worker, self._drain_s, self._ready = worker, drain_s, ready
        self._drain: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal, or `stop`."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        try:
            await super().startup(sockets)
        except OSError as error:  # another process bound the same port and was the first to listen
            await self.lifespan.shutdown()
            host, port = sockets[0].getsockname()[:2] if sockets else ("?", 0)
            raise _cannot_listen(host, port, error) from None
        if self.started and self._ready is not None:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on the first signal; stop at once on the next."""
        if self._worker.draining:
            self.should_exit = self._worker.hurried = True
            self.force_exit = sig == signal.SIGINT
        else:
            self.stop()

    def stop(self) -> None:
        """Drain, then stop. May be called from any thread."""

        def begin() -> None:
            self._drain = self._drain or asyncio.create_task(self._drained())

        self._worker.draining = True
        self._loop.call_soon_threadsafe(begin)

    async def _drained(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                while self._worker.open and not self.should_exit:
                    await asyncio.sleep(0.02)
        self._worker.close_all()
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket before the model is loaded, so that a port in use is reported at once."""
    with ExitStack() as undo:
        try:
            if not 0 <= port < 2**16:  # the system would take it modulo 2^16
                raise OverflowError("ports are 0 to 65535")
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            bound = undo.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except (OSError, OverflowError, UnicodeError) as error:
            raise _cannot_listen(host, port, error) from None
        undo.pop_all()
    bound.setblocking(False)
    return bound


def _cannot_listen(host: str, port: int, error: Exception) -> RequestError:
    reason = getattr(error, "strerror", None) or error
    return RequestError(f"Cannot listen on {host} port {port}: {reason}.", hint="Choose another --port or --host.")


def url_of(host: str, bound: socket.socket) -> str:
    """Return the URL under which a bound socket is reached, with the port that the system chose if none was named."""
    named = f"[{host}]" if ":" in host else host
    return f"http://{named}:{bound.getsockname()[1]}"


async def serve(
    engine: "Engine", name: str, bound: socket.socket, *, keys: Sequence[str], drain_s: float, watch_s: float | None,
    stream: TextIO, ready: Callable[[], None] | None = None,
) -> bool:  # fmt: skip
    """Serve until a signal comes and requests are drained; return False if a step hangs.

    `ready` is called once connections are accepted.
    """
    worker = Worker(engine)
    service = Service(worker, name, engine.context, engine.architecture.vocab, engine.tokenizer)
    server = Server(create_app(service, keys), worker, drain_s=drain_s, ready=ready)
    watch = asyncio.create_task(_watched(service, server, watch_s, stream)) if watch_s is not None else None
    try:
        await server.serve([bound])
    finally:
        if watch is not None:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
    if worker.busy:
        await worker.stop()  # a server forced to exit does not do this
    return not worker.busy


async def _watched(service: Service, server: Server, interval_s: float, stream: TextIO) -> None:
    before: tuple[float, int] | None = None
    with _shown(stream) as show:
        while True:
            await asyncio.sleep(interval_s)
            if not server.started or server.should_exit:
                continue
            with suppress(ApiError):  # if the engine hangs, try again next time
                state, now_s = await service.state(), time.monotonic()
                show(state, _load(state, now_s, before))
                before = now_s, state.generated


def _load(state: EngineState, now_s: float, before: tuple[float, int] | None) -> Load:
    then_s, generated = before or (now_s, state.generated)
    return Load(
        running=state.running,
        waiting=state.waiting,
        tokens_per_s=(state.generated - generated) / max(now_s - then_s, 1e-9),
        hit_rate=state.prefix_hits / state.prefix_queries if state.prefix_queries else None,
        preemptions=state.preemptions,
    )


@contextmanager
def _shown(stream: TextIO) -> Iterator[Show]:
    """Redraw a frame on a terminal; elsewhere print a line each time."""
    if not stream.isatty():
        yield lambda state, load: print(kv_line(state.ledger, load), file=stream, flush=True)
        return
    from rich.console import Console, Group
    from rich.live import Live

    with Live(console=Console(file=stream, highlight=False, emoji=False), auto_refresh=False) as live:
        yield lambda state, load: live.update(Group("", *kv_frame(state.ledger, load)), refresh=True)
