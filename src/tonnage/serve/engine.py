"""The engine: prompts in, tokens out, one step ahead of the device. Not thread-safe; it knows no HTTP.

`advance` launches the next step while the last one still runs, and then takes the last one's tokens; so the host's work
overlaps with the device's. A step that runs out of memory ends only its own sequences.
"""

import random
from collections.abc import Sequence as Listed
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import compress, count
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch

from tonnage.errors import RequestError
from tonnage.serve.cache.block_pool import BlockPool
from tonnage.serve.config import EngineConfig
from tonnage.serve.generation import Prompt, generate, token_ids
from tonnage.serve.model_runner.runner import TokensInTransit
from tonnage.serve.models.architecture import read_architecture
from tonnage.serve.models.decoder import Decoder
from tonnage.serve.models.load import load_decoder, share_decoder
from tonnage.serve.sampling import Output, Sampling, TokenLogprob
from tonnage.serve.scheduler.scheduler import Scheduler
from tonnage.serve.scheduler.sequence import ScheduledStep, Sequence
from tonnage.serve.startup import DTYPES, Startup, clear, look
from tonnage.serve.stats import KvLedger, Stats, kv_ledger
from tonnage.serve.text import Tokenizer

# Waste is sampled every this many steps: it changes slowly, and sampling costs half a schedule.
_STEPS_PER_LOOK = 16


@dataclass(slots=True)
class StepOutput:
    """A step's tokens of sequences not ended meanwhile, and those finished, maybe without one; `logprobs` if requested."""

    sequences: list[Sequence]
    tokens: list[int]
    logprobs: list[TokenLogprob | None] | None
    finished: list[Sequence]


def _device_of(name: str | torch.device | None) -> torch.device:
    """Return the device of this name, by default a GPU if there is one; raises RequestError if it is not here."""
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        return torch.device("cuda", 0) if cards else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return device
    index = device.index or 0
    if device.type != "cuda":
        problem = f"--device {name} is no device that this engine computes on."
    elif index >= cards:
        problem = f"--device {name} is not here: torch finds {cards} CUDA GPUs."
    else:
        return torch.device("cuda", index)
    raise RequestError(problem, hint="Use --device cuda, cuda:1 or cpu; without it, a GPU is used if there is one.")


