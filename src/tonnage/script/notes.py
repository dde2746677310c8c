"""Notes about streams, events and collectives, as the profiler records them and as a captured step stores them.

`clock.streams` interprets them; `script.profiler` and the groups of a virtual cluster write them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from tonnage.clock.captured import CallKind

Note = tuple[CallKind, str, tuple[str, ...]]  # kind, name, numbers
_STREAM_AT = {"set_stream": 0, "synchronize_stream": 0, "record_event": 1, "wait_event": 1}
_FIRST_OWN = 1_000_000  # events that autograd's engine records


class NoteReader:
    """Reads notes and replaces raw ids by small numbers.

    Streams are numbered as they appear. Events and collectives are numbered from the start of each step, so that one
    waited for in the next step has the same number there.
    """

    def __init__(self, earlier: Iterable[str] = ()) -> None:
        """Start after the notes of the previous step."""
        self._streams = {"0": 0}
        self._numbers: dict[tuple[str, str], int] = {}
        self._counts: Counter[str] = Counter()
        for words in earlier:
            self.read(words)
        self._counts.clear()

    def read(self, words: str) -> Note | None:
        """Return kind, name and numbers; None if the event or collective was never seen."""
        kind, name, *numbers = words.split()
        if name in _STREAM_AT:
            at = _STREAM_AT[name]
            numbers[at] = str(self._streams.setdefault(numbers[at], len(self._streams)))
        what = "event" if name.endswith("_event") else "collective"
        if kind == "collective" or name == "record_event":
            self._counts[what] += 1
            self._numbers[what, numbers[0]] = self._counts[what]
        if kind == "collective" or name.endswith(("_event", "_collective")):
            number = self._numbers.get((what, numbers[0]))
            if number is None:
                return None
            numbers[0] = str(number)
        return ("collective" if kind == "collective" else "stream"), name, tuple(numbers)


class BackwardStreams:
    """Tracks on which stream autograd's engine runs a node: that of the operator that created it, after earlier work.

    The engine switches streams natively, so that is not noted, and the profiler must record nodes. After backward,
    the caller's stream waits for the last one.
    """

    def __init__(self, main: int) -> None:
        """Track a step of this thread."""
        self._main = main
        self._current: dict[int, int] = {}  # by thread
        self._makers: dict[int, int] = {}  # streams of operators, by sequence number; stream 0 is left out
        self._ahead: set[int] = set()  # streams of nodes that the main thread has not waited for
        self._events = _FIRST_OWN

    @property
    def are_used(self) -> bool:
        """Whether anything has run on a stream other than the first; until then, there is nothing to track."""
        return bool(self._current)

    def noted(self, thread: int, note: Note) -> None:
        """Process a note of the script."""
        if note[1] == "set_stream":
            self._current[thread] = int(note[2][0])

    def runs(self, thread: int, made_by: int, *, is_node: bool) -> Iterator[Note]:
        """Return the notes to add before a call; `made_by` is the sequence number that links an operator to its node."""
        current = self._current.get(thread, 0)
        if not is_node:
            if made_by >= 0 and (current or made_by in self._makers):
                self._makers[made_by] = current  # the last operator with this number counts
            if thread == self._main:
                ahead, self._ahead = self._ahead - {current}, set()
                for stream in sorted(ahead):
                    yield from self._waits(current, stream)
            return
        wanted = self._makers.get(made_by, 0) if made_by >= 0 else current
        if wanted:
            self._ahead.add(wanted)
        if wanted != current:
            self._current[thread] = wanted
            yield from self._waits(wanted, current)
            yield "stream", "set_stream", (str(wanted),)

    def _waits(self, stream: int, other: int) -> Iterator[Note]:
        self._events += 1
        yield "stream", "record_event", (str(self._events), str(other))
        yield "stream", "wait_event", (str(self._events), str(stream))
