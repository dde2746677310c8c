"""Possible causes by the wording, numbers and place of an error, each with its certainty and evidence.

`data/words.toml` has the messages of other programs: who prints them, and what they mean. "certain": the text itself
proves it. "likely": it explains what was missing, and nothing in the text contradicts it. "possible": the text allows
it. No sum is used that rounding could overturn.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from tonnage.explain.text.devices import unified_device
from tonnage.explain.text.log import Episode
from tonnage.explain.text.numbers import MessageNumbers
from tonnage.explain.text.places import FailurePlace, steps_of
from tonnage.explain.text.tables import Certainty, cause_texts, messages
from tonnage.hardware import all_gpus
from tonnage.units import GIB, format_bytes, percent


@dataclass(frozen=True, slots=True)
class Suspect:
    """A cause, its certainty, the evidence in a sentence, what remains open, and what to do."""

    cause: str
    certainty: Certainty
    sentence: str
    unproved: str = ""
    steps: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The cause in words."""
        return cause_texts()[self.cause].title


class Said(NamedTuple):
    """One entry that matches a text, and its cause with the text's own figures filled in."""

    id: str
    speaker: str
    is_alone: bool
    suspect: Suspect
    phase: str
    figures: dict[str, str]


def said_in(episode: Episode) -> list[Said]:
    """Return every entry that matches an episode, in the order of the file: the more specific first."""
    found = []
    for row in messages():
        if row.whole_line:
            matches = (row.pattern.fullmatch(line.strip()) for line in episode.lines)
            match = next(filter(None, matches), None)
        else:
            match = row.pattern.search(episode.text)
        if match is None:
            continue
        figures = {name: value[:40] for name, value in match.groupdict().items() if value}
        for name, value in match.groupdict().items():
            if value and name.endswith("_count") and (digits := value.replace(",", "")).isdigit():
                number = int(digits[:20])
                size = f"{number / GIB:.2f} GiB ({number:,} bytes)"
                figures[name] = size if name.startswith("bytes") else f"{number:,}"
        steps = tuple(filter(None, (_filled(step, figures) for step in row.steps)))
        says = _filled(row.says, figures) or row.says_plainly
        suspect = Suspect(row.cause, row.certainty, says, row.unproved, steps)
        found.append(Said(row.id, row.speaker, row.alone, suspect, row.phase, figures))
    return found


def _filled(words: str, figures: dict[str, str]) -> str:
    """Fill figures into a sentence; empty if one of them is unknown."""
    try:
        return words.format_map(figures)
    except KeyError:
        return ""


_ORDER = {"certain": 0, "likely": 1, "possible": 2}
# What a message says if it knows nothing more precise: of equal certainty the place comes first.
_UNSPECIFIC = ("capacity", "no-numbers")
# A context and its libraries; a desktop beside them on a small card.
_CONTEXT_BYTES = GIB
# Shares of a card, or of reserved memory, above which something counts as most, much or some.
_MOST, _MUCH, _SOME = 0.5, 0.25, 0.1
# Steps leave free blocks behind; below this share there are none.
_LOADING = 0.005
_SERIES = (
    re.compile(r"\bmemory: (\d{3,6})\b"),
    re.compile(r"\bmax_mem: (\d{3,6})M\b"),
    re.compile(r"^\s*\d+/\d+\s+([0-9.]+)G\s"),
    re.compile(r"\bMA ([0-9.]+) GB"),
)
_CLIMB, _LEAST_SAMPLES = 1.2, 5
# The group of a message's pattern that is the size of the device in GiB.
_TOTAL = "total_size"


def suspects_of(
    numbers: MessageNumbers | None,
    said: Sequence[Said],
    place: FailurePlace,
    lines: Sequence[str],
    device: str,
) -> list[Suspect]:
    """Return all suspects, likeliest first, one per cause; `device` names one with the host's memory, if it is such."""
    told = [entry.suspect for entry in said if numbers is None or not entry.is_alone]
    if device:
        told = [_shared(suspect, device) for suspect in told]
    found = [suspect for suspect in told if suspect.cause not in _UNSPECIFIC]
    if numbers is not None:
        for rule in (_limit, _one_tensor, _fragmentation, _outside):
            found += rule(numbers, place)
        found += _listed_processes(numbers)
        if device:
            found += _held_by_host(numbers, device)
        else:
            found += (*_unlisted_processes(numbers), *_refused(numbers, place))
    elif any(entry.id == "driver" for entry in said):
        # The driver's own error in a traceback: PyTorch's allocator would have given numbers.
        if place.phase in ("forward", "backward", "optimizer", "generation"):
            sentence = f"the driver refused in the middle of the program's work ({place.phase}), not at its start"
            found.append(_suspect("capacity", "likely", sentence))
        elif place.phase == "loading":
            sentence = "the driver refused before anything had been computed: the card was full when the program came"
            found.append(_suspect("other-process", "likely", f"{sentence}, or nearly"))
    found += (*_of_place(numbers, place), *_of_series(lines))
    found += [suspect for suspect in told if suspect.cause in _UNSPECIFIC]
    if numbers is not None:
        found += (*_loading(numbers, place), *_capacity(numbers))
    # The first of each cause among the most certain.
    by_cause: dict[str, Suspect] = {}
    for suspect in sorted(found, key=lambda suspect: _ORDER[suspect.certainty]):
        by_cause.setdefault(suspect.cause, suspect)
    return list(by_cause.values())