class Engine:
    """A model's folder, ready to serve on a `device` (default: a GPU if there is one); `options` are `EngineConfig`'s."""

    def __init__(self, path: str | Path, *, device: str | torch.device | None = None, **options: Any) -> None:
        config = EngineConfig(**options)
        where = _device_of(device)
        architecture = read_architecture(path)
        if config.context is not None and config.context > architecture.positions:
            problem = f"The model has {architecture.positions:,} positions, fewer than a context of {config.context:,}."
            raise RequestError(problem, hint=f"Use --context {architecture.positions} at most.")
        # The CPU computes in FP32: exact, and no slower.
        dtype = torch.float32 if where.type == "cpu" else DTYPES[architecture.dtype]
        startup = Startup(architecture, dtype, config, look(where, config.budget))
        startup.check(startup.plan())
        tokenizer = Tokenizer.load(path)
        decoder = load_decoder(
            path, architecture, device=where, dtype=dtype, weights=config.weights, context=config.context
        )
        self._start(decoder, tokenizer, startup)

    @classmethod
    def of(
        cls, decoder: Decoder, tokenizer: Tokenizer | None = None, *, settings: EngineConfig | None = None
    ) -> "Engine":
        """Return an engine for an existing decoder."""
        engine, config = cls.__new__(cls), settings or EngineConfig()
        startup = Startup(decoder.architecture, decoder.dtype, config, look(decoder.device, config.budget))
        startup.check(startup.plan())
        engine._start(decoder, tokenizer, startup)
        return engine

    @classmethod
    def of_module(
        cls, module: torch.nn.Module, tokenizer: Tokenizer | None = None, *, settings: EngineConfig | None = None
    ) -> "Engine":
        """Return an engine on the weights of a live transformers model; updates count from the next `wake` or `refresh`.

        Set `settings.blocks`: a share of the card does not account for what training needs.
        """
        context = settings.context if settings else None
        return cls.of(share_decoder(module, context=context), tokenizer, settings=settings)

    def _start(self, decoder: Decoder, tokenizer: Tokenizer | None, startup: Startup) -> None:
        self.runner, self.card = startup.start(decoder)
        self.config, self.context = startup.config, self.card.limits.context
        self.architecture, self.tokenizer = decoder.architecture, tokenizer
        self._reset()

    def _reset(self) -> None:
        self.scheduler = self._make_scheduler()
        self.stats = Stats()
        self._asleep = False
        self._random = random.Random(self.config.seed)
        self._ids = count()
        # The launched step, its tokens, and how many sequences had finished at its launch.
        self._in_flight: tuple[ScheduledStep, TokensInTransit, int] | None = None
        self._stumbled = False
        self._last_s = 0.0

    def _make_scheduler(self) -> Scheduler:
        pool = BlockPool(self.card.pool.blocks, self.config.block, prefix_cache=self.config.prefix_cache)
        host_blocks = self.runner.cache.host_blocks
        return Scheduler(pool, self.config, monotonic, context=self.context, host_blocks=host_blocks)

    # Between phases of a training loop.

    def sleep(self) -> None:
        """Free the KV cache and CUDA graphs; the weights stay. Call `wake` before the next request."""
        self.refresh()
        self.runner.sleep()
        self._asleep = True
        if self.runner.cache.device.type == "cuda":
            clear()

    def wake(self) -> None:
        """Allocate the KV cache and capture CUDA graphs again."""
        if self._asleep:
            self.runner.wake()
            self._asleep = False

    def refresh(self) -> None:
        """Clear the prefix cache; call this, or `sleep`, after the weights have changed."""
        if self.has_work:
            raise RequestError("The engine still has sequences to finish.", hint="Take their tokens, or abort them.")
        self.scheduler = self._make_scheduler()
        if self.runner.cache.device.type == "cuda":
            torch.cuda.synchronize(self.runner.cache.device)

    # Requests.

    def generate(
        self, prompts: Listed[Prompt] | str, sampling: Sampling | Listed[Sampling] | None = None, *,
        progress: bool | None = None,
    ) -> list[Output]:  # fmt: skip
        """Return answers in order, n per prompt if requested; `progress` None: a bar on a terminal for many."""
        return generate(self, [prompts] if isinstance(prompts, str) else prompts, sampling, progress=progress)

    def submit(self, prompt_ids: Listed[int], sampling: Sampling, *, salt: str = "") -> list[Sequence]:
        """Submit a prompt and return a sequence per sample. Raises RequestError if it is invalid or the queue is full."""
        if self._asleep:
            raise RequestError("The engine is asleep.", hint="Call engine.wake() first.")
        tokens, sampling = token_ids(prompt_ids), self.seeded(sampling)
        self.check(tokens)
        now_s = monotonic()
        sequences: list[Sequence] = []
        for sample_index in range(sampling.n):
            made = Sequence(
                next(self._ids), tokens.copy(), sampling, len(tokens), eos_ids=self.architecture.eos_ids, salt=salt,
                sample_index=sample_index, parent=sequences[0] if sample_index else None, arrival_s=now_s,
            )  # fmt: skip
            sequences.append(made)
        self.scheduler.add(*sequences)
        return sequences

    def abort(self, sequence: Sequence) -> bool:
        """End a sequence and free its blocks at once. Returns False if it had ended."""
        return self.scheduler.abort(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence as if it had stopped by itself, after a stop string."""
        self.scheduler.abort(sequence, "stop")

    def seeded(self, sampling: Sampling) -> Sampling:
        """Add a seed from the engine if there is none."""
        return sampling if sampling.seed is not None else replace(sampling, seed=self._random.getrandbits(63))

    def check(self, tokens: Listed[int]) -> None:
        """Raise RequestError for a prompt that cannot be served."""
        if not tokens:
            raise RequestError("The prompt is empty.", hint="Give a prompt of at least one token.")
        if len(tokens) >= self.context:
            raise RequestError(
                f"The prompt has {len(tokens):,} tokens, and a sequence may have {self.context:,} with its answer.",
                hint=f"Shorten the prompt to {self.context - 1:,} tokens, or start with a longer --context.",
            )
        if min(tokens) < 0 or max(tokens) >= self.architecture.vocab:
            wrong = next(token for token in tokens if not 0 <= token < self.architecture.vocab)
            problem = f"The prompt has the token id {wrong}."
            raise RequestError(problem, hint=f"Give ids from 0 to {self.architecture.vocab - 1}.")

    # Steps.

    @property
    def has_work(self) -> bool:
        """Whether `advance` has anything to do."""
        return self._in_flight is not None or self.scheduler.has_work

    def kv_ledger(self) -> KvLedger:
        """Return where every byte of the KV cache is now."""
        return kv_ledger(self.scheduler, self.card.pool.block_bytes)

    def at_work(self) -> AbstractContextManager[None]:
        """Make steps from this thread start sooner; other work of this thread on the device waits for them."""
        return self.runner.at_work()

    def advance(self) -> StepOutput:
        """Launch the next step, then return the tokens of the previous one."""
        began_s = perf_counter()
        # After an error the runner takes all tokens from the host, so those in flight must arrive first.
        step = self.scheduler.schedule() if not self._stumbled else None
        self._stumbled = False
        launched, failed = self._launch(step) if step is not None else (None, [])
        landing, self._in_flight = self._in_flight, launched
        host_s = perf_counter() - began_s
        if landing is None:
            self.stats.host_s += host_s
            self._last_s = began_s + host_s if launched else 0.0
            return StepOutput([], [], None, failed)
        landed, pending, finished = landing
        try:
            tokens, logprobs = pending.result()
        except BaseException:
            self.scheduler.fail(landed)
            raise
        arrived_s = perf_counter()
        output = StepOutput(pending.sampling_sequences, tokens, logprobs, failed)
        if self.scheduler.counters.finished > finished:
            # Discard tokens of sequences that finished meanwhile.
            here = [sequence.finish_reason is None for sequence in output.sequences]
            output.sequences, output.tokens = list(compress(output.sequences, here)), list(compress(tokens, here))
            output.logprobs = list(compress(logprobs, here)) if logprobs else None
        output.finished += self.scheduler.complete(landed, tokens)
        self._count(landed, len(output.tokens), host_s + perf_counter() - arrived_s, began_s)
        return output

    def _launch(self, step: ScheduledStep) -> tuple[tuple[ScheduledStep, TokensInTransit, int] | None, list[Sequence]]:
        """Launch a step; if memory runs out, return the sequences that this ended."""
        try:
            return (step, self.runner.launch(step), self.scheduler.counters.finished), []
        except BaseException as error:
            # The scheduler must be told in any case, or it waits for this step forever.
            failed = self.scheduler.fail(step)
            # Libraries and the CPU allocator have no class for it.
            words = ("ALLOC_FAILED", "allocate memory") if isinstance(error, RuntimeError) else ()
            out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
            if not out_of_memory and not any(part in str(error) for part in words):
                self._stumbled = self._in_flight is not None
                raise
        # Only now is the error released, and with it the tensors in its traceback.
        self.stats.failed_steps += 1
        if self.runner.cache.device.type == "cuda":
            torch.cuda.empty_cache()
        return None, failed

    def _count(self, step: ScheduledStep, tokens: int, host_s: float, began_s: float) -> None:
        """Count time from one completion to the next, or from `began_s` if nothing was in flight."""
        stats, now_s = self.stats, perf_counter()
        passed_s = now_s - (self._last_s or began_s)
        stats.steps += 1
        stats.tokens += tokens
        stats.computed_tokens += step.tokens
        stats.busy_s += passed_s
        stats.host_s += host_s
        if stats.steps % _STEPS_PER_LOOK == 0:
            ledger = self.kv_ledger()
            stats.waste_s += passed_s * ledger.slack_bytes / ledger.total
            stats.watched_s += passed_s
        self._last_s = now_s if self._in_flight is not None else 0.0
