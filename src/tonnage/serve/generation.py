"""Generate for a batch of prompts: fed to the engine as its queue drains, answers in the order of the prompts."""

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listed
from contextlib import contextmanager
from operator import index
from typing import TYPE_CHECKING

from tonnage.errors import RequestError
from tonnage.garbage import no_collection
from tonnage.serve.sampling import AnswerDelta, Output, Sampling, TokenLogprob
from tonnage.serve.scheduler.sequence import Sequence
from tonnage.serve.text import Answer

if TYPE_CHECKING:
    from tonnage.serve.engine import Engine

Prompt = str | Listed[int]
# Smaller batches finish before a progress bar is useful.
_SHOWN_FROM = 8


def generate(
    engine: "Engine", prompts: Listed[Prompt], sampling: Sampling | Listed[Sampling] | None, *, progress: bool | None
) -> list[Output]:
    """Return all answers. Every request is checked before the first one runs."""
    requests = deque(_requests(engine, prompts, sampling))
    total = sum(one.n for _, one in requests)
    # Otherwise only the finished sequences of a step are looked at.
    token_by_token = any(one.stop or one.logprobs is not None for _, one in requests)
    answers: dict[Sequence, Answer] = {}
    unfinished: dict[Sequence, Answer] = {}
    logprobs: defaultdict[Sequence, list[TokenLogprob]] = defaultdict(list)
    with _shown(total, progress) as show, no_collection(), engine.at_work():
        try:
            while requests or unfinished:
                # Submit in order, as far as the queue has room.
                while requests:
                    tokens, own = requests[0]
                    if unfinished and engine.scheduler.waiting.fresh + own.n > engine.config.max_waiting:
                        break
                    for sequence in engine.submit(tokens, own):
                        answers[sequence] = unfinished[sequence] = Answer(len(answers), tokens, own, engine.tokenizer)
                    requests.popleft()
                output = engine.advance()
                before = len(unfinished)
                if token_by_token:
                    scores = output.logprobs or [None] * len(output.tokens)
                    for sequence, token, logprob in zip(output.sequences, output.tokens, scores, strict=True):
                        answer = unfinished.get(sequence)
                        if answer is None:
                            continue
                        if logprob is not None:
                            logprobs[sequence].append(logprob)
                        if sequence.sampling.stop:
                            answer.take(AnswerDelta(answer.index, token_ids=[token]))
                            if answer.finished:
                                engine.finish(sequence)
                                del unfinished[sequence]
                for sequence in output.finished:
                    unfinished.pop(sequence, None)
                show(before - len(unfinished), len(output.tokens))
        finally:
            for sequence in unfinished:
                engine.abort(sequence)
    return [_output(sequence, answer, logprobs[sequence]) for sequence, answer in answers.items()]


def _output(sequence: Sequence, answer: Answer, logprobs: list[TokenLogprob]) -> Output:
    # With stop strings, all tokens were taken as they came.
    rest = [] if sequence.sampling.stop else sequence.output
    answer.take(AnswerDelta(answer.index, token_ids=rest, finish_reason=sequence.finish_reason))
    whole = answer.all
    assert whole.finish_reason is not None
    return Output(
        token_ids=sequence.output,
        text=whole.text,
        finish_reason=whole.finish_reason,
        prompt_token_ids=sequence.tokens[: sequence.prompt_length],
        logprobs=logprobs if sequence.sampling.logprobs is not None else None,
        cached_tokens=sequence.cached,
    )


def _requests(
    engine: "Engine", prompts: Listed[Prompt], sampling: Sampling | Listed[Sampling] | None
) -> Iterator[tuple[list[int], Sampling]]:
    each = [sampling or Sampling()] * len(prompts) if sampling is None or isinstance(sampling, Sampling) else sampling
    if len(each) != len(prompts):
        problem = f"There are {len(prompts)} prompts and {len(each)} samplings."
        raise RequestError(problem, hint="Give one for all, or one for each.")
    for prompt, wishes in zip(prompts, each, strict=True):
        if (isinstance(prompt, str) or wishes.stop) and engine.tokenizer is None:
            hint = "Give prompts as lists of token ids, and stop_token_ids in the place of stop."
            raise RequestError("The model's folder has no tokenizer, so it reads and stops at no text.", hint=hint)
        if isinstance(prompt, int):
            raise RequestError(f"A prompt is the number {prompt}.", hint="Give a list of prompts: [[1, 2, 3]] has one.")
        if isinstance(prompt, str):
            assert engine.tokenizer is not None
            tokens = engine.tokenizer.encode(prompt)
        else:
            tokens = token_ids(prompt)
        engine.check(tokens)
        yield tokens, engine.seeded(wishes)


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
