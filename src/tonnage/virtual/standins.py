"""Placeholder values for what a script reads from a GPU that computes nothing; they are counted and reported.

They keep the script on its normal path: a loss is finite and falls, a gradient's norm is about 1, no flag is set, and a
flag that only decides whether to raise gets the answer that does not. A loop that waits for a flag would never end, so
a line that has read the same flag very often gets the other answer; a loop that waits for a number is stopped.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType

from tonnage.recording.records import Dependence, Note, NoteKind, StandIn
from tonnage.script.assume import assumed_value
from tonnage.script.code_paths import answer_that_enters, answer_without_error
from tonnage.script.running import OWN_FOLDER, RUNNER
from tonnage.script.value_flow import Cause, Flow, Places, Read
from tonnage.virtual.going_on import Stopped

PATIENCE = 20_000
# A number read repeatedly at the same line falls towards 1 from this much above it, so that code that waits until a
# loss no longer changes, such as L-BFGS, continues. It never falls below 1, so that sizes computed from it stay
# valid.
FALL = 1e-3
_FLOATS = {"Float", "Double", "Half", "BFloat16"}
# A loop that only unknown values can end is stopped if its rounds allocate the same for this long, or after very long.
_ALIKE_ROUNDS = 3
_ALIKE_S = 20
_LONGEST_S = 300
_LOOKS = 16  # reads between two looks at the clock
_MOST_PLACES = 4096
_MOST_FOLLOWED = 120
_MOST_DECIDING = 40
_DEEPEST = 40
# Code that a program generates may be unlike any source: nothing is known of it then, and the run goes on.
_ODD_CODE = (RecursionError, SyntaxError, ValueError, LookupError, AttributeError, TypeError)
_LIBRARY_FRAMES = ("torch/_ops.py", "torch/library.py", "torch/_library/")


_ENDLESS = "stopped in a loop that only a value which a virtual GPU does not have could end"


class EndlessLoop(Stopped):
    """Ends a script in a loop that only values which are not known could end."""


@dataclass
class _Place:
    """One stack of instructions under which values are read."""

    read: Read
    what: str
    dtype: str
    line: str
    value: float = 0.0
    count: int = 0
    began_s: float = field(default_factory=lambda: time.monotonic())
    answer: bool | None = None  # of a flag that only decides whether to raise
    is_asked: bool = False
    enters: bool = False  # whether a set flag is what goes into the body of a `while`
    order: int = 0  # of the last read
    is_endless: bool | None = None
    rounds: list[tuple[int, int]] = field(default_factory=list)  # blocks made and bytes held, at the last looks
    seen_blocks: int = 0


class StandIns:
    """Counts values that were read, by kind and line, and remembers where."""

    def __init__(self, line: Callable[[], str], held: Callable[[], tuple[int, int]] = lambda: (0, 0)) -> None:
        """Ask `line` for the script's current line, and `held` for the number of blocks made and the bytes held."""
        self._line = line
        self._held = held
        self._reads: Counter[tuple[str, str, str]] = Counter()
        self._values: dict[tuple[str, str, str], float] = {}
        self._notes: Counter[tuple[NoteKind, str, str]] = Counter()
        self._places: dict[tuple[int | str, ...], _Place] = {}
        self._order = 0
        self.dependence: Dependence | None = None

    def read(self, dtype: str, count: int, guess: float | None = None) -> float:
        """Return a value for a read (`count` elements of a tensor, or -1 for one scalar), and count it.

        A `guess` is a value that was assumed for the tensor: it is returned if nothing speaks against it, and not
        counted.
        """
        if guess is not None and count >= 0:
            self.remember(dtype, count)
            return guess
        line = self._line()
        what = "scalar" if count < 0 else f"tensor of {count:,}"
        is_flag = dtype == "Bool"
        place, frames = self._place(what, dtype, line)
        before = self._reads[what, dtype, line] if guess is None else place.count
        place.count += 1
        value = assumed_value(line, is_flag=is_flag)
        if value is None and is_flag and count < 0:
            if not place.is_asked:
                place.is_asked = True
                with suppress(*_ODD_CODE):
                    place.answer = answer_without_error(frames)
                    place.enters = len(frames) > 0 and answer_that_enters(frames[0]) is True
            value = None if place.answer is None else float(place.answer)
            if place.enters and guess is None:
                value = 1.0
        if value is None:
            value = self._usual(dtype, count, before, guess)
            if count < 0 and self._waits_forever(place):
                if not is_flag:
                    self._end(place)
                value = float(not value)
                place.began_s = time.monotonic()
        if guess is None:
            self._reads[what, dtype, line] += 1
            self._values[what, dtype, line] = value
        place.value = value
        return value

    def _usual(self, dtype: str, count: int, before: int, guess: float | None) -> float:
        if guess is not None:
            is_late = dtype == "Bool" and before % PATIENCE == PATIENCE - 1
            return float(not guess) if is_late else guess
        if count >= 0:
            return 1.0
        if dtype in _FLOATS:
            return 1.0 + FALL / (1 + before)
        return float(before % PATIENCE == PATIENCE - 1)

    def remember(self, dtype: str, count: int) -> None:
        """Remember where a tensor of assumed values was read, which is not counted."""
        place, _ = self._place(f"tensor of {count:,}", dtype, self._line())
        place.count += 1
        place.value = 1.0

    def size(self, operator: str, count: int) -> None:
        """Remember where a size was chosen that depends on values which are not known."""
        place, _ = self._place(f"size of {operator}", "Long", self._line(), "size")
        place.value = count
        place.count += 1

    def start_again(self) -> None:
        """Forget where values were read: what comes now is another program."""
        self._places.clear()
        self.dependence = None

    # Where values are read

    def _place(self, what: str, dtype: str, line: str, kind: str = "") -> tuple[_Place, list[FrameType]]:
        frames = script_frames(sys._getframe(1))
        key: list[int | str] = [what]
        for frame in frames:
            key.append(id(frame.f_code))
            key.append(frame.f_lasti)
        place = self._places.get(tuple(key))
        if place is None:
            places: Places = tuple((frame.f_code, frame.f_lasti) for frame in frames)
            place = _Place(Read(places, kind or _kind_of(what, dtype)), what, dtype, line)
            if len(self._places) < _MOST_PLACES:
                self._places[tuple(key)] = place
        self._order += 1
        place.order = self._order
        return place, frames

    def _waits_forever(self, place: _Place) -> bool:
        """Whether this read keeps a loop going that has run long enough, and that only unknown values can end."""
        if place.count % _LOOKS or place.is_endless is False:
            return False
        gone_on_s = time.monotonic() - place.began_s
        if place.count < PATIENCE and gone_on_s < _ALIKE_S / 2:
            return False
        blocks, held_bytes = self._held()
        place.rounds.append((blocks - place.seen_blocks, held_bytes))
        place.seen_blocks = blocks
        del place.rounds[:-_ALIKE_ROUNDS]
        is_alike = len(place.rounds) == _ALIKE_ROUNDS and len(set(place.rounds)) == 1
        is_long = place.count >= PATIENCE or gone_on_s > _LONGEST_S or (is_alike and gone_on_s > _ALIKE_S)
        if not is_long:
            return False
        if place.is_endless is None:
            place.is_endless = False
            with suppress(*_ODD_CODE):
                place.is_endless = self._flow().is_endless(place.read) is not None
        return place.is_endless

    def _end(self, place: _Place) -> None:
        """Stop the script in a loop that waits for this value."""
        file, line = self._flow().is_endless(place.read) or ("", 0)
        self.dependence = self._dependence(Cause(file, line, "loop", place.read), "")
        raise EndlessLoop(_ENDLESS)

    def _flow(self) -> Flow:
        """Return where the values went, the last read first known: later ones of the same place count."""
        places = sorted(self._places.values(), key=lambda place: place.order)
        return Flow([place.read for place in places[-_MOST_FOLLOWED:]])

    # What depends on them

    def explain(self, error: BaseException) -> str:
        """Return what an error depends on that was read from the card; "" if on nothing."""
        if self.dependence is None and self._places:
            cause = None
            with suppress(*_ODD_CODE):
                cause = self._flow().cause_of(error, (OWN_FOLDER,))
            if cause is not None:
                self.dependence = self._dependence(cause, f"{type(error).__name__}: {error}")
        return self.dependence.sentence if self.dependence else ""

    def told_of(self, error: BaseException) -> str:
        """Return what an error depends on and what to do, for those who catch it; "" if on nothing."""
        sentence = self.explain(error)
        return f"It {sentence}.\n{self.dependence.advice}" if sentence and self.dependence else ""

    def _dependence(self, cause: Cause, error: str) -> Dependence:
        place = next(place for place in self._places.values() if place.read == cause.read)
        return Dependence(
            how=cause.how,
            line=place_name(cause.file, cause.line),
            error=error,
            read_line=place.line,
            what=described(place.what, place.dtype),
            count=place.count,
            value=shown_value(place.value, place.dtype),
        )

    # What is reported

    def unmodelled(self, operator: str, why: str) -> None:
        """Note an operator that is not modelled."""
        self._notes["not_modelled", operator, why.split("\n")[0][:160]] += 1

    def assume(self, operator: str, text: str) -> None:
        """Note an assumption about data."""
        self._notes["assumption", operator, text] += 1

    def records(self) -> list[StandIn]:
        """Return one row for each kind and line, most frequent first."""
        decided = self._decided()
        rows = []
        for key, count in self._reads.most_common():
            what, dtype, line = key
            value = shown_value(self._values[key], dtype)
            rows.append(StandIn(described(what, dtype), line, count, value, decided.get(key, "")))
        return rows

    def _decided(self) -> dict[tuple[str, str, str], str]:
        """Return the tests that were decided by what was read, by kind and line."""
        found: dict[tuple[str, str, str], str] = {}
        places = sorted(self._places.values(), key=lambda place: -place.count)
        for place in places[:_MOST_DECIDING]:
            key = place.what, place.dtype, place.line
            if key in found or key not in self._reads:
                continue
            decides = None
            with suppress(*_ODD_CODE):
                decides = Flow([place.read], is_quick=True).decides(place.read)
            if decides is not None:
                statement, file, line = decides
                found[key] = f"{statement} at {place_name(file, line)}"
        return found

    def notes(self) -> list[Note]:
        """Return what is not modelled and what was assumed."""
        return [Note(kind, operator, count, text) for (kind, operator, text), count in self._notes.most_common()]


