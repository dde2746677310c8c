"""A scheduler driven by hand, or by a loop that is one step ahead of a model that counts: after token t comes t + 1."""

from itertools import count

from tonnage.serve.cache.block_pool import BlockPool
from tonnage.serve.config import EngineConfig
from tonnage.serve.sampling import Sampling
from tonnage.serve.scheduler.scheduler import Scheduler
from tonnage.serve.scheduler.sequence import ScheduledStep, Sequence

SIZE = 4


class Driver:
    """`usable` blocks of four tokens. Steps are launched by `launch` and read back by `land`, the oldest first."""

    def __init__(
        self, usable: int = 64, *, prefix_cache: bool = True, context: int = 32768, host_blocks: int = 0, **limits: int
    ) -> None:
        self.pool = BlockPool(usable + 1, SIZE, prefix_cache=prefix_cache)
        self.now_s = 100.0
        self.scheduler = Scheduler(
            self.pool, EngineConfig(**limits), lambda: self.now_s, context=context, host_blocks=host_blocks
        )
        self.flying: list[tuple[ScheduledStep, list[int]]] = []
        self.steps: list[ScheduledStep] = []
        self._ids = count()

    def sequence(self, prompt: int | list[int], tokens: int = 8, **more: object) -> Sequence:
        """A sequence that is not added yet; a prompt given as a length is unlike any other."""
        number = next(self._ids)
        known = [1000 * (number + 1) + i for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
        return Sequence(number, known, Sampling(max_tokens=tokens), len(known), **more)

    def add(self, prompt: int | list[int], tokens: int = 8, **more: object) -> Sequence:
        sequence = self.sequence(prompt, tokens, **more)
        self.scheduler.add(sequence)
        return sequence

    def answers_per_prompt(self, prompt: int, tokens: int = 8, n: int = 2) -> list[Sequence]:
        """The draws of one prompt."""
        parent = self.sequence(prompt, tokens)
        family = [parent] + [self.sequence(parent.tokens, tokens, sample_index=i, parent=parent) for i in range(1, n)]
        self.scheduler.add(*family)
        return family

    def launch(self) -> ScheduledStep | None:
        """Schedule a step, and draw its tokens as the device would."""
        step = self.scheduler.schedule()
        if step is not None:
            tokens = [
                work.sequence.tokens[0] + work.start + work.count
                for work in (*step.decodes, *step.chunks)
                if work.samples
            ]
            self.flying.append((step, tokens))
            self.steps.append(step)
        return step

    def land(self) -> list[Sequence]:
        """Complete the oldest step in flight."""
        return self.scheduler.complete(*self.flying.pop(0))

    def turn(self) -> ScheduledStep | None:
        """What an engine does each time: launch a step, then read the one before."""
        step = self.launch()
        if len(self.flying) > (step is not None):
            self.land()
        return step

    def turns(self, number: int) -> None:
        for _ in range(number):
            self.turn()

    def finish(self) -> None:
        """Go on until nothing is left; stuck is an error."""
        while self.scheduler.has_work:
            flew = bool(self.flying)
            assert self.turn() or flew, "nothing runs, and nothing is scheduled"
        while self.flying:
            self.land()


def counted(sequence: Sequence) -> list[int]:
    """What a sequence that was not cut short must have drawn."""
    first = sequence.tokens[0]
    return [first + i for i in range(sequence.prompt_length, sequence.prompt_length + sequence.sampling.max_tokens)]
