"""A server as clients meet it: uvicorn on a free port of the loopback, in a thread."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from tonnage.serve.engine import Engine
from tonnage.serve.server.app import Service, create_app
from tonnage.serve.server.running import Server, listen
from tonnage.serve.server.worker import Worker

MODEL = "tiny"
PATIENCE_S = 20.0


@dataclass
class Live:
    """A running server, and a client of it."""

    url: str
    engine: Engine
    worker: Worker
    server: Server
    client: httpx.Client

    def complete(self, **body: object) -> httpx.Response:
        return self.client.post("/v1/completions", json={"model": MODEL, "prompt": "hello", **body})

    def chat(self, text: str = "hello", **body: object) -> httpx.Response:
        words = {"model": MODEL, "messages": [{"role": "user", "content": text}], **body}
        return self.client.post("/v1/chat/completions", json=words)

    def until_quiet(self) -> None:
        """Until nothing runs or waits and no block is held."""
        pool = self.engine.scheduler.pool
        until(lambda: not self.engine.has_work and pool.available == pool.count - 1)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never came to pass"
        time.sleep(0.005)


@contextmanager
def serving(engine: Engine, *, keys: Sequence[str] = (), drain_s: float = 5.0) -> Iterator[Live]:
    worker = Worker(engine)
    service = Service(worker, MODEL, engine.context, engine.architecture.vocab, engine.tokenizer)
    server = Server(create_app(service, keys), worker, drain_s=drain_s)
    socket = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([socket],), daemon=True)
    thread.start()
    until(lambda: server.started)
    url = f"http://127.0.0.1:{socket.getsockname()[1]}"
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=PATIENCE_S) as client:
            yield Live(url, engine, worker, server, client)
    finally:
        worker.draining = False
        server.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
