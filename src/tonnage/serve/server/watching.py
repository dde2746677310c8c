"""Serve while showing the KV cache ledger on a terminal, or writing it as lines."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from tonnage.report.serve import Load, kv_frame, kv_line
from tonnage.serve.server.app import Service, create_app
from tonnage.serve.server.errors import ApiError
from tonnage.serve.server.running import Server
from tonnage.serve.server.worker import Worker
from tonnage.serve.stats import EngineState

if TYPE_CHECKING:
    from tonnage.serve.engine import Engine

Show = Callable[[EngineState, Load], None]


async def serve(
    engine: "Engine",
    name: str,
    bound: socket.socket,
    *,
    keys: Sequence[str],
    drain_s: float,
    watch_s: float | None,
    stream: TextIO,
) -> bool:
    """Serve until a signal comes and requests are drained; return False if a step hangs."""
    worker = Worker(engine)
    service = Service(worker, name, engine.context, engine.architecture.vocab, engine.tokenizer)
    server = Server(create_app(service, keys), worker, drain_s=drain_s)
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
