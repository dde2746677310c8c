"""The engine's thread, its inbox, and the delivery of tokens to requests that wait in asyncio.

Only its own thread touches the engine. Everything else posts to the inbox, which is emptied before each step, so an
aborted request frees its blocks before the next one. A step's tokens reach the event loop in one call.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from tonnage.errors import RequestError, TonnageError
from tonnage.serve.sampling import AnswerDelta, Sampling
from tonnage.serve.scheduler.queue import SHORTEST_RETRY_S, QueueFull
from tonnage.serve.scheduler.sequence import Sequence as EngineSequence

if TYPE_CHECKING:
    from tonnage.serve.engine import Engine, StepOutput

_Answer = TypeVar("_Answer")
_log = logging.getLogger(__name__)
# After this many failures in a row the engine reports that it is broken; it keeps trying.
_MOST_FAILURES = 3
_PAUSE_S = 0.05
# How long to wait for a step that runs when the server stops.
_LONGEST_STEP_S = 60.0
_HURRIED_S = 1.0


class Unavailable(TonnageError):
    """The server is stopping and takes no more requests."""


class Gone(Exception):
    """The client, or the server itself, no longer waits for the answer."""


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One request in the engine: a sequence per answer, and the queue of what steps produced for them."""

    prompts: Sequence[list[int]]
    sampling: Sampling
    salt: str
    arrival_s: float = field(default_factory=time.monotonic)
    sequences: list[EngineSequence] = field(default_factory=list)
    mail: asyncio.Queue[AnswerDelta | None] = field(default_factory=asyncio.Queue)
    last_s: dict[int, float] = field(default_factory=dict)  # time of an answer's latest token
    posted: int = 0  # sequences still on their way to the engine
    closed: bool = False

    async def deliveries(self) -> list[AnswerDelta]:
        """Wait for and return all that is new, at least one."""
        found = [await self.mail.get()]
        while not self.mail.empty():
            found.append(self.mail.get_nowait())
        if self.closed:
            raise Gone
        return [delta for delta in found if delta is not None]

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found in the prefix cache."""
        return sum(sequence.cached for sequence in self.sequences if sequence.sample_index == 0)


class Worker:
    """Runs the engine until it is stopped. Call `start` in the event loop of the requests."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self._max_waiting = engine.config.max_waiting
        self._inbox: deque[Callable[[], None]] = deque()
        self._mail = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tonnage-engine", daemon=True)
        self._owners: dict[EngineSequence, tuple[EngineRequest, int]] = {}
        self._posted = 0  # sequences on their way to the engine
        self._counting = threading.Lock()
        self._retry_after_s = SHORTEST_RETRY_S
        self._stopped = False
        self.open: set[EngineRequest] = set()
        self.draining = False
        self.hurried = False  # stop without waiting
        self.broken = ""

    # In the event loop.

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Close all requests and stop the engine; a step that hangs is not waited for indefinitely."""
        self.close_all()
        self._post(lambda: setattr(self, "_stopped", True))
        began_s = time.monotonic()
        while self.busy and time.monotonic() - began_s < (_HURRIED_S if self.hurried else _LONGEST_STEP_S):
            await asyncio.sleep(0.01)

    @property
    def busy(self) -> bool:
        """Whether the engine's thread is alive; after `stop`, that means it hangs."""
        return self._thread.is_alive()

    async def submit(self, prompts: Sequence[list[int]], sampling: Sampling, salt: str) -> EngineRequest:
        """Submit a request. Raises the engine's error if it is refused, leaving nothing behind."""
        asked = len(prompts) * sampling.n
        self.check_room(asked)
        ticket = EngineRequest(prompts, sampling, salt, posted=asked)
        self.open.add(ticket)
        with self._counting:
            self._posted += asked
        try:
            await self.look(lambda engine: self._admit(ticket))
        except BaseException as error:
            self._retry_after_s = getattr(error, "retry_after_s", self._retry_after_s)
            self._count_out(ticket)
            self.close(ticket)
            raise
        return ticket

    def check_room(self, asked: int) -> None:
        """Refuse at once what the queue has no room for, however long the current step takes."""
        if self.draining:
            raise Unavailable("The server is stopping.")
        if asked > self._max_waiting:
            raise RequestError(f"{asked} answers are more than may wait.", hint=f"Ask for {self._max_waiting} at most.")
        if self._posted + self.engine.scheduler.waiting.fresh + asked > self._max_waiting:
            raise QueueFull("Too many requests wait already.", retry_after_s=self._retry_after_s)

    def close(self, ticket: EngineRequest) -> None:
        """Close a request, done or aborted. Its sequences end before the next step."""
        if ticket in self.open:
            self.open.discard(ticket)
            ticket.closed = True
            ticket.mail.put_nowait(None)
            self._post(lambda: self._drop(ticket.sequences))

    def close_all(self) -> None:
        """Close every open request."""
        for ticket in list(self.open):
            self.close(ticket)

    def end(self, ticket: EngineRequest, index: int) -> None:
        """End one answer that is complete although the engine does not know it."""
        self._post(lambda: self._drop(ticket.sequences[index : index + 1]))

    async def look(self, question: "Callable[[Engine], _Answer]") -> _Answer:
        """Run a query on the engine between two steps."""
        answer: Future[_Answer] = Future()

        def give() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(question(self.engine))
                except Exception as error:
                    answer.set_exception(error)

        self._post(give)
        return await asyncio.wrap_future(answer)

    def _count_out(self, ticket: EngineRequest) -> None:
        """Stop counting it as posted: aborted, or counted by the engine from now on. In either thread."""
        with self._counting:
            self._posted -= ticket.posted
            ticket.posted = 0

    def _post(self, job: Callable[[], None]) -> None:
        self._inbox.append(job)
        self._mail.set()

    # In the engine's thread.

    def _run(self) -> None:
        failures = 0
        with self.engine.at_work():
            while not self._stopped:
                self._mail.clear()
                while self._inbox:
                    try:
                        self._inbox.popleft()()  # no name for it: it would keep the request alive
                    except Exception:
                        _log.exception("A request could not be given up")
                if not self.engine.has_work:
                    if not self._stopped:
                        self._mail.wait()
                    continue
                try:
                    self._deliver(self.engine.advance())
                    failures, self.broken = 0, ""
                except Exception as error:
                    failures += 1
                    self._fail(error, failures)

    def _admit(self, ticket: EngineRequest) -> None:
        self._count_out(ticket)
        if ticket.closed:
            return
        try:
            for prompt in ticket.prompts:
                ticket.sequences += self.engine.submit(prompt, ticket.sampling, salt=ticket.salt)
        except Exception:
            self._drop(ticket.sequences)
            raise
        self._owners |= {sequence: (ticket, index) for index, sequence in enumerate(ticket.sequences)}

    def _drop(self, sequences: Iterable[EngineSequence]) -> None:
        for sequence in sequences:
            self._owners.pop(sequence, None)
            if sequence.finish_reason is None:
                self.engine.abort(sequence)

    def _deliver(self, output: "StepOutput") -> None:
        now_s = time.monotonic()
        arrived = []
        for row, sequence in enumerate(output.sequences):
            owner = self._owners.get(sequence)
            if owner is not None:
                logprob = output.logprobs[row] if output.logprobs else None
                logprobs = [logprob] if logprob is not None else []
                # None while it continues.
                reason = sequence.finish_reason
                arrived.append((owner[0], AnswerDelta(owner[1], "", [output.tokens[row]], logprobs, reason, now_s)))
                if reason is not None:
                    del self._owners[sequence]
        # Those that finished without a token.
        for sequence in output.finished:
            owner = self._owners.pop(sequence, None)
            if owner is not None:
                arrived.append((owner[0], AnswerDelta(owner[1], finish_reason=sequence.finish_reason, time_s=now_s)))
        if arrived:
            self._loop.call_soon_threadsafe(_hand_out, arrived)

    def _fail(self, error: Exception, failures: int) -> None:
        """Report a failed step to the sequences that it ended; the others continue, unless every step fails."""
        _log.error("A step failed", exc_info=error)
        if failures >= _MOST_FAILURES:
            self.broken = f"The engine fails at every step: {type(error).__name__}."
        told = []
        for sequence, (ticket, index) in list(self._owners.items()):
            if sequence.finish_reason is not None or self.broken:
                told.append((ticket, AnswerDelta(index, finish_reason="error", time_s=time.monotonic())))
                self._drop([sequence])
        self._loop.call_soon_threadsafe(_hand_out, told)
        if not self._owners:
            self._mail.wait(_PAUSE_S)


def _hand_out(arrived: list[tuple[EngineRequest, AnswerDelta]]) -> None:
    for ticket, delta in arrived:
        ticket.mail.put_nowait(delta)
