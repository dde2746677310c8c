"""The techniques that are applied to a training, in their order."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

from tonnage.fit.modules import is_cache_idle, uncompiled, without_cache
from tonnage.fit.technique import Technique
from tonnage.fit.training import Training, Undo

# Orders of techniques that change how the model computes; lower ones change where it is, higher ones the step.
_MODEL_SIDE = range(1, 65)


class Applied:
    """Techniques applied to a training, removed in reverse order.

    Meanwhile the KV cache is off if the loss does not depend on it, and modules compiled in place run uncompiled.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self._placed: list[tuple[Technique, Undo]] = []
        self._as_before = [uncompiled(training.model)]
        if is_cache_idle(training):
            self._as_before.append(without_cache(training.model))

    @property
    def techniques(self) -> tuple[Technique, ...]:
        return tuple(technique for technique, _ in self._placed)

    @property
    def on_model(self) -> tuple[Technique, ...]:
        """Those that change how the model computes."""
        return tuple(technique for technique in self.techniques if technique.order in _MODEL_SIDE)

    def add(self, techniques: Iterable[Technique]) -> None:
        """Apply all of them, or none."""
        count = len(self._placed)
        try:
            for technique in sorted(techniques, key=lambda technique: technique.order):
                placing = technique
                self._placed.append((technique, technique.apply(self.training)))
                self.training.applied.append(technique.name)
        except BaseException as problem:
            self.keep(count)
            problem.technique = placing.name  # type: ignore[attr-defined]
            raise

    def keep(self, count: int) -> None:
        """Remove all but the first `count`."""
        while len(self._placed) > count:
            self._placed[-1][1]()  # stays applied if its undo raises
            self._placed.pop()
            self.training.applied.pop()

    def take_away(self) -> None:
        """Remove everything and restore the training."""
        self.keep(0)
        for undo in self._as_before:
            undo()

    @contextmanager
    def only(self, wanted: Callable[[Technique], bool]) -> Iterator[None]:
        """Change the model only by the wanted techniques inside this context; how a step is taken stays."""
        on_model = [index for index, technique in enumerate(self.techniques) if technique.order in _MODEL_SIDE]
        stepper = self.training.stepper
        for index in reversed(on_model):
            self._placed[index][1]()
        below, self.training.stepper = self.training.stepper, stepper
        try:
            with ExitStack() as stack:
                for technique in (self._placed[index][0] for index in on_model):
                    if wanted(technique):
                        stack.callback(technique.place_again(self.training))
                yield
        finally:
            self.training.stepper = below
            for index in on_model:
                technique = self._placed[index][0]
                self._placed[index] = technique, technique.place_again(self.training)
            self.training.stepper = stepper
