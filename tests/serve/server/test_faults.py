"""Faults over HTTP: clients that go away, steps that fail, queues that are full, a server that stops."""

import asyncio
import json
import threading
from collections.abc import Callable

import httpx
import pytest
import torch

from serve.server.fake_engine import FakeEngine
from serve.server.live import MODEL, serving, until
from tonnage.serve.scheduler.sequence import ScheduledStep

OOM = torch.OutOfMemoryError("CUDA out of memory")


def body(**words: object) -> dict:
    return {"model": MODEL, "prompt": "hello", "ignore_eos": True, **words}


class Background:
    """A request that is under way in a thread of its own."""

    def __init__(self, call: Callable[[], httpx.Response]) -> None:
        self.answer: httpx.Response | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.answer = self._call()

    def result(self) -> httpx.Response:
        self._thread.join(30)
        assert self.answer is not None
        return self.answer


# Clients that go away.


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_blocks_within_a_step(stream: bool) -> None:
    engine = FakeEngine(pace_s=0.1, context=4096, blocks=2048)
    with serving(engine) as live:
        words = body(max_tokens=4000, stream=stream, n=2)

        async def leave() -> None:
            async with httpx.AsyncClient(base_url=live.url) as client:
                sent = asyncio.create_task(client.post("/v1/completions", json=words))
                while engine.stats.tokens < 8:
                    await asyncio.sleep(0.005)
                sent.cancel()

        asyncio.run(leave())
        assert engine.held_blocks > 0 or not engine.has_work
        left_at = engine.runner.steps
        until(lambda: engine.held_blocks == 0)
        assert engine.runner.steps - left_at <= 3, "one that was under way, one that was launched, one for the notice"
        until(lambda: not live.worker.open)


def test_a_client_that_goes_away_while_it_waits_leaves_the_queue() -> None:
    engine = FakeEngine(max_seqs=1, pace_s=0.005)
    with serving(engine) as live:
        first = Background(lambda: live.complete(max_tokens=200, ignore_eos=True))
        until(lambda: engine.stats.tokens > 2)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{live.url}/v1/completions", json=body(stream=True), timeout=0.1)
        until(lambda: not len(engine.scheduler.waiting))
        assert first.result().status_code == 200
        live.until_quiet()


def test_a_client_that_goes_away_in_the_middle_of_its_body_is_forgotten() -> None:
    with serving(FakeEngine()) as live:

        async def half() -> None:
            host, port = live.url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            writer.write(f'{head}Content-Length: 1000\r\n\r\n{{"model":'.encode())
            await writer.drain()
            writer.close()

        asyncio.run(half())
        assert live.complete().status_code == 200


# Steps that fail.


def sick(step: ScheduledStep) -> Exception | None:
    """Steps with a prompt of thirteen tokens run out of memory."""
    return OOM if any(work.sequence.prompt_length == 13 for work in (*step.chunks, *step.decodes)) else None


def test_out_of_memory_fails_only_its_own_requests() -> None:
    engine = FakeEngine(pace_s=0.002, max_seqs=4)
    with serving(engine) as live:
        engine.runner.fails = sick
        engine.runner.going.clear()
        ill = Background(lambda: live.complete(prompt=[5] * 13, max_tokens=8))
        until(lambda: len(engine.scheduler.waiting) + len(engine.scheduler.running) == 1)
        engine.runner.going.set()
        answer = ill.result()
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "step_failed"
        assert answer.headers["Retry-After"]
        well = [Background(lambda: live.complete(max_tokens=50)) for _ in range(4)]
        assert [each.result().status_code for each in well] == [200] * 4
        assert engine.stats.failed_steps == 1
        assert live.client.get("/health").status_code == 200
        live.until_quiet()


def test_a_stream_that_fails_ends_with_an_error_object() -> None:
    engine = FakeEngine(pace_s=0.01)
    with (
        serving(engine) as live,
        live.client.stream("POST", "/v1/completions", json=body(max_tokens=200, stream=True)) as it,
    ):
        assert it.status_code == 200
        lines = it.iter_lines()
        next(lines)
        engine.runner.faults.append(OOM)
        told = [json.loads(line.removeprefix("data: ")) for line in lines if line and not line.endswith("[DONE]")]
        assert told[-1]["error"]["code"] == "step_failed"
        live.until_quiet()


def test_others_go_on_when_a_step_fails_for_another_reason() -> None:
    engine = FakeEngine(pace_s=0.002)
    with serving(engine) as live:
        engine.runner.faults += [None] * 5 + [RuntimeError("a kernel went wrong")]
        answer = live.complete(max_tokens=100, ignore_eos=True)
        assert answer.status_code == 503 and "kernel" not in answer.text
        assert live.complete(max_tokens=5).status_code == 200
        assert live.client.get("/health").status_code == 200
        live.until_quiet()


def test_an_engine_whose_every_step_fails_says_so() -> None:
    engine = FakeEngine()
    with serving(engine) as live:
        engine.runner.fails = lambda step: RuntimeError("gone for good")
        assert [live.complete().status_code for _ in range(4)] == [503] * 4
        health = live.client.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "broken"


# Queues that are full.


