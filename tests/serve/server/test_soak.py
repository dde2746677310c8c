"""Thousands of requests, many of which are given up at some point of their life: nothing of them may stay behind."""

import asyncio
import gc
import json
import os
import random
from pathlib import Path

import torch

from serve.server.fake_engine import FakeEngine
from serve.server.live import MODEL, Live, serving, until
from tonnage.serve.scheduler.sequence import ScheduledStep, Sequence
from tonnage.serve.server.generation import Generation
from tonnage.serve.server.worker import EngineRequest
from tonnage.serve.text import Answer

REQUESTS = 5000
AT_ONCE = 40
MIB = 2**20


def made_up(chance: random.Random) -> bytes:
    """A request that may share its beginning with others, and may need more room than there is left."""
    shared = list(range(5, 5 + chance.choice([0, 8, 20, 40])))
    prompt = shared + [chance.randrange(5, 300) for _ in range(chance.randrange(1, 24))]
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": chance.randrange(1, 40),
        "n": chance.choice([1, 1, 1, 2, 4]),
    }
    body |= {"stream": chance.random() < 0.5, "ignore_eos": True, "user": chance.choice(["a", "b", "c"])}
    if chance.random() < 0.2:
        body["stop"] = ["lazy", "fox"]
    if chance.random() < 0.2:
        body["logprobs"] = 2
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def one(port: int, chance: random.Random) -> bytes:
    """The status line, or nothing where the client left before it came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request, leaves = made_up(chance), chance.random() < 0.4
    try:
        if leaves and chance.random() < 0.2:
            writer.write(request[: chance.randrange(len(request))])
            await writer.drain()
            return b""
        writer.write(request)
        if leaves and chance.random() < 0.5:
            await asyncio.sleep(chance.random() * 0.02)
            return b""
        status = await reader.readline()
        if leaves:
            await reader.read(chance.randrange(1, 400))
            return b""
        await reader.read()
        return status.split()[1]
    finally:
        writer.transport.abort()


async def many(port: int, count: int, chance: random.Random) -> dict[bytes, int]:
    seen: dict[bytes, int] = {}
    left = iter(range(count))

    async def client() -> None:
        for _ in left:
            status = await one(port, chance)
            seen[status] = seen.get(status, 0) + 1

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return seen


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def alive() -> list[object]:
    gc.collect()
    kinds = (EngineRequest, Sequence, Generation, Answer)
    return [each for each in gc.get_objects() if type(each) in kinds]


def who_holds(left: list[object]) -> str:
    """For a failure's words: what is left, and the kinds of what refers to it."""
    found = [[type(holder).__name__ for holder in gc.get_referrers(each) if holder is not left] for each in left]
    return "; ".join(f"{type(each).__name__} held by {kinds}" for each, kinds in zip(left, found, strict=True))


def settled(live: Live, before: int) -> tuple[int, int]:
    """Objects and resident bytes once nothing of any request is left but what others had left before."""
    live.until_quiet()
    worker = live.worker
    until(lambda: not worker.open and not worker._owners and worker._posted == 0)
    try:
        until(lambda: len(alive()) <= before)
    except AssertionError:
        raise AssertionError(who_holds(alive())) from None
    return len(gc.get_objects()), resident_bytes()


def test_five_thousand_requests_leave_nothing_behind() -> None:
    chance, before = random.Random(6), len(alive())
    engine = FakeEngine(blocks=49, size=4, max_seqs=12, batched_tokens=64, max_waiting=48)
    faults = random.Random(7)

    def rarely(step: ScheduledStep) -> Exception | None:
        return torch.OutOfMemoryError("CUDA out of memory") if faults.random() < 0.002 else None

    engine.runner.fails = rarely
    with serving(engine) as live:
        port = int(live.url.rpartition(":")[2])
        asyncio.run(many(port, REQUESTS // 5, chance))
        objects, resident = settled(live, before)
        seen = asyncio.run(many(port, REQUESTS - REQUESTS // 5, chance))
        objects_after, resident_after = settled(live, before)
        assert objects_after - objects < 2000, "objects grow with requests"
        assert resident_after - resident < 24 * MIB, "memory grows with requests"
        assert set(seen) <= {b"", b"200", b"429", b"503"} and seen[b"200"] > REQUESTS // 4, seen
        assert engine.scheduler.counters.preemptions > 10 and engine.stats.failed_steps > 0
        pool = engine.scheduler.pool
        assert pool.available == pool.count - 1
        assert all(pool.references(block) == 0 for block in range(1, pool.count))
