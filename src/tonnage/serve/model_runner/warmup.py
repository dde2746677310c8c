"""Run the largest possible steps at startup, to compile kernels, capture graphs and reach peak memory.

They use the null block, so nothing is left behind. This module does not know how much memory there is.
"""

import gc
from collections.abc import Iterator

import torch

from tonnage.serve.model_runner.runner import Runner
from tonnage.serve.sampling import MOST_LOGPROBS, Sampling
from tonnage.serve.scheduler.sequence import Decode, ScheduledStep, ScheduledTokens, Sequence


def warm_up(runner: Runner, rows: int, batched_tokens: int, context: int, *, graphs: bool) -> int:
    """Run the largest steps and capture graphs; return the bytes that the graphs took."""

    def run() -> None:
        for step in largest_steps(rows, batched_tokens, context, runner.cache.shape.block):
            runner.launch(step).result()
        runner.inputs.forget()

    # Capturing releases the memory that passes need, so they run again after it.
    run()
    if not graphs:
        return 0
    clear()
    before_bytes = used_bytes(runner.cache.device)
    runner.capture(rows)
    graph_bytes = used_bytes(runner.cache.device) - before_bytes
    run()
    return graph_bytes


def largest_steps(rows: int, batched_tokens: int, context: int, block: int) -> Iterator[ScheduledStep]:
    """Yield many prompts with the most expensive sampling, their decode step, and one prompt as long as a step."""
    each, longest = min(batched_tokens // rows, context - 1), min(batched_tokens, context - 1)
    many = [_sequence(slot, each, block) for slot in range(rows)]
    yield ScheduledStep(0, (), [ScheduledTokens(one, 0, each, True) for one in many])
    for one in many:
        one.tokens.append(0)
        one.computed = each + 1
    yield ScheduledStep(1, tuple(map(Decode, many)))
    yield ScheduledStep(2, (), [ScheduledTokens(_sequence(0, longest, block), 0, longest, True)])


def used_bytes(device: torch.device) -> int:
    """Return the device memory in use by all processes."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def clear() -> None:
    """Return unused memory to the device."""
    gc.collect()
    torch.cuda.empty_cache()


def _sequence(slot: int, length: int, block: int) -> Sequence:
    sampling = Sampling(top_p=0.5, logprobs=MOST_LOGPROBS, max_tokens=2)
    return Sequence(-1, [0] * length, sampling, length, slot=slot, blocks=[0] * (length // block + 1))
