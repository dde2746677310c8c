"""The engine: prompts in, tokens out, one step ahead of the device.

`advance` schedules and launches the next step while the last one still runs, and then takes the last one's tokens; so the
host's work is hidden behind the device's. A step that runs out of memory ends its own sequences and no others. Not for
several threads at once. This module knows no HTTP, and of text only what `generate` hands back.
"""

import random
from collections.abc import Sequence as Listed
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import compress, count
from pathlib import Path
from time import monotonic, perf_counter

import torch

from tonnage.errors import RequestError
from tonnage.serve import startup
from tonnage.serve.accounts import KvLedger, kv_ledger
from tonnage.serve.blocks import BlockPool
from tonnage.serve.generation import Prompt, generate, token_ids
from tonnage.serve.models.architecture import read_architecture
from tonnage.serve.models.decoder import Decoder
from tonnage.serve.models.linear import Weights
from tonnage.serve.models.load import load_decoder
from tonnage.serve.models.sharing import share_decoder
from tonnage.serve.rehearsal import clear
from tonnage.serve.runner import Pending
from tonnage.serve.sampling import Output, Sampling, TokenLogprob
from tonnage.serve.scheduler import Limits, Scheduler
from tonnage.serve.sequence import Sequence, Step
from tonnage.serve.startup import DTYPES, Model, Place, Settings
from tonnage.serve.text import Tokenizer

# Waste is looked at in every so many steps: it changes slowly, and looking costs as much as half a schedule.
_STEPS_PER_LOOK = 16


@dataclass(slots=True)
class Event:
    """What one step brought to one sequence; `sequence.finish_reason` says why it `finished`."""

    sequence: Sequence
    new_token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finished: bool = False


@dataclass(slots=True)
class Stats:
    """Since the start. `host_s` is the host's own work, without waiting for the device."""

    steps: int = 0
    tokens: int = 0  # drawn
    computed_tokens: int = 0  # prompts and drawn ones
    busy_s: float = 0.0
    host_s: float = 0.0
    failed_steps: int = 0
    waste_s: float = 0.0  # the share of the pool that was slack, over time
    watched_s: float = 0.0

    @property
    def step_s(self) -> float:
        """The mean time of a step."""
        return self.busy_s / max(self.steps, 1)

    @property
    def host_step_s(self) -> float:
        """The mean time that the host works for a step."""
        return self.host_s / max(self.steps, 1)

    @property
    def waste(self) -> float:
        """The share of the KV pool that was slack, averaged over time."""
        return self.waste_s / self.watched_s if self.watched_s else 0.0


@dataclass(slots=True)
class Turn:
    """What a step brought: a token for each of the sequences that were still there, and who ended."""

    sequences: list[Sequence]
    tokens: list[int]
    logprobs: list[TokenLogprob | None] | None
    finished: list[Sequence]


@dataclass(slots=True)
class Flight:
    """A step on its way, and how many sequences had finished when it was launched."""

    step: Step
    pending: Pending
    finished: int


