"""What must hold after every call, whatever happened before.

blocks      free + cached + held + the null block = all; a block's references = the sequences that list it
content     a block in the prefix cache holds just the keys of its tokens, its tenant and all that came before
sequences   the tokens so far are the story's; what is in flight is what launched steps will draw; who waits or is done
            holds nothing; slots and host blocks have one owner; who decodes is awaited at its edge, and nobody else
a step      within the budget; for running sequences only, once each; writes only to blocks that nobody else holds
order       first come first served within a tenant, tenants in turn, the newest preempted first and first to return
the ledger  every byte of the cache in one of its parts
the end     nothing waits, nothing is held, every sequence that was not cut short has told its story
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from serve.simulation.device import describe
from tonnage.serve.cache.block_pool import BlockPool
from tonnage.serve.scheduler.scheduler import AHEAD
from tonnage.serve.scheduler.sequence import ScheduledStep, Sequence, Status
from tonnage.serve.stats import KvLedger, kv_ledger

if TYPE_CHECKING:
    from serve.simulation.run import Run


def check_state(run: Run) -> None:
    """All that holds between two calls."""
    held = Counter([block for sequence in run.sequences for block in sequence.blocks])
    _check_pool(run.pool, held)
    if run.scenario.host_blocks:
        on_host = Counter([block for sequence in run.sequences for block in sequence.host_blocks])
        _check_pool(run.scheduler.host_pool, on_host)
        assert max(on_host.values(), default=0) <= 1, f"two sequences own a host block: {on_host}"
    _check_content(run)
    _check_sequences(run)
    _check_edges(run)
    _check_ledger(run, held)


def _check_pool(pool: BlockPool, held: Counter[int]) -> None:
    idle = _ring(pool)
    for block, references in enumerate(pool._references):
        assert references == held[block], f"block {block} has {references} references and {held[block]} holders"
    assert 0 not in held, "somebody holds the null block"
    assert len(set(idle)) == len(idle) == pool.available, f"{pool.available} available, and in the ring {idle}"
    assert not held.keys() & idle, f"blocks {held.keys() & idle} are held and available"
    assert len(held) + len(idle) + 1 == pool.count, f"{len(held)} held and {len(idle)} available of {pool.count}"
    cached = [block for block in idle if pool._keys[block] is not None]
    assert len(cached) == pool.cached, f"{pool.cached} cached, and in the ring {cached}"
    assert idle[len(idle) - len(cached) :] == cached, f"a cached block would be taken before a free one: {idle}"
    shared = [block for block, count in held.items() if count > 1]
    assert pool.shared == len(shared), f"{pool.shared} blocks are shared, and in truth {shared}"


def _ring(pool: BlockPool) -> list[int]:
    """The blocks that nobody holds, the next to be taken first; both directions agree."""
    idle: list[int] = []
    block = pool._after[0]
    while block and len(idle) < pool.count:
        assert pool._after[pool._before[block]] == block, f"the ring is torn at block {block}"
        idle.append(block)
        block = pool._after[block]
    return idle


def _check_content(run: Run) -> None:
    """Hash ⇒ equal tokens: every entry of the prefix cache leads to a block with just those keys."""
    pool, pages, meanings = run.pool, run.device.pages, run.pool.meanings
    assert len(pool._found) + pool._keys.count(None) == pool.count, "the prefix cache and its blocks disagree"
    assert run.scenario.prefix_cache or not pool._found, "the prefix cache is off, and something is found"
    for key, block in pool._found.items():
        assert pool._keys[block] == key, f"block {block} is found as {key}, and noted as {pool._keys[block]}"
        assert pages[block] == meanings[pool._prefix_ids[block]], (
            f"block {block} is found as {key}, and holds other tokens"
        )


def _check_sequences(run: Run) -> None:
    flying = Counter([sequence.id for flight in run.flights for sequence in flight.samplers])
    slots, live = [], False
    for sequence in run.sequences:
        status = sequence.status
        if status is Status.RUNNING:
            slots.append(sequence.slot)
            _check_table(run, sequence)
        else:
            assert not sequence.blocks and sequence.slot == -1, f"#{sequence.id} is {status}, and holds something"
        assert status is Status.SWAPPED or not sequence.host_blocks, f"#{sequence.id} is {status}, and lies on the host"
        if status is not Status.FINISHED:
            live, known, in_flight = True, len(sequence.tokens), flying[sequence.id]
            assert sequence.in_flight == in_flight, f"#{sequence.id} awaits {sequence.in_flight} of {in_flight} tokens"
            assert sequence.tokens == run.stories[sequence.id].tokens[:known], f"#{sequence.id} drew {sequence.output}"
    assert len(set(slots)) == len(slots) <= run.scenario.max_seqs, f"slots {slots}"
    assert run.scheduler.has_work == live, f"has_work is {run.scheduler.has_work}"


def _check_edges(run: Run) -> None:
    scheduler = run.scheduler
    awaited = {one: due for due, group in scheduler._awaited.items() for one in group}
    assert sum(map(len, scheduler._awaited.values())) == len(awaited), "a sequence is awaited at two edges"
    assert awaited.keys() == set(scheduler._decoding), "others are awaited than those who decode"
    for one, due in awaited.items():
        due_in = due - scheduler._decode_clock.steps
        assert one.next_block_at - one.computed == due_in >= 0, f"#{one.id} is awaited at the wrong step"


def _check_table(run: Run, sequence: Sequence) -> None:
    """Room for what is computed, and not a block more than its known tokens need, or a few that are soon to come."""
    size, count, computed = run.scenario.size, len(sequence.blocks), sequence.computed
    least, most = -(-computed // size), -(-max(computed + AHEAD, len(sequence.tokens)) // size)
    assert least <= count <= most, f"#{sequence.id} holds {count} blocks of {size} for {computed} computed tokens"


def _check_ledger(run: Run, held: Counter[int]) -> None:
    """Each part counted the long way; a token is taken to have one byte."""
    pool, size, used = run.pool, run.scenario.size, 0
    for sequence in run.sequences:
        for index, block in enumerate(sequence.blocks):
            if held[block] == 1:
                used += max(0, min(size, sequence.computed - index * size))
    shared = [count > 1 for count in held.values()].count(True)
    idle = [key for key, references in zip(pool._keys[1:], pool._references[1:], strict=True) if not references]
    counted = KvLedger(
        used_bytes=used,
        slack_bytes=(len(held) - shared) * size - used,
        cached_bytes=(len(idle) - idle.count(None)) * size,
        shared_bytes=shared * size,
        reserved_bytes=size,
        free_bytes=idle.count(None) * size,
    )
    ledger = kv_ledger(run.scheduler, size)
    assert ledger == counted, f"{ledger}, and counted {counted}"


def check_step(run: Run, step: ScheduledStep) -> None:
    """What holds of a step when it is launched."""
    works = (*step.decodes, *step.chunks)
    number, size, pool = step.number, run.scenario.size, run.pool
    assert step.tokens <= run.scenario.batched_tokens, f"{step.tokens} tokens in step {number}"
    assert 0 < len(works) <= run.scenario.max_seqs, f"{len(works)} sequences in step {number}"
    assert len({work.sequence.id for work in works}) == len(works), f"step {number} computes a sequence twice"
    written = Counter[int]()
    for work in works:
        sequence, end = work.sequence, work.start + work.count
        assert sequence.status is Status.RUNNING, f"{describe(work)} is {sequence.status}"
        assert work.count > 0 and sequence.computed == end, f"{describe(work)}, and {sequence.computed} are computed"
        last = sequence.length - 1 if work.samples else end
        assert end == last < sequence.length, f"{describe(work)} of {sequence.length} tokens"
        written.update(sequence.blocks[work.start // size : -(-end // size)])
    for work in step.decodes:
        assert work.count == 1 and work.samples and work.start >= work.sequence.prompt_length, describe(work)
    for work in step.chunks:
        assert work.start + work.count <= len(work.sequence.tokens), f"{describe(work)} is a chunk of unknown tokens"
    for block, writers in written.items():
        assert writers == 1 == pool.references(block), f"block {block} is writable by more than one in step {number}"
        assert pool._keys[block] is None, f"step {number} writes to block {block} of the prefix cache"


def check_order(run: Run, ran: list[Sequence], waited: list[Sequence]) -> None:
    """Who was admitted and who had to leave, given who ran and who had never run before the call."""
    left = [sequence.rank for sequence in ran if sequence.status is not Status.RUNNING]
    # Who has drawn its last token is about to leave.
    stayed = [one.rank for one in ran if one.status is Status.RUNNING and one not in run.scheduler._ending]
    assert not left or max(stayed, default=-1) < min(left), f"ranks {left} were preempted before {stayed}"
    run.swaps += sum(sequence.status is Status.SWAPPED for sequence in ran)
    admitted = sorted((sequence for sequence in waited if sequence.rank >= 0), key=lambda sequence: sequence.rank)
    if not admitted:
        return
    back = [sequence.id for sequence in run.live if sequence.rank >= 0 and sequence.status is not Status.RUNNING]
    assert not back, f"#{admitted[0].id} was admitted before {back}, which had run"
    for sequence in admitted:
        # Further draws stand aside for their parent, and then come first.
        for other in (other for other in waited if other.rank < 0 and other.parent is None):
            passed = run.passed.setdefault(other.id, set())
            if other.salt == sequence.salt:
                assert sequence.parent or sequence.id < other.id, f"#{sequence.id} was admitted before #{other.id}"
                passed.clear()
            else:
                assert sequence.salt not in passed, f"tenant {sequence.salt!r} had two turns while #{other.id} waited"
                passed.add(sequence.salt)


def check_end(run: Run) -> None:
    """What holds when all is quiet."""
    for sequence in run.sequences:
        story = run.stories[sequence.id]
        assert sequence.status is Status.FINISHED, f"#{sequence.id} is {sequence.status} in the end"
        length = len(sequence.tokens) if sequence.id in run.cut_short else story.length
        assert sequence.tokens == story.tokens[:length], f"#{sequence.id} ends with {sequence.output}"
        reason = run.cut_short.get(sequence.id, story.reason)
        assert sequence.finish_reason == reason, f"#{sequence.id} ends with {sequence.finish_reason}"
        assert 0 <= sequence.cached < sequence.prompt_length, f"#{sequence.id} found {sequence.cached} tokens"
    scheduler = run.scheduler
    assert not len(scheduler.waiting) and not scheduler.running, "the scheduler is not at rest"
    for pool in (run.pool, scheduler.host_pool):
        assert pool.available == pool.count - 1, f"{pool.count - 1 - pool.available} blocks are lost"
    _check_counters(run)


def _check_counters(run: Run) -> None:
    counters, asked = run.scheduler.counters, sum(one.prompt_length for one in run.sequences if one.rank >= 0)
    assert counters.prefix_hits == sum(sequence.cached for sequence in run.sequences)
    assert counters.prefix_hits <= counters.prefix_queries <= asked, f"{counters} for {asked} tokens of prompts"
    assert counters.preemptions == sum(sequence.preemptions for sequence in run.sequences)
    assert run.swaps <= counters.swaps <= counters.preemptions, f"{run.swaps} swaps were seen: {counters}"
