import asyncio
from collections.abc import Awaitable, Callable

import pytest

from serve.server.fake_engine import STORY_IDS, FakeEngine
from tonnage.errors import RequestError
from tonnage.serve.sampling import Sampling
from tonnage.serve.scheduler.queue import QueueFull
from tonnage.serve.scheduler.sequence import Sequence
from tonnage.serve.server.worker import EngineRequest, Gone, Unavailable, Worker
from tonnage.serve.stats import EngineState

GREEDY = Sampling(max_tokens=5, temperature=0)


def played(engine: FakeEngine, scene: Callable[[Worker], Awaitable[None]]) -> None:
    async def play() -> None:
        worker = Worker(engine)
        worker.start()
        try:
            await asyncio.wait_for(scene(worker), 20)
        finally:
            engine.runner.going.set()
            await worker.stop()
        assert not worker._thread.is_alive()
        assert engine.held_blocks == 0 and not worker.open and not worker._owners

    asyncio.run(play())


async def collected(ticket: EngineRequest, answers: int = 1) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {index: [] for index in range(answers)}
    while answers:
        for delivery in await ticket.deliveries():
            found[delivery.index] += delivery.token_ids
            answers -= delivery.finish_reason is not None
    return found


def test_tokens_come_in_their_order() -> None:
    async def scene(worker: Worker) -> None:
        ticket = await worker.submit([[5, 6], [7]], Sampling(max_tokens=5, n=2), "")
        assert await collected(ticket, 4) == dict.fromkeys(range(4), STORY_IDS[:5])
        worker.close(ticket)

    played(FakeEngine(), scene)


def test_a_step_that_hangs_is_left_behind() -> None:
    async def scene(worker: Worker) -> None:
        worker.engine.runner.going.clear()
        await worker.submit([[5]], GREEDY, "")
        while not worker.engine.scheduler.running:
            await asyncio.sleep(0.001)
        worker.hurried = True
        await worker.stop()
        assert worker.busy

    played(FakeEngine(), scene)


def test_a_sequence_that_waits_is_counted_once() -> None:
    """As on its way, or in the queue: never as both, or the last of those that fit would be refused."""

    async def scene(worker: Worker) -> None:
        add, counted = worker.engine.scheduler.add, []

        def noted(*sequences: Sequence) -> None:
            add(*sequences)
            counted.append(worker._posted + worker.engine.scheduler.waiting.fresh)

        worker.engine.scheduler.add = noted
        await collected(await worker.submit([[5]], GREEDY, ""))
        assert counted == [1] and worker._posted == 0

    played(FakeEngine(), scene)


def test_what_the_engine_refuses_is_raised_and_leaves_nothing() -> None:
    async def scene(worker: Worker) -> None:
        with pytest.raises(RequestError):
            await worker.submit([[5], [6] * 999], GREEDY, "")
        assert not worker.engine.scheduler.has_work and not worker.open

    played(FakeEngine(), scene)


def test_a_request_that_is_cancelled_before_it_is_admitted_never_runs() -> None:
    engine = FakeEngine()

    async def scene(worker: Worker) -> None:
        engine.runner.going.clear()
        first = await worker.submit([[5]], GREEDY, "")
        while engine.stats.steps == 0 and not engine.scheduler.running:
            await asyncio.sleep(0.001)
        second = asyncio.create_task(worker.submit([[6]], GREEDY, ""))
        await asyncio.sleep(0.01)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert worker.open == {first} and worker._posted == 0
        engine.runner.going.set()
        assert await collected(first) == {0: STORY_IDS[:5]}
        worker.close(first)

    played(engine, scene)


def test_a_closed_ticket_wakes_whoever_waits() -> None:
    engine = FakeEngine()

    async def scene(worker: Worker) -> None:
        engine.runner.going.clear()
        ticket = await worker.submit([[5]], GREEDY, "")
        waiting = asyncio.create_task(ticket.deliveries())
        await asyncio.sleep(0)
        worker.close(ticket)
        worker.close(ticket)
        with pytest.raises(Gone):
            await waiting

    played(engine, scene)


def test_one_answer_of_several_can_end_early() -> None:
    engine = FakeEngine(pace_s=0.002)

    async def scene(worker: Worker) -> None:
        ticket = await worker.submit([[5]], Sampling(max_tokens=100, n=2, ignore_eos=True), "")
        await ticket.deliveries()
        worker.end(ticket, 0)
        seen = [delivery for _ in range(5) for delivery in await ticket.deliveries()]
        assert {delivery.index for delivery in seen[-3:]} == {1}
        worker.close(ticket)

    played(engine, scene)


def test_a_full_queue_refuses_before_the_engine_is_asked() -> None:
    engine = FakeEngine(max_seqs=1, max_waiting=2)

    async def scene(worker: Worker) -> None:
        engine.runner.going.clear()
        with pytest.raises(RequestError, match="more than may wait"):
            await worker.submit([[5]] * 3, GREEDY, "")
        calls = [asyncio.create_task(worker.submit([[5]], GREEDY, "")) for _ in range(9)]
        await asyncio.sleep(0.05)
        refused = [call for call in calls if call.done() and isinstance(call.exception(), QueueFull)]
        assert len(refused) >= 6
        engine.runner.going.set()
        for call in calls:
            if call not in refused:
                ticket = await call
                await collected(ticket)
                worker.close(ticket)

    played(engine, scene)


def test_no_requests_while_it_drains() -> None:
    async def scene(worker: Worker) -> None:
        worker.draining = True
        with pytest.raises(Unavailable, match="stopping"):
            await worker.submit([[5]], GREEDY, "")

    played(FakeEngine(), scene)


def test_a_look_sees_one_moment() -> None:
    engine = FakeEngine(pace_s=0.002)

    async def scene(worker: Worker) -> None:
        ticket = await worker.submit([[5] * 10], Sampling(max_tokens=50, ignore_eos=True), "")
        await ticket.deliveries()
        moment = await worker.look(EngineState.of)
        assert moment.running == 1 and moment.generated >= 1 and 0 < moment.kv_usage < 1
        worker.close(ticket)
        moment = await worker.look(EngineState.of)
        assert moment.running == 0 and moment.kv_usage == 0

    played(engine, scene)


def test_a_question_that_fails_is_the_asker_s() -> None:
    async def scene(worker: Worker) -> None:
        with pytest.raises(ZeroDivisionError):
            await worker.look(lambda engine: 1 / 0)
        assert await worker.look(lambda engine: 5) == 5

    played(FakeEngine(), scene)