class Engine:
    """A model on one device, with everything that it takes to serve it.

    | argument         | meaning                                                                                   |
    |------------------|-------------------------------------------------------------------------------------------|
    | `path`           | the model's folder                                                                        |
    | `budget`         | a share of the device's memory (on the CPU of what is free), or a size such as "60 GiB"   |
    | `context`        | tokens of the longest sequence; None: as far as the model goes, and the cache holds        |
    | `kv`             | "bf16", "fp16", "fp32" or "fp8"; None: as the model computes                              |
    | `weights`        | "int8" or "fp8": kept in eight bits                                                       |
    | `max_seqs`       | sequences that run at once                                                                |
    | `batched_tokens` | tokens of one step                                                                        |
    | `block`          | tokens of a block of the cache; `blocks`: how many, whatever the budget                    |
    | `prefix_cache`   | keep prefixes for those who begin alike                                                   |
    | `swap`           | host memory that preempted sequences are kept in, such as "8 GiB"; 0: they are recomputed |
    | `eager`          | no CUDA graphs                                                                            |
    | `seed`           | of the requests that bring none                                                           |
    """

    def __init__(
        self, path: str | Path, *, budget: float | str = 0.9, context: int | None = None, kv: str | None = None,
        weights: Weights | None = None, max_seqs: int = 256, batched_tokens: int = 8192, block: int = 16,
        blocks: int | None = None, device: str | torch.device | None = None, prefix_cache: bool = True,
        swap: int | str = 0, eager: bool = False, seed: int = 0, max_waiting: int = 1024,
    ) -> None:  # fmt: skip
        settings = Settings(
            budget=budget, context=context, kv=kv, weights=weights, max_seqs=max_seqs, batched_tokens=batched_tokens,
            block=block, blocks=blocks, prefix_cache=prefix_cache, swap=swap, eager=eager,
        )  # fmt: skip
        where, architecture = _device(device), read_architecture(path)
        if context is not None and context > architecture.positions:
            raise RequestError(
                f"The model has {architecture.positions:,} positions, fewer than a context of {context:,}.",
                hint=f"Use --context {architecture.positions} at most.",
            )
        # The CPU computes in FP32: it is exact there, and no slower.
        dtype = torch.float32 if where.type == "cpu" else DTYPES[architecture.dtype]
        model, place = Model(architecture, dtype), startup.look(where, budget)
        startup.check(startup.plan(model, settings, place), model, settings, place)
        tokenizer = Tokenizer.load(path)
        decoder = load_decoder(path, architecture, device=where, dtype=dtype, weights=weights, context=context)
        self._start(decoder, tokenizer, model, settings, place, seed, max_waiting)

    @classmethod
    def of(
        cls, decoder: Decoder, tokenizer: Tokenizer | None = None, *, settings: Settings | None = None, seed: int = 0,
        max_waiting: int = 1024,
    ) -> "Engine":  # fmt: skip
        """An engine of a decoder that exists."""
        engine, settings = cls.__new__(cls), settings or Settings()
        model, place = Model(decoder.architecture, decoder.dtype), startup.look(decoder.device, settings.budget)
        startup.check(startup.plan(model, settings, place), model, settings, place)
        engine._start(decoder, tokenizer, model, settings, place, seed, max_waiting)
        return engine

    @classmethod
    def of_module(
        cls,
        module: torch.nn.Module,
        tokenizer: Tokenizer | None = None,
        *,
        settings: Settings | None = None,
        seed: int = 0,
    ) -> "Engine":
        """An engine that serves the weights of a live model of transformers, of which there is then one copy.

        What an optimizer writes is served from the next `wake` or `refresh` on. `settings.blocks` should be given: a share of
        the card does not know what training needs beside it.
        """
        context = settings.context if settings else None
        return cls.of(share_decoder(module, context=context), tokenizer, settings=settings, seed=seed)

    def _start(
        self, decoder: Decoder, tokenizer: Tokenizer | None, model: Model, settings: Settings, place: Place, seed: int,
        max_waiting: int,
    ) -> None:  # fmt: skip
        started = startup.start(decoder, model, settings, place)
        self.runner, self.card, self.context = started.runner, started.card, started.context
        self.architecture, self.settings, self.tokenizer = decoder.architecture, settings, tokenizer
        self.scheduler = self._scheduler(max_waiting)
        self._asleep = False
        self.stats = Stats()
        self._random = random.Random(seed)
        self._ids = count()
        self._flight: Flight | None = None
        self._stumbled = False
        self._last_s = 0.0

    def _scheduler(self, max_waiting: int) -> Scheduler:
        """One that knows no sequence and no prefix."""
        settings = self.settings
        pool = BlockPool(self.card.pool.blocks, settings.block, prefix_cache=settings.prefix_cache)
        limits = Limits(
            max_seqs=settings.max_seqs, batched_tokens=settings.batched_tokens, max_waiting=max_waiting,
            context=self.context, host_blocks=self.runner.cache.host_blocks,
        )  # fmt: skip
        return Scheduler(pool, limits, monotonic)

    # Between phases of a training loop.

    def sleep(self) -> None:
        """Free the KV cache and CUDA graphs; the weights stay. Call `wake` before the next request."""
        self.refresh()
        self.runner.sleep()
        self._asleep = True
        if self.runner.cache.device.type == "cuda":
            clear()

    def wake(self) -> None:
        """Make the KV cache and CUDA graphs again."""
        if self._asleep:
            self.runner.wake()
            self._asleep = False

    def refresh(self) -> None:
        """Forget what was computed by the weights as they were: call it, or `sleep`, where they have changed."""
        if self.has_work:
            raise RequestError("The engine still has sequences to finish.", hint="Take their tokens, or abort them.")
        self.scheduler = self._scheduler(self.scheduler.limits.max_waiting)
        if self.runner.cache.device.type == "cuda":
            torch.cuda.synchronize(self.runner.cache.device)

    # Requests.

    def generate(
        self, prompts: Listed[Prompt] | str, sampling: Sampling | Listed[Sampling] | None = None, *,
        progress: bool | None = None,
    ) -> list[Output]:  # fmt: skip
        """Answers to texts or lists of token ids, in their order; n of each where a request draws n.

        `progress` None shows it on a terminal, for batches that take a while.
        """
        return generate(self, [prompts] if isinstance(prompts, str) else prompts, sampling, progress=progress)

    def submit(self, prompt_ids: Listed[int], sampling: Sampling, *, salt: str = "") -> list[Sequence]:
        """A sequence for each of the n draws of a prompt. Raises what is wrong with it, or that the queue is full."""
        if self._asleep:
            raise RequestError("The engine is asleep.", hint="Call engine.wake() first.")
        tokens, sampling = token_ids(prompt_ids), self.seeded(sampling)
        self.check(tokens)
        now_s, parent = monotonic(), None
        sequences: list[Sequence] = []
        for draw in range(sampling.n):
            made = Sequence(
                next(self._ids), tokens.copy(), sampling, len(tokens), eos_ids=self.architecture.eos_ids, salt=salt,
                draw=draw, parent=parent, arrival_s=now_s,
            )  # fmt: skip
            parent = parent or made
            sequences.append(made)
        self.scheduler.add(*sequences)
        return sequences

    def abort(self, sequence: Sequence) -> bool:
        """End a sequence; its blocks are free at once. False where it had ended."""
        return self.scheduler.abort(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence as if it had stopped by itself: a stop string was found."""
        self.scheduler.finish(sequence, "stop")

    def seeded(self, sampling: Sampling) -> Sampling:
        """With a seed of the engine's own where it has none."""
        return sampling if sampling.seed is not None else replace(sampling, seed=self._random.getrandbits(63))

    def check(self, tokens: Listed[int]) -> None:
        """Refuse a prompt that cannot be served."""
        if not tokens:
            raise RequestError("The prompt is empty.", hint="Give a prompt of at least one token.")
        if len(tokens) >= self.context:
            raise RequestError(
                f"The prompt has {len(tokens):,} tokens, and a sequence may have {self.context:,} with its answer.",
                hint=f"Shorten the prompt to {self.context - 1:,} tokens, or start with a longer --context.",
            )
        if min(tokens) < 0 or max(tokens) >= self.architecture.vocab:
            wrong = next(token for token in tokens if not 0 <= token < self.architecture.vocab)
            raise RequestError(
                f"The prompt has the token id {wrong}.", hint=f"Give ids from 0 to {self.architecture.vocab - 1}."
            )

    # Steps.

    @property
    def has_work(self) -> bool:
        """Whether `advance` has anything to do."""
        return self._flight is not None or self.scheduler.has_work

    def kv_ledger(self) -> KvLedger:
        """Where every byte of the KV cache is now."""
        return kv_ledger(self.scheduler, self.card.pool.block_bytes)

    def at_work(self) -> AbstractContextManager[None]:
        """Within it steps from this thread begin sooner, and its own work on the device waits for theirs."""
        return self.runner.at_work()

    def advance(self) -> list[Event]:
        """Launch the next step, then take the tokens of the one before: one event for each sequence that it concerns."""
        turn = self.turn()
        events = list(map(Event, turn.sequences, [[token] for token in turn.tokens]))
        if turn.logprobs:
            for event, logprob in zip(events, turn.logprobs, strict=True):
                event.logprobs = [logprob] if logprob is not None else None
        if turn.finished:
            ended = set(turn.finished)
            for event in events:
                event.finished = event.sequence in ended
            silent = ended.difference(turn.sequences)
            events += [Event(one, [], finished=True) for one in turn.finished if one in silent]
        return events

    def turn(self) -> Turn:
        """The same without events, for who wants to know of the end only."""
        began_s = perf_counter()
        # A runner that raised takes all tokens from the host, so those in flight are awaited first.
        step = self.scheduler.schedule() if not self._stumbled else None
        self._stumbled = False
        launched, failed = self._launch(step) if step is not None else (None, [])
        flight, self._flight = self._flight, launched
        host_s = perf_counter() - began_s
        if flight is None:
            self.stats.host_s += host_s
            self._last_s = began_s + host_s if launched else 0.0
            return Turn([], [], None, failed)
        turn, landing_s = self._land(flight, failed)
        self._count(flight, turn, host_s + landing_s, began_s)
        return turn

    def _launch(self, step: Step) -> tuple[Flight | None, list[Sequence]]:
        """The step on its way; or, where memory ran out, whom that ended."""
        try:
            return Flight(step, self.runner.launch(step), self.scheduler.counters.finished), []
        except BaseException as error:
            # The scheduler must hear of it in any case, or it waits for this step for ever.
            failed = self.scheduler.fail(step)
            if not _out_of_memory(error):
                self._stumbled = self._flight is not None
                raise
        # Only now is the error gone, and with it the tensors that its traceback held.
        self.stats.failed_steps += 1
        if self.runner.cache.device.type == "cuda":
            torch.cuda.empty_cache()
        return None, failed

    def _land(self, flight: Flight, failed: list[Sequence]) -> tuple[Turn, float]:
        """Wait for a step and take its tokens; and the seconds of work, waiting left out."""
        try:
            tokens, logprobs = flight.pending.result()
        except BaseException:
            self.scheduler.fail(flight.step)
            raise
        began_s = perf_counter()
        turn = Turn(flight.pending.drawing, tokens, logprobs, failed)
        if self.scheduler.counters.finished > flight.finished:
            # Whoever ended meanwhile drew in vain.
            here = [sequence.finish_reason is None for sequence in turn.sequences]
            turn.sequences, turn.tokens = list(compress(turn.sequences, here)), list(compress(tokens, here))
            turn.logprobs = list(compress(logprobs, here)) if logprobs else None
        turn.finished += self.scheduler.complete(flight.step, tokens)
        return turn, perf_counter() - began_s

    def _count(self, flight: Flight, turn: Turn, host_s: float, began_s: float) -> None:
        """From one landing to the next; from the start of this turn where nothing was under way before it."""
        stats, now_s = self.stats, perf_counter()
        passed_s = now_s - (self._last_s or began_s)
        stats.steps += 1
        stats.tokens += len(turn.tokens)
        stats.computed_tokens += flight.step.tokens
        stats.busy_s += passed_s
        stats.host_s += host_s
        if stats.steps % _STEPS_PER_LOOK == 0:
            self._watch(passed_s)
        self._last_s = now_s if self._flight is not None else 0.0

    def _watch(self, elapsed_s: float) -> None:
        ledger = self.kv_ledger()
        self.stats.waste_s += elapsed_s * ledger.slack_bytes / ledger.total
        self.stats.watched_s += elapsed_s


def _device(device: str | torch.device | None) -> torch.device:
    found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return torch.device("cuda", found.index or 0) if found.type == "cuda" else found


def _out_of_memory(error: BaseException) -> bool:
    """Libraries and the CPU's allocator have no class of their own for it."""
    words = str(error)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(part in words for part in ("ALLOC_FAILED", "allocate memory"))
    )