_counts: dict[str, bool] = {}  # by file: whether its frames are the script's or a library's


def script_frames(frame: FrameType | None) -> list[FrameType]:
    """Return the frames that a script runs, innermost first, without those of Tonnage and of torch's dispatcher."""
    frames: list[FrameType] = []
    while frame is not None and len(frames) < _DEEPEST:
        file = frame.f_code.co_filename
        if file == RUNNER:
            break
        counts = _counts.get(file)
        if counts is None:
            is_library = any(part in file for part in _LIBRARY_FRAMES)
            counts = _counts[file] = not (is_library or file.startswith(OWN_FOLDER))
        if counts:
            frames.append(frame)
        frame = frame.f_back
    return frames


def _kind_of(what: str, dtype: str) -> str:
    if what != "scalar":
        return "values"
    if dtype == "Bool":
        return "flag"
    return "float" if dtype in _FLOATS else "int"


def described(what: str, dtype: str) -> str:
    """Return "scalar bool" or "tensor of 8 float"; a size has no type."""
    return what if what.startswith("size of") else f"{what} {dtype.lower()}"


def shown_value(value: float, dtype: str) -> str:
    """Return a placeholder as a person writes it."""
    if dtype == "Bool":
        return str(bool(value))
    return f"{round(value, 2):g}"


def place_name(file: str, line: int) -> str:
    """Return "train.py:88" for a file and a line."""
    return f"{file.rpartition('/')[2]}:{line}"
