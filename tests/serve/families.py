"""Tiny models of every family on disk, what transformers' `generate` makes of a prompt, and an engine whose steps are kept."""

from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import torch
import transformers

from serve.models.tiny import CASES, VOCAB, make_model
from tonnage.serve import Engine
from tonnage.serve.model_runner.runner import TokensInTransit
from tonnage.serve.scheduler.sequence import ScheduledStep

__all__ = ["CASES", "VOCAB", "Watched", "expected", "random_prompts", "saved"]


@cache
def _model(case: str) -> tuple[Path, transformers.PreTrainedModel]:
    model = make_model(case)
    folder = Path(mkdtemp(prefix=f"tonnage-{case}-"))
    model.save_pretrained(folder)
    return folder, model


def saved(case: str) -> Path:
    """The folder that transformers saved the case's model to."""
    return _model(case)[0]


@cache
def expected(case: str, prompt: tuple[int, ...], count: int) -> list[int]:
    """The tokens that transformers' `generate` draws greedily."""
    model = _model(case)[1]
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def random_prompts(seed: int, count: int, *, longest: int, shared: int = 0) -> list[list[int]]:
    """Of random lengths; every other one begins with the same `shared` tokens."""
    random = Random(seed)
    prefix = [random.randrange(VOCAB) for _ in range(shared)]
    prompts = []
    for number in range(count):
        own = [random.randrange(VOCAB) for _ in range(random.randint(1, longest))]
        prompts.append((prefix + own)[:longest] if number % 2 else own)
    return prompts


class Watched(Engine):
    """An engine that keeps every step that it launches."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.steps: list[ScheduledStep] = []
        self._launched = self.runner.launch
        self.runner.launch = self._launch_and_keep  # type: ignore[method-assign]

    def _launch_and_keep(self, step: ScheduledStep) -> TokensInTransit:
        self.steps.append(step)
        return self._launched(step)

    @property
    def chunk_boundaries(self) -> int:
        """Chunks that end before their prompt does."""
        return sum(not work.samples for step in self.steps for work in step.chunks)

    @property
    def mixed_steps(self) -> int:
        """Steps with decodes and chunks."""
        return sum(bool(step.decodes and step.chunks) for step in self.steps)

    @property
    def copies(self) -> int:
        """Blocks that were copied before they were written."""
        return sum(len(step.copies) for step in self.steps)

    @property
    def swaps_in(self) -> int:
        """Blocks that came back from the host."""
        return sum(len(step.swaps_in) for step in self.steps)
