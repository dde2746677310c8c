"""A batch of prompts from beginning to end: fed to the engine as its queue drains, answers in the order of the prompts.

This module does not know how a step is made.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listed
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING

from tonnage.errors import RequestError
from tonnage.garbage import no_collection
from tonnage.serve.sampling import Output, Sampling, TokenLogprob
from tonnage.serve.sequence import Sequence
from tonnage.serve.text import TextStream, Tokenizer

if TYPE_CHECKING:
    from tonnage.serve.engine import Engine, Turn

Prompt = str | Listed[int]
# Fewer answers than these are there before a bar is read.
_SHOWN_FROM = 8


@dataclass(slots=True)
class _Answer:
    """One sequence as it grows. `stream` looks for stop strings, where there are any."""

    sequence: Sequence
    stream: TextStream | None
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def push(self, token_id: int) -> bool:
        """One token more; whether a stop string was found. A token that it was told to stop at is not part of the text."""
        if self.stream is None or token_id in self.sequence.sampling.stop_token_ids:
            return False
        self.text += self.stream.push((token_id,))
        return self.stream.stopped

    def output(self, tokenizer: Tokenizer | None) -> Output:
        sequence = self.sequence
        stopped = self.stream is not None and self.stream.stopped
        if self.stream is None and tokenizer is not None:
            self.stream, stops = TextStream(tokenizer, prompt=self._prompt), sequence.sampling.stop_token_ids
            self.text = self.stream.push([token_id for token_id in sequence.output if token_id not in stops])
        self.text += self.stream.finish() if self.stream is not None else ""
        assert sequence.finish_reason is not None
        return Output(
            token_ids=sequence.output,
            text=self.text,
            finish_reason="stop" if stopped else sequence.finish_reason,
            prompt_token_ids=self._prompt,
            logprobs=self.logprobs if sequence.sampling.logprobs is not None else None,
            cached_tokens=sequence.cached,
        )

    @property
    def _prompt(self) -> list[int]:
        return self.sequence.tokens[: self.sequence.prompt_length]


class _Batch:
    """Requests that wait to be fed, and those that are open."""

    def __init__(self, engine: "Engine", requests: list[tuple[list[int], Sampling]]) -> None:
        self._engine, self._tokenizer = engine, engine.tokenizer
        self._requests = deque(requests)
        self._answers: list[_Answer] = []
        self._open: dict[Sequence, _Answer] = {}

    @property
    def unfinished(self) -> bool:
        return bool(self._requests or self._open)

    def feed(self) -> None:
        """Submit in order, as far as the queue has room."""
        scheduler = self._engine.scheduler
        while self._requests:
            tokens, sampling = self._requests[0]
            if self._open and scheduler.waiting.fresh + sampling.n > scheduler.limits.max_waiting:
                return
            for sequence in self._engine.submit(tokens, sampling):
                answer = self._open[sequence] = _Answer(sequence, self._stream(tokens, sampling))
                self._answers.append(answer)
            self._requests.popleft()

    def take(self, turn: "Turn", *, every: bool) -> int:
        """What a step brought; `every`: tokens one by one, else only the ends matter. How many ended."""
        before = len(self._open)
        if every:
            logprobs = turn.logprobs or [None] * len(turn.tokens)
            for sequence, token, logprob in zip(turn.sequences, turn.tokens, logprobs, strict=True):
                self._push(sequence, token, logprob)
        for sequence in turn.finished:
            self._open.pop(sequence, None)
        return before - len(self._open)

    def abort(self) -> None:
        for sequence in self._open:
            self._engine.abort(sequence)

    def outputs(self) -> list[Output]:
        return [answer.output(self._tokenizer) for answer in self._answers]

    def _push(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        answer = self._open.get(sequence)
        if answer is None:
            return
        if logprob is not None:
            answer.logprobs.append(logprob)
        if answer.push(token):
            self._engine.finish(sequence)
            del self._open[sequence]

    def _stream(self, tokens: list[int], sampling: Sampling) -> TextStream | None:
        if not sampling.stop:
            return None
        assert self._tokenizer is not None
        return TextStream(self._tokenizer, sampling.stop, prompt=tokens)


def generate(
    engine: "Engine",
    prompts: Listed[Prompt],
    sampling: Sampling | Listed[Sampling] | None,
    *,
    progress: bool | None,
) -> list[Output]:
    """All answers. Every request is checked before the first one runs."""
    requests = _requests(engine, prompts, sampling)
    every = any(one.stop or one.logprobs is not None for _, one in requests)
    batch = _Batch(engine, requests)
    with _shown(sum(one.n for _, one in requests), progress) as show, no_collection(), engine.at_work():
        try:
            while batch.unfinished:
                batch.feed()
                turn = engine.turn()
                ended = batch.take(turn, every=every)
                show(ended, len(turn.tokens))
        finally:
            batch.abort()
    return batch.outputs()


def _requests(
    engine: "Engine", prompts: Listed[Prompt], sampling: Sampling | Listed[Sampling] | None
) -> list[tuple[list[int], Sampling]]:
    each = [sampling or Sampling()] * len(prompts) if sampling is None or isinstance(sampling, Sampling) else sampling
    if len(each) != len(prompts):
        raise RequestError(
            f"There are {len(prompts)} prompts and {len(each)} samplings.", hint="Give one for all, or one for each."
        )
    requests: list[tuple[list[int], Sampling]] = []
    for prompt, wishes in zip(prompts, each, strict=True):
        if (isinstance(prompt, str) or wishes.stop) and engine.tokenizer is None:
            raise RequestError(
                "The model's folder has no tokenizer, so it reads and stops at no text.",
                hint="Give prompts as lists of token ids, and stop_token_ids in the place of stop.",
            )
        tokens = _encoded(prompt, engine.tokenizer)
        engine.check(tokens)
        requests.append((tokens, engine.seeded(wishes)))
    return requests


def _encoded(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    if isinstance(prompt, str):
        assert tokenizer is not None
        return tokenizer.encode(prompt)
    if isinstance(prompt, int):
        raise RequestError(f"A prompt is the number {prompt}.", hint="Give a list of prompts: [[1, 2, 3]] has one.")
    return token_ids(prompt)


def token_ids(prompt: Listed[int]) -> list[int]:
    """Whole numbers, whoever's."""
    try:
        return list(map(index, prompt))
    except TypeError:
        raise RequestError("A prompt holds something that is no token id.", hint="Give whole numbers.") from None


@contextmanager
def _shown(total: int, progress: bool | None) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, where it is wanted; told of answers that ended and of tokens."""
    if not (progress if progress is not None else total >= _SHOWN_FROM and sys.stderr.isatty()):
        yield lambda ended, tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=progress is None) as bar:
        task, drawn = bar.add_task("", total=total, rate=0.0), 0

        def show(ended: int, tokens: int) -> None:
            nonlocal drawn
            drawn += tokens
            if ended:
                bar.update(task, advance=ended, rate=drawn / max(bar.tasks[0].elapsed or 0.0, 1e-9))

        yield show
