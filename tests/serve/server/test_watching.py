import asyncio
import io

from serve.server.fake_engine import FakeEngine
from tonnage.serve.sampling import Sampling
from tonnage.serve.server.running import listen
from tonnage.serve.server.watching import _load, _shown, serve
from tonnage.serve.stats import EngineState


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
