import asyncio
import io
import socket
import threading
from typing import Any

import pytest

from serve.server.fake_engine import FakeEngine
from serve.server.live import serving, until
from tonnage.errors import RequestError
from tonnage.serve.sampling import Sampling
from tonnage.serve.server.running import _load, _shown, listen, serve, url_of
from tonnage.serve.stats import EngineState


def test_a_port_that_is_taken_is_said_in_words() -> None:
    taken = listen("127.0.0.1", 0)
    taken.listen()
    with taken, pytest.raises(RequestError, match="in use"):
        listen("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 99_999), ("127.0.0.1", -1), ("no.such.host.invalid", 80)])
def test_an_address_that_cannot_be_is_said_in_words(host: str, port: int) -> None:
    with pytest.raises(RequestError, match="Cannot listen"):
        listen(host, port)


def test_the_loopback_of_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        bound = listen("::1", 0)
    except RequestError:
        pytest.skip("no IPv6 here")
    with bound:
        assert bound.family == socket.AF_INET6


def test_it_is_ready_when_connections_are_accepted() -> None:
    bound = listen("127.0.0.1", 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(bound.getsockname(), timeout=5)
    seen: list[str] = []

    async def play() -> None:
        def ready() -> None:
            with socket.create_connection(bound.getsockname(), timeout=5):
                seen.append(url_of("127.0.0.1", bound))
            serving.cancel()

        words: Any = {"keys": [], "drain_s": 1.0, "watch_s": None, "stream": io.StringIO(), "ready": ready}
        serving = asyncio.create_task(serve(FakeEngine(), "tiny", bound, **words))
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(asyncio.wait_for(play(), 20))
    assert seen == [f"http://127.0.0.1:{bound.getsockname()[1]}"]
    assert url_of("::1", bound).startswith("http://[::1]:")


def test_a_port_that_is_taken_while_the_model_loads_is_said_in_words() -> None:
    first = listen("127.0.0.1", 0)
    second = listen(*first.getsockname())  # neither listens yet
    first.listen()
    worker_threads = threading.active_count()
    words: Any = {"keys": [], "drain_s": 1.0, "watch_s": 1.0, "stream": io.StringIO()}
    with first, second, pytest.raises(RequestError, match=f"port {first.getsockname()[1]}: Address already in use"):
        asyncio.run(serve(FakeEngine(), "tiny", second, **words))
    assert threading.active_count() == worker_threads


def test_an_idle_server_stops_at_once() -> None:
    with serving(FakeEngine(), drain_s=100) as live:
        live.client.close()
        live.server.stop()
        until(lambda: live.server.should_exit)
    assert not live.worker._thread.is_alive()


def test_a_second_signal_does_not_wait() -> None:
    engine = FakeEngine(pace_s=0.02, context=10_000, blocks=4000)
    with serving(engine, drain_s=100) as live, live.client.stream(
        "POST", "/v1/completions", json={"model": "tiny", "prompt": [5], "max_tokens": 9000, "stream": True}
    ) as answer:  # fmt: skip
        assert answer.status_code == 200
        live.server.handle_exit(15, None)
        live.server.handle_exit(15, None)
        assert "stopping" in answer.read().decode()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_frame_on_a_terminal_and_a_line_elsewhere() -> None:
    engine = FakeEngine()
    engine.submit([5] * 9, Sampling(max_tokens=4))
    engine.advance()
    now = EngineState.of(engine)
    for stream, lines in ((Terminal(), 7), (io.StringIO(), 1)):
        with _shown(stream) as show:
            show(now, _load(now, 10.0, None))
        shown = stream.getvalue()
        assert "1 running" in shown and "used" in shown and "free" in shown
        assert len(shown.strip().splitlines()) >= lines


def test_the_pace_is_that_since_the_last_look() -> None:
    engine = FakeEngine()
    engine.stats.tokens = 500
    now = EngineState.of(engine)
    assert _load(now, 10.0, (8.0, 100)).tokens_per_s == 200
    assert _load(now, 10.0, None).tokens_per_s == 0
    assert _load(now, 10.0, None).hit_rate is None


def test_it_is_shown_while_it_serves_and_ends_with_the_server() -> None:
    engine, stream = FakeEngine(), io.StringIO()

    async def play() -> None:
        words = {"keys": [], "drain_s": 1.0, "watch_s": 0.01, "stream": stream}
        serving = asyncio.create_task(serve(engine, "tiny", listen("127.0.0.1", 0), **words))
        while "0 running" not in stream.getvalue():
            await asyncio.sleep(0.01)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(asyncio.wait_for(play(), 20))
