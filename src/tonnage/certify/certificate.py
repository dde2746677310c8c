"""Interpret a program for a card: whether it survives, which steps need most, and which limits would make it safe."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod

from tonnage.allocator import AllocatorSettings
from tonnage.allocator.segments import DRIVER_RESERVE_BYTES
from tonnage.certify.program import Op, ProgramPart, RecordedProgram
from tonnage.certify.replay import Lived, live_through, operations_of
from tonnage.hardware import Gpu

_UNLIMITED_BYTES = 2**43
_SHOWN = 5
_PATIENCE_S = 20
_BUCKETS = 6


@dataclass(frozen=True)
class SafeChange:
    """A change that would make it safe, and the outcome of the training with it."""

    words: str
    cost: str
    lived: Lived


@dataclass(frozen=True)
class Certificate:
    """The verdict on one card."""

    gpu: Gpu
    program: RecordedProgram
    settings: AllocatorSettings
    lived: Lived

    @property
    def survives(self) -> bool:
        return self.lived.failure is None

    @property
    def verdict(self) -> str:
        """ "safe", "tight" or "dies". Tight: it survives only because the allocator empties its cache, which is slow."""
        if not self.survives:
            return "dies"
        return "tight" if self.lived.retries else "safe"

    @property
    def part(self) -> ProgramPart:
        """The part where it dies, or else where it needs most."""
        return self.program.parts[self.lived.failure.part if self.lived.failure else self.lived.peak_part]

    @cached_property
    def in_all(self) -> Lived:
        """The outcome of the program on a card without a limit."""
        return self.lived if self.survives else live_through(_uncapped(self.program), _UNLIMITED_BYTES, self.settings)

    @cached_property
    def needed_bytes(self) -> int | None:
        """The least card memory in which it survives, within 1 %; None if finding it takes too long."""
        low = max(self.in_all.allocated_bytes) + self.lived.outside_bytes
        high = max(self.in_all.reserved_bytes) + self.lived.outside_bytes + 2 * DRIVER_RESERVE_BYTES
        program, began = _uncapped(self.program), time.monotonic()
        while high - low > high // 100:
            middle = (low + high) // 2
            survives = live_through(program, middle, self.settings).failure is None
            low, high = (low, middle) if survives else (middle, high)
            if time.monotonic() - began > _PATIENCE_S:
                return None
        return high

    @property
    def own_limit_bytes(self) -> int | None:
        """The script's own memory limit, if it is less than the card has."""
        operations = self.program.operations
        limits = [operations[at + 1] for at in operations_of(operations) if operations[at] == Op.ALLOWED]
        return limits[-1] if limits and 0 <= limits[-1] < self.gpu.memory_bytes else None

    @cached_property
    def heaviest(self) -> list[tuple[ProgramPart, int, int]]:
        """The parts that need most, one per shape, with allocated and reserved bytes."""
        rows = zip(self.program.parts, self.in_all.allocated_bytes, self.in_all.reserved_bytes, strict=False)
        found: dict[tuple[str, tuple[int, ...]], tuple[ProgramPart, int, int]] = {}
        for row in sorted(rows, key=lambda row: -row[1]):
            if row[0].kind in ("step", "evaluation", "between"):
                found.setdefault((row[0].kind, row[0].shape), row)
        return list(found.values())[:_SHOWN]

    @cached_property
    def changes(self) -> list[SafeChange]:
        """Changes that make it safe, each simulated; for a tight verdict, only those that avoid retries."""
        if self.verdict == "safe":
            return []
        found: list[SafeChange] = []
        program, settings = self.program, self.settings
        if not settings.expandable_segments:
            lived = self._live(program, replace(settings, expandable_segments=True))
            found.append(SafeChange("PYTORCH_ALLOC_CONF=expandable_segments:True", "it costs nothing", lived))
        # Pad all batches up to a few lengths that were seen.
        lengths = sorted({size for known in _donors(program).values() for size in known})
        if len(lengths) > _BUCKETS and all(len(part.shape) != 4 for part in program.parts):
            wanted = {lengths[-1] * (number + 1) // _BUCKETS for number in range(_BUCKETS)}
            buckets = sorted({min(one for one in lengths if one >= least) for least in wanted})
            changed = _resized(
                program, lambda size, known: min((one for one in buckets if one >= size and one in known), default=-1)
            )
            if changed:
                words = f"pad to {', '.join(f'{one:,}' for one in buckets)}"
                found.append(SafeChange(words, "more padding is computed", self._live(changed)))
        if not self.survives and (limit := self._limit()):
            found.append(limit)
        return [one for one in found if one.lived.failure is None and not (self.survives and one.lived.retries)]

    def _live(self, program: RecordedProgram, settings: AllocatorSettings | None = None) -> Lived:
        return live_through(program, self.gpu.memory_bytes, settings or self.settings)

    def _limit(self) -> SafeChange | None:
        """Return the largest sample size seen with which it is safe."""
        parts = [part for part in self.program.parts if part.kind == "step" and len(part.shape) in (2, 4)]
        sizes = sorted({_size(part) for part in parts})
        low, high, best = 0, len(sizes) - 2, None
        while low <= high:
            middle = (low + high) // 2
            most = sizes[middle]
            program = _resized(self.program, partial(_at_most, most), above=most)
            lived = self._live(program) if program else None
            if lived is not None and lived.failure is None:
                best, low = (most, lived), middle + 1
            else:
                high = middle - 1
        if best is None:
            return None
        most, lived = best
        longer = sum(_size(part) > most for part in parts)
        shape = next(part.shape for part in parts if _size(part) == most)
        words = f"max_length={most}" if len(shape) == 2 else f"images of at most {shape[2]} × {shape[3]}"
        return SafeChange(words, f"{longer:,} of {len(parts):,} batches {'is' if longer == 1 else 'are'} cut", lived)


def certify(program: RecordedProgram, gpu: Gpu, settings: AllocatorSettings) -> Certificate:
    """Simulate the training on a card."""
    return Certificate(gpu, program, settings, live_through(program, gpu.memory_bytes, settings))


def _uncapped(program: RecordedProgram) -> RecordedProgram:
    operations = program.operations[:]
    for at in operations_of(operations):
        if operations[at] == Op.ALLOWED:
            operations[at + 1] = -1
    return replace(program, operations=operations)


# -- the same training with other batches


def substituted(program: RecordedProgram, donor_of: Callable[[int], int | None]) -> RecordedProgram | None:
    """Return the program with the blocks of other parts in place of some; None if their operations differ.

    A part takes the sizes and templates of its donor but keeps its own block names, so that later operations drop
    the right ones.
    """
    old, operations, parts = program.operations, program.operations[:], list(program.parts)
    # Where each part takes blocks and calls templates.
    spans: list[list[int]] = [[]]
    for at in operations_of(old):
        if old[at] == Op.PART:
            spans.append([])
        elif old[at] in (Op.TAKE, Op.CALL):
            spans[-1].append(at)
    for number, ours in enumerate(spans):
        donor = donor_of(number)
        if donor is None or donor == number:
            continue
        if len(spans[donor]) != len(ours):
            return None
        for at, other in zip(ours, spans[donor], strict=True):
            if old[at] != old[other]:
                return None
            if old[at] == Op.TAKE:
                operations[at + 2] = old[other + 2]
                continue
            mine, new = (program.templates[old[one + 1]] for one in (at, other))
            if mine.name != new.name or mine.slots != new.slots:
                return None
            operations[at + 1] = new.number
        parts[number] = replace(parts[number], shape=parts[donor].shape)
    return replace(program, operations=operations, parts=parts)


def _size(part: ProgramPart) -> int:
    return prod(part.shape[1:])


def _donors(program: RecordedProgram) -> dict[tuple[int, bool], dict[int, int]]:
    """Map (samples per batch, gradients present) to the last part of each size."""
    found: dict[tuple[int, bool], dict[int, int]] = {}
    for number, part in enumerate(program.parts):
        if part.kind == "step" and len(part.shape) in (2, 4) and part.step > 2:
            found.setdefault((part.shape[0], part.micro_batch > 1), {})[_size(part)] = number
    return found


def _at_most(most: int, size: int, known: dict[int, int]) -> int:
    return max((one for one in known if one <= most), default=-1)


def _resized(
    program: RecordedProgram, size_for: Callable[[int, dict[int, int]], int], above: int = -1
) -> RecordedProgram | None:
    """Return the program with each batch larger than `above` replaced by one of the chosen size that was seen."""
    donors = _donors(program)

    def donor_of(number: int) -> int | None:
        part = program.parts[number]
        if part.kind != "step" or len(part.shape) not in (2, 4) or _size(part) <= above:
            return None
        known = donors.get((part.shape[0], part.micro_batch > 1), {})
        return known.get(size_for(_size(part), known))

    return substituted(program, donor_of)
