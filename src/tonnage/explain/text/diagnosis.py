"""The diagnosis of a text: the likeliest cause, what the numbers prove and leave open, and framework-specific advice."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tonnage.errors import RequestError
from tonnage.explain.text.log import Episode, find_episode
from tonnage.explain.text.numbers import MessageNumbers, read_numbers
from tonnage.explain.text.places import FailurePlace, framework_of, place_of
from tonnage.explain.text.suspects import Said, Suspect, device_of, said_in, suspects_of
from tonnage.explain.text.tables import Framework
from tonnage.units import format_bytes

_MOST_STEPS = 5
_WHERE = "Paste the whole error: the message with its numbers, and the traceback above it."


@dataclass(frozen=True, slots=True)
class TextDiagnosis:
    """The causes, likeliest first, what was read, what it proves, and what to do."""

    causes: tuple[Suspect, ...]
    numbers: MessageNumbers | None
    said: tuple[Said, ...]
    place: FailurePlace
    framework: str
    proves: tuple[str, ...]
    unproved: tuple[str, ...]
    steps: tuple[str, ...]
    episode: Episode

    @property
    def first(self) -> Suspect:
        """The likeliest cause."""
        return self.causes[0]

    @property
    def speaker(self) -> str:
        """The program that wrote the message."""
        return self.numbers.wording if self.numbers else self.said[0].speaker


def explain_text(lines: Iterable[str]) -> TextDiagnosis:
    """Find where and why memory ran out in a text; raises RequestError if it says nothing of the kind."""
    seen = 0

    def counted() -> Iterator[str]:
        nonlocal seen
        for line in lines:
            seen += bool(line.strip())
            yield line

    episode = find_episode(counted(), lambda found: bool(said_in(found)) or read_numbers(found.text) is not None)
    if episode is None:
        known = "Nothing in the text is a known message about memory that ran out."
        raise RequestError(known if seen else "There is nothing in the text.", hint=_WHERE)
    numbers, said, place = read_numbers(episode.text), tuple(said_in(episode)), place_of(episode.lines)
    device = device_of(episode, numbers, said)
    causes = suspects_of(numbers, said, place, episode.lines, device)
    framework = framework_of(episode.text)
    if not place.phase:
        place = replace(place, phase=next((entry.phase for entry in said if entry.phase), ""))
    unproved = [causes[0].unproved] if causes[0].unproved else []
    if place.steps and place.steps > 1:
        count = f"the log counts to {place.steps:,} before it died"
        unproved.append(f"whether it grew: {count}, so a longer batch, a leak or evaluation may be behind it")
    elif numbers is not None and not place.frames:
        unproved.append("what the program was doing: there is no traceback in the text")
    if numbers is not None and numbers.process is None and numbers.wording.startswith("PyTorch 1"):
        unproved.append("who else is on the card: messages before PyTorch 2.1 do not list processes")
    return TextDiagnosis(
        causes=tuple(causes), numbers=numbers, said=said, place=place, framework=framework.name, episode=episode,
        proves=tuple(_proves(numbers, device)) if numbers else (), unproved=tuple(unproved),
        steps=_steps(causes, framework),
    )  # fmt: skip


def _proves(numbers: MessageNumbers, unified: str) -> Iterator[str]:
    """Yield what follows from the numbers alone, whatever the cause; `unified` names a device with the host's memory."""
    asked, total, free, unused = numbers.asked, numbers.total, numbers.free, numbers.unallocated
    if total is not None and (numbers.own or 0) > total + numbers.slack("total", "process", "allocated", "unallocated"):
        yield "more is held than the card has: Windows lends it the host's memory, slowly"
    slack = numbers.slack("asked", "free")
    if total is not None and asked > total + numbers.slack("asked", "total"):
        yield "the request is larger than the card: no setting makes it fit"
    elif free is not None and asked > free + slack:
        yield f"the card had {format_bytes(asked - free)} too little free for this one request"
    elif free is not None and asked < free - slack and unified:
        yield f"{format_bytes(free - asked)} more counted as free than was asked for, but the host has the first claim on it"
    elif free is not None and asked < free - slack:
        yield f"the card had {format_bytes(free - asked)} more free than was asked for"
    if unused is not None and unused + (free or 0) < asked - numbers.slack("asked", "unallocated", "free"):
        yield "it was not fragmentation: what PyTorch held unused and what was free are together less than the request"
    elif unused is not None and unused > asked + numbers.slack("asked", "unallocated"):
        yield f"PyTorch held {format_bytes(unused)} unused, in pieces that this request could not use"
    held, short = sum(numbers.others), numbers.short or 0
    slack = numbers.slack("others", "asked", "free")
    if numbers.others and held + slack < short:
        yield "it was not other processes alone: what they held is less than what was missing"
    elif short and held > short + slack:
        yield f"without the {format_bytes(held)} of other processes this request would have fitted"
    if numbers.is_process_inferred:
        yield "the process that the message lists is this one, by its size: in a container it does not know itself"


def _steps(causes: list[Suspect], framework: Framework) -> tuple[str, ...]:
    """Return advice in the framework's terms: for the first cause, and if short, the next of equal certainty."""
    chosen: dict[str, None] = {}
    for suspect in [other for other in causes[:3] if other.certainty == causes[0].certainty]:
        if len(chosen) > 1:
            break
        # Serving and image generation have no gradients to accumulate.
        for step in framework.advice.get(suspect.cause, suspect.steps):
            for name, value in framework.words.items():
                step = step.replace(f"{{{name}}}", value)
            chosen.setdefault(step)
    return tuple(chosen)[:_MOST_STEPS]
