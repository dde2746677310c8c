"""How a run ended, and the total that a run out of memory needs, as text. It only formats."""

from collections.abc import Iterator

from rich.text import Text

from tonnage.allocator.segments import UNLIMITED_BYTES
from tonnage.explain import Advice
from tonnage.explain.case import is_limited_by_itself
from tonnage.explain.total import Total
from tonnage.recording import Recording
from tonnage.recording.beyond import PATIENCE, REPEATS, TO_ITS_END
from tonnage.report.lines import wrapped
from tonnage.units import format_bytes
from tonnage.untrusted import clipped

_LONGEST_REASON = 160  # characters
_STOPPED = {
    REPEATS: "it was stopped when its steps repeated: what it would do after them is not in this",
    PATIENCE: "it was stopped after five minutes: what it would do later is not in this",
}
_WORDS = {"ok": "fits", "oom": "does not fit", "error": "script failed"}
CLIMBS = "fits so far, but climbs"


def total_lines(recording: Recording, advice: Advice, *, alone: bool = False) -> Iterator[Text]:
    """Yield "needs 33.70 GiB in all; the a100-40 holds it; batch 5 of 8 fits here", and how far the run was observed.

    For a run that was `alone` on its card and whose total is unknown, say how to find it.
    """
    total = advice.total
    if total is None:
        yield from map(Text, wrapped(_unknown(recording, alone)))
        return
    yield from (Text(line, style="bold") for line in wrapped(total_words(recording, advice)))
    place = ", ".join(filter(None, [f"step {total.step}" if total.step else "", total.phase]))
    at = f", at {total.line}" if total.line else ""
    peak = format_bytes(total.peak_allocated_bytes)
    yield from map(Text, wrapped(f"most of it in {place or 'no step'}{at}: {peak} allocated"))
    if words := caveat_words(total):
        yield from (Text(line, style="yellow") for line in wrapped(words))


def total_words(recording: Recording, advice: Advice) -> str:
    """Return it in one sentence."""
    total = advice.total
    assert total
    least = "at least " if total.ending not in (TO_ITS_END, REPEATS) else ""
    words = [f"needs {least}{format_bytes(total.needed_bytes)} in all"]
    it = "that much" if least else "it"
    if not is_limited_by_itself(recording):
        words.append(f"the {advice.larger_card} holds {it}" if advice.larger_card else f"no known card holds {it}")
    if total.batch:
        words.append(f"batch {total.batch} of {total.of_batch} fits here")
    return "; ".join(words)


def caveat_words(total: Total) -> str:
    """Say what part of the run is not in its total; empty if it ran to its end."""
    if total.ending == TO_ITS_END:
        return ""
    return _STOPPED.get(total.ending) or f"without the limit it failed later: {clipped(total.ending, _LONGEST_REASON)}"


def larger_card_words(recording: Recording, card: str | None) -> str:
    """Say whether the next larger GPU holds all of the run, or as much of it as is known."""
    if card is None:
        return "a larger card: no known card is large enough"
    return f"a larger card: the {card} " + ("holds the whole run" if recording.whole else "gets past that line")


def _unknown(recording: Recording, alone: bool) -> str:
    """Return what to say if nothing is known after the line that failed."""
    oom = recording.oom
    if oom is None or recording.whole:
        return ""
    if oom.requested_bytes > UNLIMITED_BYTES:
        return "no card will ever hold that one tensor: look at its extents"
    is_known = not alone or recording.header.source != "virtual"
    return "" if is_known else "what it needs in all is not known: tonnage run --gpu all tells"


def verdict_words(outcome: str, climbs: bool = False) -> str:
    """Return the verdict; a run that completed but whose memory climbs has not shown that it fits."""
    return CLIMBS if climbs and outcome == "ok" else _WORDS[outcome]
