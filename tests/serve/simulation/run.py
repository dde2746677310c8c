"""One run: an engine's loop, one step ahead of the device, with faults; then quiet, until the last sequence is done.

Faults may end sequences early, and may cost time. They may not change a token of any other sequence, lose a block, or leave
anyone waiting for ever.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from serve.simulation.device import Device, describe
from serve.simulation.invariants import check_end, check_order, check_state, check_step
from serve.simulation.pool import WatchedPool
from serve.simulation.scenario import Faults, Request, Scenario, scenario_of
from serve.simulation.story import Story, tell
from tonnage.serve.config import EngineConfig
from tonnage.serve.scheduler.queue import LONGEST_RETRY_S, NeverFits, QueueFull
from tonnage.serve.scheduler.scheduler import Scheduler
from tonnage.serve.scheduler.sequence import ScheduledStep, Sequence, Status

Trace = Callable[[str], None]
QUIET = Faults()


class SeedFailed(AssertionError):
    """A seed whose run broke an invariant, raised an error, or did not end."""


@dataclass(slots=True)
class Flight:
    """A step that was launched, the tokens that it gives (None: it failed), and whether the scheduler was told."""

    step: ScheduledStep
    tokens: list[int] | None
    samplers: list[Sequence]
    told: bool = False


class Run:
    """The engine's loop. `flights` are launched steps that the scheduler has not taken in, oldest first."""

    def __init__(self, scenario: Scenario, trace: Trace | None = None, bug: type | None = None) -> None:
        self.scenario, self.trace = scenario, trace
        self.random = Random(scenario.seed)
        self.time_s = 1e6
        self.pool = WatchedPool(scenario.usable + 1, scenario.size, prefix_cache=scenario.prefix_cache)
        config = EngineConfig(
            max_seqs=scenario.max_seqs,
            batched_tokens=scenario.batched_tokens,
            max_waiting=scenario.max_waiting,
        )
        self.scheduler = Scheduler(
            self.pool, config, lambda: self.time_s, context=scenario.context, host_blocks=scenario.host_blocks
        )
        self._plant(bug)
        self.sequences: list[Sequence] = []
        self.stories: dict[int, Story] = {}
        self.device = Device(scenario, self.stories)
        self.requests = deque(scenario.requests)
        self.flights: list[Flight] = []
        self.past: list[Flight] = []
        self.swaps = 0
        self.refusals = Counter[str]()
        self.cut_short: dict[int, str] = {}  # sequences that a fault ended, and the reason they are to give
        self.passed: dict[int, set[str]] = {}  # for who waits: tenants that had a turn since its own had one

    def _plant(self, bug: type | None) -> None:
        scheduler = self.scheduler
        for part in (self.pool, scheduler, scheduler.tables, scheduler.waiting, scheduler._finish_rate):
            for wrong in (bug, getattr(bug, "also", None)):
                if wrong and issubclass(wrong, type(part)):
                    part.__class__ = wrong

    @property
    def live(self) -> list[Sequence]:
        """Sequences that were accepted and are not done."""
        return [sequence for sequence in self.sequences if sequence.status is not Status.FINISHED]

    @property
    def at_rest(self) -> bool:
        """Whether there is nothing left to do."""
        return not self.live and not self.flights and not self.requests

    def play(self) -> None:
        """The whole run; raises at the first thing that is wrong."""
        ticks = self.scenario.ticks
        for tick in range(ticks):
            if not self.at_rest:
                self._tick(tick, self.scenario.faults)
        self.pool.fails_in = 0
        # Chunks of one token, one sequence at a time, each computed again for every token drawn: slower than that is stuck.
        patience = 100 + sum(len(self.stories[sequence.id].tokens) ** 2 for sequence in self.live)
        for tick in range(ticks, ticks + patience):
            if self.at_rest:
                break
            self._tick(tick, QUIET)
        assert self.at_rest, f"after {patience} quiet ticks {[sequence.id for sequence in self.live]} are not done"
        check_end(self)

    def _tick(self, tick: int, faults: Faults) -> None:
        self.time_s += 0.01
        if self._strikes(faults.clock):
            self.time_s += self.random.choice((-1e7, -1.0, 3600.0, 1e9))
        while self.requests and self.requests[0].tick <= tick:
            self._arrive(self.requests.popleft())
        if self._strikes(faults.abort) and self.sequences:
            self._abort(self.random.choice(self.sequences))
        if self._strikes(faults.stop) and self.live:
            self._stop(self.random.choice(self.live))
        if self._strikes(faults.allocation):
            self.pool.fails_in = self.random.randint(1, 6)
        launched = self._schedule(faults)
        stuck = faults is QUIET and not launched and not self.flights and self.live
        assert not stuck, f"{[sequence.id for sequence in self.live]} wait, and nothing runs"
        self._read(self.scenario.ahead if launched else 0, faults)
        if self._strikes(faults.twice) and self.past:
            self._repeat(self.random.choice(self.past))

    def _strikes(self, chance: float) -> bool:
        return chance > 0 and self.random.random() < chance

    def _done(self, words: str) -> None:
        """Say what was done, and look whether everything still holds."""
        if self.trace:
            self.trace(words)
        check_state(self)

    # Coming and going.

    def _arrive(self, request: Request) -> None:
        """All draws of a request, or none."""
        sequences: list[Sequence] = []
        for sample_index in range(request.sampling.n):
            sequence = Sequence(
                id=len(self.sequences) + sample_index + 1,
                tokens=list(request.prompt),
                sampling=request.sampling,
                prompt_length=len(request.prompt),
                eos_ids=request.eos_ids,
                salt=request.salt,
                sample_index=sample_index,
                parent=sequences[0] if sequences else None,
                arrival_s=self.time_s,
            )
            sequences.append(sequence)
        refusal = self._refused(sequences)
        if refusal is None:
            self._accepted(sequences, request)
        else:
            self.refusals[type(refusal).__name__] += 1
            assert not any(map(self.scheduler.abort, sequences)), "what was refused could be aborted"
            self._done(f"refuse {len(sequences)} sequences: {refusal}")

    def _refused(self, sequences: list[Sequence]) -> Exception | None:
        """Offer sequences to the scheduler, which refuses what it must and nothing else."""
        scenario, first = self.scenario, sequences[0]
        end = min(first.prompt_length + first.sampling.max_tokens, scenario.context)
        # The last token that is drawn is never computed.
        fits = first.prompt_length < scenario.context and end - 1 <= scenario.usable * scenario.size
        fits = fits and len(sequences) <= scenario.max_waiting
        room = self.scheduler.waiting.fresh + len(sequences) <= scenario.max_waiting
        try:
            self.scheduler.add(*sequences)
        except QueueFull as refusal:
            assert fits and not room and 0 < refusal.retry_after_s <= LONGEST_RETRY_S, f"refused with {refusal!r}"
            return refusal
        except NeverFits as refusal:
            assert not fits, f"refused with {refusal!r}"
            return refusal
        assert fits and room, f"#{first.id} was accepted"
        return None

    def _accepted(self, sequences: list[Sequence], request: Request) -> None:
        most = min(request.sampling.max_tokens, self.scenario.context - len(request.prompt))
        for sequence in sequences:
            story = tell(request.prompt, most, salt=request.salt, sample_index=sequence.sample_index, ends=request.ends)
            self.stories[sequence.id] = story
        self.sequences += sequences
        self._done("add" + "".join(f" #{one.id} {self.stories[one.id]}" for one in sequences) + f" of {request.salt!r}")

    def _abort(self, sequence: Sequence) -> None:
        before = sequence.status
        aborted = self.scheduler.abort(sequence)
        assert aborted == (before is not Status.FINISHED), f"abort of {before} #{sequence.id} said {aborted}"
        if aborted:
            self.cut_short[sequence.id] = "abort"
        self._done(f"abort {before} #{sequence.id}")

    def _stop(self, sequence: Sequence) -> None:
        before = sequence.status
        self.scheduler.abort(sequence, "stop")
        self.cut_short[sequence.id] = "stop"
        self._done(f"stop {before} #{sequence.id}")

    # A step.

    def _schedule(self, faults: Faults) -> bool:
        """Schedule and launch; whether a step runs now."""
        ran = [sequence for sequence in self.live if sequence.status is Status.RUNNING]
        waited = [sequence for sequence in self.live if sequence.rank < 0]
        step = self.scheduler.schedule()
        check_order(self, ran, waited)
        if step is None:
            self._done("schedule: nothing")
            return False
        check_step(self, step)
        return self._launch(step, faults)

    def _launch(self, step: ScheduledStep, faults: Faults) -> bool:
        moves = step.copies or step.swaps_out or step.swaps_in
        raises = self._strikes(faults.crash) or bool(moves and self._strikes(faults.crash_moving))
        fails = raises or self._strikes(faults.hidden_crash)
        words = f"{step_words(step)}{' raises' if raises else ' fails, unseen' if fails else ''}" if self.trace else ""
        if fails:
            self.device.crash(step, moved=self.random.random() < 0.5)
        self.flights.append(Flight(step, None if fails else self.device.launch(step), step.samplers))
        self._done(words)
        if raises:
            self._tell(self.flights[-1])
        return not raises

    def _read(self, ahead: int, faults: Faults) -> None:
        """Read results until so many are left: the oldest first, if nothing is wrong."""
        while len(untold := [flight for flight in self.flights if not flight.told]) > ahead:
            if self._strikes(faults.late):
                return
            self._tell(self.random.choice(untold) if self._strikes(faults.shuffled) else untold[0])

    def _tell(self, flight: Flight) -> None:
        """Tell the scheduler how a step ended; whoever finished with it is handed back, once."""
        number, live = flight.step.number, self.live
        self._land(flight)
        finished = self._result(flight)
        ended = [sequence.id for sequence in live if sequence.status is Status.FINISHED]
        handed = sorted(sequence.id for sequence in finished)
        assert handed == ended, f"{ended} finished with step {number}, and {handed} were handed back"
        if flight.tokens is None:
            self._check_failed(flight, finished)
        words = f"fail {number}" if flight.tokens is None else f"complete {number}: {flight.tokens}"
        self._done(words + "".join(f" #{one.id} {one.finish_reason}" for one in finished))

    def _land(self, flight: Flight) -> None:
        """Take it out of the flights; one that comes before an earlier one stays until that has come, too."""
        flight.told = True
        self.past.append(flight)
        if flight.tokens is None:
            self.flights.remove(flight)
            self.device.hidden_failures -= 1
        while self.flights and self.flights[0].told:
            del self.flights[0]

    def _result(self, flight: Flight) -> list[Sequence]:
        if flight.tokens is None:
            return self.scheduler.fail(flight.step)
        return self.scheduler.complete(flight.step, flight.tokens)

    def _check_failed(self, flight: Flight, finished: list[Sequence]) -> None:
        """The step's own sequences end, and no others."""
        step = flight.step
        own = {work.sequence.id for work in (*step.decodes, *step.chunks)}
        failed = {sequence.id for sequence in finished if sequence.finish_reason == "error"}
        assert failed <= own, f"step {step.number} failed, and took {failed - own} with it"
        assert not own & {sequence.id for sequence in self.live}, f"step {step.number} failed, and its sequences go on"
        self.cut_short |= dict.fromkeys(failed, "error")

    def _repeat(self, flight: Flight) -> None:
        """Complete or fail once more what was completed or failed: nothing may come of it."""
        live = [(sequence, len(sequence.tokens)) for sequence in self.live]
        again = self._result(flight)
        grown = any(len(sequence.tokens) != length for sequence, length in live)
        assert not again and not grown, f"step {flight.step.number} came twice, and did something the second time"
        self._done(f"step {flight.step.number} again")


def step_words(step: ScheduledStep) -> str:
    """A step, for a trace: decodes | chunks, and what is moved before them."""
    words = f"step {step.number}: {' '.join(map(describe, step.decodes))} | {' '.join(map(describe, step.chunks))}"
    moves = {"copies": step.copies, "swaps out": step.swaps_out, "swaps in": step.swaps_in}
    return words + "".join(f" {name} {pairs}" for name, pairs in moves.items() if pairs)


def play(seed: int, trace: Trace | None = None, bug: type | None = None) -> None:
    """Play a seed; whatever goes wrong says how to replay it."""
    try:
        Run(scenario_of(seed), trace, bug).play()
    except Exception as error:
        command = f"python -m serve.simulation {seed}{f' {bug.__name__}' if bug else ''}"
        raise SeedFailed(f"seed {seed}: {type(error).__name__}: {error}\nreplay, in tests/: {command}") from error