def device_of(episode: Episode, numbers: MessageNumbers | None, said: Sequence[Said]) -> str:
    """Return what the device is called if its GPU uses the host's memory, else an empty text."""
    stated = (entry.figures[_TOTAL] for entry in said if _TOTAL in entry.figures)
    total_bytes = next((int(float(gib) * GIB) for gib in stated), None)
    if numbers is not None:
        total_bytes = numbers.total
    return unified_device(episode.text, total_bytes)


def _shared(suspect: Suspect, device: str) -> Suspect:
    """Return the host as the one that holds the rest where GPU and host share one memory."""
    if suspect.cause != "other-process":
        return suspect
    sentence = f"{suspect.sentence}; {_of_unified(device)}, which the host's programs and page cache fill too"
    return _suspect("unified-memory", suspect.certainty, sentence)


def _of_unified(device: str) -> str:
    return f"GPU and host share one memory on {device}"


def _suspect(cause: str, certainty: Certainty, sentence: str, steps: Sequence[str] = ()) -> Suspect:
    row = cause_texts()[cause]
    return Suspect(cause, certainty, sentence, row.unproved, tuple(steps) or row.steps)


def _limit(numbers: MessageNumbers, _: FailurePlace) -> Iterator[Suspect]:
    """Yield a limit below the card's size that refused the request although the card had room."""
    allowed, own = numbers.allowed, numbers.reserved if numbers.reserved is not None else numbers.allocated
    if allowed is None or own is None:
        return
    held, asked, limit = map(format_bytes, (own, numbers.asked, allowed))
    if numbers.wording == "PyTorch on MPS":
        beside = f"{held} of tensors and {format_bytes(numbers.elsewhere or 0)} beside them, with {asked} more"
        sentence = f"{beside}, pass the {limit} that PyTorch allows itself on this Mac"
        yield _suspect("capacity", "likely", sentence, cause_texts()["mps-limit"].steps)
        return
    passes = own + numbers.asked > allowed - numbers.slack("allocated", "unallocated", "asked", "allowed")
    if passes and numbers.free is not None and numbers.free >= numbers.asked + numbers.slack("free", "asked"):
        sentence = f"{held} reserved and {asked} more pass the {limit} that the process allows itself"
        yield _suspect("own-limit", "certain", f"{sentence}, while {format_bytes(numbers.free)} of the card were free")


