"""Generate for a batch of prompts: fed to the engine as its queue drains, answers in the order of the prompts.

This module does not know how a step is computed.
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
from tonnage.serve.scheduler.sequence import Sequence
from tonnage.serve.text import TextStream, Tokenizer

if TYPE_CHECKING:
    from tonnage.serve.engine import Engine, StepOutput

Prompt = str | Listed[int]
# Smaller batches finish before a progress bar is useful.
_SHOWN_FROM = 8


@dataclass(slots=True)
class _GrowingAnswer:
    """One sequence as it grows. `stream` looks for stop strings, if there are any."""

    sequence: Sequence
    stream: TextStream | None
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def push(self, token_id: int) -> bool:
        """Add a token and return whether a stop string was found. Stop tokens are not part of the text."""
        if self.stream is None or token_id in self.sequence.sampling.stop_token_ids:
            return False
        self.text += self.stream.push((token_id,))
        return self.stream.stopped

    def output(self, tokenizer: Tokenizer | None) -> Output:
        sequence = self.sequence
        prompt = sequence.tokens[: sequence.prompt_length]
        stopped = self.stream is not None and self.stream.stopped
        if self.stream is None and tokenizer is not None:
            self.stream, stops = TextStream(tokenizer, prompt=prompt), sequence.sampling.stop_token_ids
            self.text = self.stream.push([token_id for token_id in sequence.output if token_id not in stops])
        self.text += self.stream.finish() if self.stream is not None else ""
        assert sequence.finish_reason is not None
        return Output(
            token_ids=sequence.output,
            text=self.text,
            finish_reason="stop" if stopped else sequence.finish_reason,
            prompt_token_ids=prompt,
            logprobs=self.logprobs if sequence.sampling.logprobs is not None else None,
            cached_tokens=sequence.cached,
        )


class _Batch:
    """Requests waiting to be submitted, and answers, the unfinished ones by sequence."""

    def __init__(self, engine: "Engine", requests: list[tuple[list[int], Sampling]]) -> None:
        self._engine = engine
        self.requests = deque(requests)
        self.answers: list[_GrowingAnswer] = []
        self.unfinished: dict[Sequence, _GrowingAnswer] = {}

    def feed(self) -> None:
        """Submit in order, as far as the queue has room."""
        engine = self._engine
        while self.requests:
            tokens, sampling = self.requests[0]
            if self.unfinished and engine.scheduler.waiting.fresh + sampling.n > engine.config.max_waiting:
                return
            for sequence in engine.submit(tokens, sampling):
                stream = None
                if sampling.stop:
                    assert engine.tokenizer is not None
                    stream = TextStream(engine.tokenizer, sampling.stop, prompt=tokens)
                answer = self.unfinished[sequence] = _GrowingAnswer(sequence, stream)
                self.answers.append(answer)
            self.requests.popleft()

    def take(self, output: "StepOutput", *, every: bool) -> int:
        """Take a step's output, token by token if `every`, else only the finished; return how many finished."""
        before = len(self.unfinished)
        if every:
            logprobs = output.logprobs or [None] * len(output.tokens)
            for sequence, token, logprob in zip(output.sequences, output.tokens, logprobs, strict=True):
                answer = self.unfinished.get(sequence)
                if answer is None:
                    continue
                if logprob is not None:
                    answer.logprobs.append(logprob)
                if answer.push(token):
                    self._engine.finish(sequence)
                    del self.unfinished[sequence]
        for sequence in output.finished:
            self.unfinished.pop(sequence, None)
        return before - len(self.unfinished)


def generate(
    engine: "Engine", prompts: Listed[Prompt], sampling: Sampling | Listed[Sampling] | None, *, progress: bool | None
) -> list[Output]:
    """Return all answers. Every request is checked before the first one runs."""
    requests = _requests(engine, prompts, sampling)
    every = any(one.stop or one.logprobs is not None for _, one in requests)
    batch = _Batch(engine, requests)
    with _shown(sum(one.n for _, one in requests), progress) as show, no_collection(), engine.at_work():
        try:
            while batch.requests or batch.unfinished:
                batch.feed()
                output = engine.advance()
                ended = batch.take(output, every=every)
                show(ended, len(output.tokens))
        finally:
            for sequence in batch.unfinished:
                engine.abort(sequence)
    return [answer.output(engine.tokenizer) for answer in batch.answers]


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
        if isinstance(prompt, int):
            raise RequestError(f"A prompt is the number {prompt}.", hint="Give a list of prompts: [[1, 2, 3]] has one.")
        if isinstance(prompt, str):
            assert engine.tokenizer is not None
            tokens = engine.tokenizer.encode(prompt)
        else:
            tokens = token_ids(prompt)
        engine.check(tokens)
        requests.append((tokens, engine.seeded(wishes)))
    return requests


def token_ids(prompt: Listed[int]) -> list[int]:
    """Coerce any integer type to int."""
    try:
        return list(map(index, prompt))
    except TypeError:
        raise RequestError("A prompt holds something that is no token id.", hint="Give whole numbers.") from None


@contextmanager
def _shown(total: int, progress: bool | None) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on standard error if wanted; yields a function of finished answers and tokens."""
    if not (progress if progress is not None else total >= _SHOWN_FROM and sys.stderr.isatty()):
        yield lambda ended, tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    rate = TextColumn("{task.fields[rate]:,.0f} tokens/s")
    columns = (BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=progress is None) as bar:
        task, sampled = bar.add_task("", total=total, rate=0.0), 0

        def show(ended: int, tokens: int) -> None:
            nonlocal sampled
            sampled += tokens
            if ended:
                bar.update(task, advance=ended, rate=sampled / max(bar.tasks[0].elapsed or 0.0, 1e-9))

        yield show
