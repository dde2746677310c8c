"""The scheduler's share of a step's host time: `schedule` and `complete`, with every sequence decoding, one step ahead.

    .venv/bin/python benchmarks/serve_host.py [--sequences 256] [--steps 2000]

Medians, and the mean of both: blocks are taken for four steps at once, so every fourth step takes longer. Sequences start at
different places in their blocks, so each step fills one block in sixteen of them. Prompts are short and differ; nothing is ever
found in the cache.
"""

import argparse
import gc
from collections.abc import Iterator
from random import Random
from statistics import mean, median, quantiles
from time import perf_counter

from tonnage.serve.cache.block_pool import BlockPool
from tonnage.serve.config import EngineConfig
from tonnage.serve.sampling import Sampling
from tonnage.serve.scheduler.scheduler import Scheduler
from tonnage.serve.scheduler.sequence import Sequence

BLOCK = 16


def main() -> None:
    """One line with and one without the prefix cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    heads = f"{'schedule':>10}{'complete':>10}{'together':>10}{'mean':>10}{'slowest 1 %':>13}"
    print(f"{f'{options.sequences} sequences, {options.steps} steps; µs a step':46}{heads}")
    for prefix_cache in (True, False):
        rows = list(host_times(options.sequences, options.steps, prefix_cache=prefix_cache))
        schedule, complete = (median(times) * 1e6 for times in zip(*rows, strict=True))
        both = [sum(row) * 1e6 for row in rows]
        name = f"  {'with' if prefix_cache else 'without'} prefix cache"
        figures = (schedule, complete, median(both), mean(both))
        print(f"{name:46}" + "".join(f"{each:10.1f}" for each in figures) + f"{quantiles(both, n=100)[-1]:13.1f}")


def host_times(count: int, steps: int, *, prefix_cache: bool) -> Iterator[tuple[float, float]]:
    """Seconds of `schedule` and of `complete`, for each step in which all decode."""
    random = Random(0)
    context = steps + 3 * BLOCK
    pool = BlockPool(count * (context // BLOCK + 1) + 1, BLOCK, prefix_cache=prefix_cache)
    scheduler = Scheduler(pool, EngineConfig(max_seqs=count, max_waiting=count), perf_counter, context=context)
    sampling = Sampling(max_tokens=context)
    for number in range(count):
        prompt = [random.randrange(150_000) for _ in range(random.randint(BLOCK, 2 * BLOCK))]
        scheduler.add(Sequence(number, prompt, sampling, len(prompt), eos_ids=frozenset({151_645})))
    tokens = [random.randrange(150_000) for _ in range(count)]
    before = scheduler.schedule()
    gc.collect()
    for _ in range(steps):
        began = perf_counter()
        step = scheduler.schedule()
        scheduled = perf_counter()
        assert before is not None and step is not None
        finished = scheduler.complete(before, tokens)
        completed = perf_counter()
        assert len(step.decodes) == count and not finished
        before = step
        yield scheduled - began, completed - scheduled


if __name__ == "__main__":
    main()