def _one_tensor(numbers: MessageNumbers, place: FailurePlace) -> Iterator[Suspect]:
    """Yield a single request that is larger than the card, or than half of it."""
    total = numbers.total or numbers.allowed
    if total is None:  # judged by existing cards
        cards = [gpu.memory_bytes for gpu in all_gpus()]
        smaller = sum(memory < numbers.asked for memory in cards) / len(cards)
        if smaller > 1 - _SOME:
            words = "no card holds" if smaller == 1 else "hardly a card holds"
            sentence = f"{format_bytes(numbers.asked)} in one request is more than {words}"
            yield _suspect("one-tensor", "certain" if smaller == 1 else "likely", sentence)
        return
    side = math.isqrt(numbers.asked // 2)
    size = f"{format_bytes(numbers.asked)} in one request ({side:,} × {side:,} numbers of 16 bits)"
    if numbers.asked > total + numbers.slack("asked", "total"):
        # If the line is known, its operation is the cause, and this is evidence.
        sentence = f"{size} is more than all {format_bytes(total)} of the card: it cannot fit, whatever is freed"
        yield _suspect("one-tensor", "possible" if place.operator else "certain", sentence)
    elif numbers.asked > _MOST * total and numbers.asked > (numbers.allocated or 0):
        sentence = f"{size} is more than half of the card, and more than all other tensors together"
        yield _suspect("one-tensor", "possible" if place.operator else "likely", sentence)


def _listed_processes(numbers: MessageNumbers) -> Iterator[Suspect]:
    """Yield what other processes hold, from the message's list."""
    if numbers.total is None or numbers.free is None or numbers.own is None:
        return
    short = numbers.short or 0
    if numbers.others:
        held = sum(numbers.others)
        share = held / numbers.total
        if held < short or share < _SOME:
            return
        certainty: Certainty = "certain" if share >= _MOST else "likely" if share >= _MUCH else "possible"
        count = f"{len(numbers.others)} other process{'es' if len(numbers.others) > 1 else ''}"
        sentence = f"{count} on this card held {format_bytes(held)} of its {format_bytes(numbers.total)}"
        yield _suspect("other-process", certainty, f"{sentence}; {format_bytes(short)} were missing")


def _unlisted_processes(numbers: MessageNumbers) -> Iterator[Suspect]:
    """Yield what is neither free nor this process's where the message lists no other processes."""
    if numbers.total is None or numbers.free is None or numbers.own is None or numbers.others:
        return
    short = numbers.short or 0
    left = (numbers.unexplained or 0) - numbers.slack("total", "free", "process", "allocated", "unallocated")
    beyond = left - (0 if numbers.process is not None else _CONTEXT_BYTES)
    if beyond < short or beyond < _MUCH * numbers.total:
        return
    own, or_own = "PyTorch, here,", ", or to this process outside of PyTorch"
    if numbers.process is not None:
        own, or_own = "this process", ""
    total, ours, free, rest = map(format_bytes, (numbers.total, numbers.own, numbers.free, left))
    sentence = f"of {total}, {own} held {ours} and {free} were free: {rest} belong to others{or_own}"
    yield _suspect("other-process", "likely", sentence)


def _fragmentation(numbers: MessageNumbers, _: FailurePlace) -> Iterator[Suspect]:
    """Yield fragmentation: enough reserved memory was unused, but no piece was large enough."""
    unused, reserved = numbers.unallocated, numbers.reserved
    if not unused or not reserved or (numbers.total and numbers.asked > numbers.total):
        return
    words = f"{format_bytes(unused)} lay unused in the {format_bytes(reserved)} that PyTorch had reserved"
    share = unused / reserved
    slack = numbers.slack("unallocated", "free", "asked")
    if unused >= numbers.asked + numbers.slack("unallocated", "asked"):
        certainty: Certainty = "likely" if share >= _MUCH else "possible"
        times = unused // max(1, numbers.asked)
        enough = f"{times:,} times" if times > 1 else "more than"
        yield _suspect("fragmentation", certainty, f"{words}, {enough} what was asked for, but not in one piece")
    elif numbers.free is not None and unused + numbers.free >= numbers.asked + slack and share >= _SOME:
        with_free = f"{words}: with the {format_bytes(numbers.free)} that were free, enough, had it been one piece"
        yield _suspect("fragmentation", "possible", with_free)


def _held_by_host(numbers: MessageNumbers, device: str) -> Iterator[Suspect]:
    """Yield the host's part where GPU and host share one memory: what is neither free nor this process's."""
    if numbers.total is None or numbers.free is None or numbers.own is None:
        return
    rest = (numbers.unexplained or 0) - sum(numbers.others)
    rest -= numbers.slack("total", "free", "process", "allocated", "unallocated", "others")
    own, free, asked = map(format_bytes, (numbers.own, numbers.free, numbers.asked))
    if rest >= (numbers.short or 0) and rest >= _SOME * numbers.total:
        certainty: Certainty = "likely" if rest >= _MUCH * numbers.total else "possible"
        held = f"the GPU's part of this process is {own}, {free} were free, and the host holds the other {format_bytes(rest)}"
        sentence = f"{_of_unified(device)}: {held} (programs, the page cache, a second copy of the weights)"
        yield _suspect("unified-memory", certainty, sentence)
    elif numbers.allowed is None and numbers.free >= numbers.asked + numbers.slack("free", "asked"):
        counted = f"{free} counted as free when {asked} were refused"
        sentence = f"{_of_unified(device)}: {counted}, since the system keeps a part of what is free"
        yield _suspect("unified-memory", "possible", sentence)


def _refused(numbers: MessageNumbers, place: FailurePlace) -> Iterator[Suspect]:
    """Yield a request that was refused although the card had room."""
    if numbers.free is None or numbers.asked <= 0 or numbers.allowed is not None:
        return
    if numbers.free >= numbers.asked + numbers.slack("free", "asked"):
        free, asked = format_bytes(numbers.free), format_bytes(numbers.asked)
        sentence = (
            f"{free} of the card were free when {asked} were refused: it was not the card's memory that was short"
        )
        row = cause_texts()["refused"]
        steps = row.steps if place.system == "POSIX" else row.windows_steps + row.steps
        yield _suspect("refused", "likely", sentence, steps)


def _outside(numbers: MessageNumbers, _: FailurePlace) -> Iterator[Suspect]:
    """Yield what this process holds outside PyTorch, if it exceeds a context."""
    if numbers.process is None or numbers.reserved is None or numbers.total is None or numbers.is_process_inferred:
        return
    outside = numbers.process - numbers.reserved - numbers.slack("process", "allocated", "unallocated")
    if outside < max(2 * _CONTEXT_BYTES, _SOME * numbers.total) or outside < (numbers.short or 0):
        return
    share = percent(outside / numbers.total, 0)
    sentence = f"this process held {format_bytes(outside)} outside of PyTorch's allocator, {share} of the card"
    yield _suspect("outside", "likely" if outside >= _MUCH * numbers.total else "possible", sentence)


def _of_place(numbers: MessageNumbers | None, place: FailurePlace) -> Iterator[Suspect]:
    """Yield what the failing line was doing; evaluation, if training steps had succeeded before."""
    operator = place.operator
    frame = place.own_frame
    at = f" ({frame.file.rsplit('/', 1)[-1]}:{frame.line}, {frame.function})" if frame and frame.line else ""
    is_evaluated = place.phase == "evaluation" and place.is_training
    if is_evaluated and (operator is None or operator.cause not in ("weights", "checkpoint", "evaluation")):
        yield _suspect("evaluation", "likely", f"it died in evaluation{at}, not in a step of its training")
    if operator is None:
        return
    total = (numbers.total or numbers.allowed) if numbers else None
    share = numbers.asked / total if numbers and total else 0.0
    certainty: Certainty = "likely" if share >= operator.least_share else "possible"
    asking = f", asking for {format_bytes(numbers.asked)}" if numbers else ""
    sentence = f"it died in {operator.name}{at}{asking}: {operator.says}"
    yield _suspect(operator.cause, certainty, sentence, operator.steps)


def _of_series(lines: Sequence[str]) -> Iterator[Suspect]:
    """Yield memory that a log prints repeatedly and that only climbs."""
    for pattern in _SERIES:
        values = [float(match[1]) for line in lines if (match := pattern.search(line))]
        if len(values) < _LEAST_SAMPLES or min(values) <= 0:
            continue
        rises = sum(later >= earlier for earlier, later in pairwise(values))
        later_half = values[len(values) // 2 :]
        if rises == len(values) - 1 and values[-1] >= _CLIMB * values[0] and later_half[-1] > later_half[0]:
            sentence = f"the memory that the log prints only climbs, from {values[0]:g} to {values[-1]:g} in {len(values)} lines"
            yield _suspect("leak", "likely", sentence)
            return


def _loading(numbers: MessageNumbers, place: FailurePlace) -> Iterator[Suspect]:
    """Yield loading: if no reserved memory is free, nothing was freed yet, so no step has run."""
    reserved, unused, total = numbers.reserved, numbers.unallocated, numbers.total
    if reserved is None or unused is None or total is None or place.phase not in ("", "loading"):
        return
    most_unused = _LOADING * reserved
    if numbers.slack("unallocated") < most_unused and unused <= most_unused and reserved >= _MUCH * total:
        rest = f"all but {format_bytes(unused)} of the {format_bytes(reserved)} that PyTorch had reserved"
        sentence = f"{rest} were in tensors: nothing had been freed yet, as while weights load"
        yield _suspect("weights", "likely", sentence, steps_of("weights"))


def _capacity(numbers: MessageNumbers) -> Iterator[Suspect]:
    """Yield lack of capacity: this process alone fills the card."""
    own, total = numbers.own, numbers.total
    asked = f"{format_bytes(numbers.asked)} more were asked for"
    if own is None or total is None:
        yield _suspect("capacity", "possible", f"{asked}; the text does not say what was there")
        return
    short = f", {format_bytes(numbers.short)} more than were free" if numbers.short else ""
    sentence = f"this process held {format_bytes(own)} of the card's {format_bytes(total)}, and {asked}{short}"
    yield _suspect("capacity", "likely" if own >= _MUCH * total else "possible", sentence)
