import socket

import pytest

from serve.server.fake_engine import FakeEngine
from serve.server.live import serving, until
from tonnage.errors import RequestError
from tonnage.serve.server.running import listen


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