def test_ten_times_the_load_is_refused_at_once_and_the_admitted_keep_their_pace() -> None:
    # Slow until all four run, however busy the machine is.
    engine = FakeEngine(max_seqs=4, max_waiting=4, pace_s=0.2, blocks=1025)
    with serving(engine) as live:

        async def storm() -> tuple[list[httpx.Response], list[httpx.Response], int]:
            limits = httpx.Limits(max_connections=200)
            async with httpx.AsyncClient(base_url=live.url, timeout=60, limits=limits) as client:

                async def one(tokens: int) -> httpx.Response:
                    return await client.post("/v1/completions", json=body(max_tokens=tokens))

                first = [asyncio.create_task(one(200)) for _ in range(4)]
                async with asyncio.timeout(30):
                    while len(engine.scheduler.running) < 4:
                        await asyncio.sleep(0.005)
                begun, engine.runner.pace_s = engine.runner.steps, 0.01
                flood = await asyncio.gather(
                    *(asyncio.create_task(one(1)) for _ in range(4)), *(one(1) for _ in range(76))
                )
                admitted = await asyncio.gather(*first)
                return admitted, flood, engine.runner.steps - begun

        admitted, flood, steps = asyncio.run(storm())
        assert [answer.json()["usage"]["completion_tokens"] for answer in admitted] == [200] * 4
        refused = [answer for answer in flood if answer.status_code == 429]
        assert len(refused) >= 72 and {answer.status_code for answer in flood} <= {200, 429}
        for answer in refused:
            assert int(answer.headers["Retry-After"]) >= 1 and answer.json()["error"]["code"] == "queue_full"
        # In steps, not in seconds: those that run draw a token in every step; a few more serve those that waited.
        assert steps <= 200 + 12
        live.until_quiet()


def test_a_full_queue_is_told_while_a_step_is_stuck() -> None:
    engine = FakeEngine(max_seqs=1, max_waiting=2)
    with serving(engine) as live:
        engine.runner.going.clear()
        stuck = [Background(lambda: live.complete(max_tokens=2))]
        until(lambda: len(engine.scheduler.running) == 1)
        # From here on nobody reads what is posted.
        stuck += [Background(lambda: live.complete(max_tokens=2)) for _ in range(2)]
        until(lambda: live.worker._posted == 2)
        assert live.complete().status_code == 429
        engine.runner.going.set()
        assert {each.result().status_code for each in stuck} == {200}
        live.until_quiet()


def test_a_list_of_prompts_is_admitted_whole_or_not_at_all() -> None:
    engine = FakeEngine(max_seqs=1, max_waiting=4, pace_s=0.1)
    with serving(engine) as live:
        first = Background(lambda: live.complete(max_tokens=100, ignore_eos=True))
        until(lambda: engine.stats.tokens > 1)
        second = Background(lambda: live.complete(prompt=["a"] * 3, max_tokens=1))
        until(lambda: len(engine.scheduler.waiting) == 3)
        assert live.complete(prompt=["a"] * 2).status_code == 429
        assert len(engine.scheduler.waiting) <= 3
        engine.runner.pace_s = 0.0
        assert (first.result().status_code, second.result().status_code) == (200, 200)
        live.until_quiet()


def test_what_can_never_fit_is_refused() -> None:
    with serving(FakeEngine(blocks=5, size=4, context=256)) as live:
        answer = live.complete(prompt=[5] * 100)
        assert answer.status_code == 400 and "cache" in answer.json()["error"]["message"]
        assert live.complete(prompt=[5] * 4, max_tokens=4).status_code == 200


def test_preempted_requests_are_answered_all_the_same() -> None:
    engine = FakeEngine(blocks=17, size=4, max_seqs=8, prefix_cache=False, pace_s=0.005)
    with serving(engine) as live:
        many = [Background(lambda: live.complete(prompt=[5] * 6, max_tokens=40, ignore_eos=True)) for _ in range(8)]
        assert [each.result().json()["usage"]["completion_tokens"] for each in many] == [40] * 8
        assert engine.scheduler.counters.preemptions > 0
        live.until_quiet()


# A server that stops.


def test_a_drain_finishes_what_runs_and_takes_no_more() -> None:
    engine = FakeEngine(pace_s=0.03)
    with serving(engine, drain_s=20) as live:
        running = Background(lambda: live.complete(max_tokens=100, ignore_eos=True))
        until(lambda: engine.stats.tokens > 1)
        live.server.stop()
        refused = live.complete()
        assert refused.status_code == 503 and refused.headers["Retry-After"]
        health = live.client.get("/health")
        assert health.status_code == 503 and health.json() == {"status": "draining"}
        assert running.result().json()["usage"]["completion_tokens"] == 100
        until(lambda: live.server.should_exit)


@pytest.mark.parametrize("stream", [False, True])
def test_a_drain_gives_up_when_its_time_is_over(stream: bool) -> None:
    engine = FakeEngine(pace_s=0.02, context=10_000, blocks=4000)
    with serving(engine, drain_s=0.1) as live:
        running = Background(lambda: live.complete(max_tokens=9000, ignore_eos=True, stream=stream))
        until(lambda: engine.stats.tokens > 3)
        live.server.stop()
        answer = running.result()
        if stream:
            assert '"error"' in answer.text and "stopping" in answer.text
        else:
            assert answer.status_code == 503 and "stopping" in answer.json()["error"]["message"]


def test_a_live_ledger_shows_what_a_request_holds() -> None:
    engine = FakeEngine(pace_s=0.05)
    with serving(engine) as live:
        running = Background(lambda: live.complete(prompt=[7] * 40, max_tokens=60, ignore_eos=True))
        until(lambda: engine.stats.tokens > 3)
        held = live.client.get("/ledger").json()
        assert held["running"] == 1 and held["kv"]["used_bytes"] >= 40 * 1024
        running.result()
        live.until_quiet()
        assert live.client.get("/ledger").json()["kv"]["used_bytes"] == 0
