"""The stream on which a call runs, and what streams wait for: a captured step's notes as tasks without work.

| a note                          | with                                                      | means                            |
|---------------------------------|-----------------------------------------------------------|----------------------------------|
| `set_stream`                    | stream                                                    | this thread goes on there        |
| `record_event`, `wait_event`    | event, stream                                             | streams synchronize by events    |
| `synchronize_event`             | event                                                     | the host waits for it            |
| `synchronize_stream`            | stream                                                    | the host waits for all of it     |
| `synchronize`                   |                                                           | the host waits for the GPU       |
| `all_reduce` and other collectives | number, bytes, ranks, stride of ranks, lane            | runs on a stream of its group    |
| `wait_collective`               | number                                                    | the current stream waits for it  |
| `future_collective`             | number                                                    | the same, when backward is over  |

A collective begins when the stream it was called on has finished its earlier work, as with NCCL; a model of the links gives its
duration.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from tonnage.clock.captured import CallInStep
from tonnage.clock.timeline import EVERYTHING, HOST, Task

# Seconds of a collective by operation, total bytes, number of ranks and their stride.
CollectiveSeconds = Callable[[str, int, int, int], float]
LANES = 1000  # streams from here on belong to groups of ranks


class Streams:
    """Follows the streams of one step."""

    def __init__(self, collective_s: CollectiveSeconds | None) -> None:
        self._collective_s = collective_s
        self._current: dict[int, int] = {}  # by thread
        self._futures: list[str] = []  # not yet waited for

    def of(self, moment: CallInStep) -> int:
        """Return the stream that a call runs on."""
        return self._current.get(moment.thread, 0)

    def awaited(self, moment: CallInStep) -> tuple[str, ...]:
        """Return what a call implicitly waits for: futures of collectives, once backward is over."""
        if moment.thread or not self._futures:
            return ()
        found, self._futures = tuple(self._futures), []
        return found

    def tasks(self, moment: CallInStep, host_s: float) -> Iterator[Task]:
        """Yield the tasks of a note, after `host_s` of host work since the last task."""
        call, stream = moment.call, self.of(moment)
        numbers = [int(value) for value in call.values]
        if call.kind == "collective":
            number, size_bytes, ranks, apart, lane = numbers
            timed = self._collective_s if ranks > 1 else None
            seconds = timed(call.name, size_bytes, ranks, apart) if timed else 0.0
            ready, done = f"ready {number}", f"collective {number}"
            yield Task("", "host", host_s=host_s, stream=stream, records=ready)
            yield Task(call.name, "collective", seconds, stream=LANES + lane, awaits=(ready,), records=done)
            return
        task = Task("", "host", host_s=host_s, stream=stream)
        match call.name, numbers:
            case "set_stream", [chosen]:
                self._current[moment.thread] = chosen
            case "record_event", [event, on]:
                task = replace(task, stream=on, records=f"event {event}")
            case "wait_event", [event, on]:
                task = replace(task, stream=on, awaits=(f"event {event}",))
            case "synchronize_event", [event]:
                task = replace(task, stream=HOST, awaits=(f"event {event}",), synchronizes=True)
            case "synchronize_stream", [on]:
                task = replace(task, stream=on, synchronizes=True)
            case "synchronize", []:
                task = replace(task, stream=EVERYTHING, synchronizes=True)
            case "wait_collective", [number]:
                task = replace(task, awaits=(f"collective {number}",))
            case "future_collective", [number]:
                self._futures.append(f"collective {number}")
        yield task
