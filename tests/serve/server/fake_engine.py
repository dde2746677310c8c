"""The real engine, scheduler and blocks over a device that computes nothing: its pace and its faults are the test's.

Every answer is the same story, token by token, so that a test knows what to expect of any request.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

import torch

from serve.tiny import byte_level_tokenizer
from serving_shapes import own_options
from tonnage.budget.serving.own_engine import OwnCard, OwnPool
from tonnage.serve.config import EngineConfig
from tonnage.serve.engine import Engine
from tonnage.serve.sampling import TokenLogprob
from tonnage.serve.scheduler.sequence import ScheduledStep, Sequence
from tonnage.serve.text import Tokenizer

STORY = "the quick brown fox jumps over the lazy dog, ça va 🚢 and runs away. "
TOKENIZER = Tokenizer(byte_level_tokenizer())
STORY_IDS = TOKENIZER.encode(STORY)
VOCAB = 384


class FakePending:
    """A step's tokens, there at once."""

    def __init__(self, samplers: list[Sequence], pace_s: float) -> None:
        self._pace_s, self.sampling_sequences = pace_s, samplers
        self._tokens = [STORY_IDS[(sequence.sampled - 1) % len(STORY_IDS)] for sequence in samplers]
        asked = [sequence.sampling.logprobs for sequence in samplers]
        self._logprobs = [
            None if count is None else TokenLogprob(token, -0.5, tuple((token + n, -0.5 - n) for n in range(count)))
            for token, count in zip(self._tokens, asked, strict=True)
        ]

    def result(self) -> tuple[list[int], list[TokenLogprob | None]]:
        if self._pace_s:
            time.sleep(self._pace_s)
        return self._tokens, self._logprobs


class FakeRunner:
    """Draws the story. `faults`: what the next launches raise (None: nothing); `held`: no step begins while it is clear."""

    def __init__(self, pace_s: float) -> None:
        self.pace_s = pace_s
        self.steps = 0
        self.faults: deque[Exception | None] = deque()
        self.fails: Callable[[ScheduledStep], Exception | None] = lambda step: None
        self.going = threading.Event()
        self.going.set()
        self.cache = SimpleNamespace(device=torch.device("cpu"), host_blocks=0)

    def at_work(self) -> AbstractContextManager[None]:
        return nullcontext()

    def launch(self, step: ScheduledStep) -> FakePending:
        self.going.wait()
        self.steps += 1
        fault = self.faults.popleft() if self.faults else self.fails(step)
        if fault is not None:
            raise fault
        return FakePending(step.samplers, self.pace_s)


class FakeEngine(Engine):
    """An engine without a model."""

    def __init__(
        self, *, blocks: int = 257, size: int = 4, context: int = 256, max_seqs: int = 16, batched_tokens: int = 256,
        max_waiting: int = 64, pace_s: float = 0.0, tokenizer: Tokenizer | None = TOKENIZER, prefix_cache: bool = True,
    ) -> None:  # fmt: skip
        self.runner = FakeRunner(pace_s)
        self.context, self.tokenizer = context, tokenizer
        self.architecture = SimpleNamespace(vocab=VOCAB, eos_ids=frozenset({0}))
        pool = OwnPool(blocks=blocks, block=size, block_bytes=size * 1024)
        limits = own_options(
            context=context, weights="fp32", kv="fp32", block=size, max_seqs=max_seqs, batched_tokens=batched_tokens,
            eager=True,
        )  # fmt: skip
        self.card = OwnCard(
            name="CPU",
            capacity_bytes=2**30,
            limit_bytes=2**29,
            limits=limits,
            weight_bytes=2**20,
            reserve=(),
            pool=pool,
        )
        self.config = EngineConfig(
            max_seqs=max_seqs, batched_tokens=batched_tokens, max_waiting=max_waiting, block=size,
            prefix_cache=prefix_cache,
        )  # fmt: skip
        self._reset()

    @property
    def held_blocks(self) -> int:
        """Blocks that sequences hold."""
        return self.scheduler.pool.count - 1 - self.scheduler.pool.available
