"""Measure the plain training, and again after each technique that always pays, before the solver chooses.

A technique that does not apply, or with which the model fails, is left out.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import torch

from tonnage.errors import RequestError, TonnageError
from tonnage.fit.applied import Applied
from tonnage.fit.checks import check_finite, check_loss
from tonnage.fit.choose.placement import ResidentState
from tonnage.fit.choose.summary import enough_rows, is_telling, plain_cost, time_words
from tonnage.fit.gradients import noted_autocast
from tonnage.fit.modules import eagerly, undisturbed
from tonnage.fit.recomputing.remembered import as_before
from tonnage.fit.stepping.batches import Weighting, batch_rows, take_rows
from tonnage.fit.stepping.stepper import trained_parameters
from tonnage.fit.survey.meter import GpuMeter
from tonnage.fit.survey.resident_state import find_resident_state, with_coarse_states
from tonnage.fit.survey.survey import Survey
from tonnage.fit.technique import NotApplicable, Technique, technique_class
from tonnage.fit.techniques.compile import compiler_problem
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.training import Training
from tonnage.fit.weighting import find_weighting
from tonnage.untrusted import clipped

# Cheapest first. Each saves memory, time or both on every model that supports it; FP8 is left out where it saves no time.
ALWAYS_PAYING = ("allocator", "fused-attention", "chunked-loss", "autocast", "fp8", "compile")
# If nothing fits, in this order: FP32 parameters among the states, which can be on the host; 8-bit states, if allowed;
# tiles for long sequences, which cost a second forward pass of what is tiled.
MASTERS, COARSE_STATES = ("master-weights",), ("stochastic-bf16", "eight-bit-states")
TILES = ("tiled-mlp", "tiled-norm")
# Bytes of logits at a time: small next to the rest.
_LARGEST_CHUNK_BYTES, _LEAST_CHUNK_BYTES = 512 << 20, 64 << 20


@dataclass(frozen=True)
class Request:
    """What the user asked for, in bytes and technique names."""

    budget_bytes: int
    host_bytes: int
    allowed: frozenset[str]  # techniques that may be used
    say: Callable[[str], None]
    division: MicroBatches = field(default_factory=lambda: MicroBatches(count=1))  # its count is ignored
    measure: bool = True  # whether to rehearse and prove


class Stages:
    """A training, the techniques applied so far, and the survey of each stage."""

    survey: Survey
    resident: ResidentState

    def __init__(self, training: Training, meter: GpuMeter, request: Request) -> None:
        self.training, self.meter, self.request = training, meter, request
        self.applied = Applied(training)
        self.fresh = not training.optimizer.state
        self.stages: list[tuple[str, Survey]] = []
        self.base = 0  # number of techniques that always pay
        self.least_rows = 1  # fewest rows that the loss accepts
        self.own_autocast: list[torch.dtype] = []  # dtypes of autocast that the loss enters itself
        self.in_one_piece = False  # whether the model is measured as a whole, not block by block
        self.left_out: dict[str, str] = {}

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        training = self.training
        with undisturbed(training.model, training.device), as_before(training.loss, training.model):
            yield

    def _look(self) -> None:
        """Survey the plain training, and again after each technique that always pays."""
        self._check_loss()
        if "compile" in self.request.allowed and not self.meter.virtual:
            compiler_problem(self.training.device.type)  # its processes start while blocks are measured eagerly
        # Block by block, or the model as one piece if its blocks cannot run alone (a list that the loss reads).
        try:
            self._add_stage("plain")
        except Exception as problem:
            if self.training.ranks is not None:
                raise
            self.in_one_piece = True
            self._check_loss()
            self._add_stage("plain")
            what = str(problem).strip().partition("\n")[0]
            words = f"Blocks cannot be run apart from the rest of the model ({type(problem).__name__}: {what})."
            self._leave_out("recompute", NotApplicable(words))
        allowed = self.request.allowed - ({"autocast"} if self.own_autocast else set())
        for technique in usable(ALWAYS_PAYING, self.training, allowed, self.request.budget_bytes):
            if self._put_in(technique) and technique.name == "fp8":  # the one that is for speed alone
                self._drop_if_slower(technique)
        self._settle()

    def _put_in(self, technique: Technique) -> bool:
        """Try a technique and return whether the model runs with it; otherwise leave it out."""
        self.request.say(f"trying {technique.title}")
        count, stages = len(self.applied.techniques), len(self.stages)
        try:
            self.applied.add([technique])
            if technique.name != "allocator":  # it changes reserved bytes, not what is measured here
                self._add_stage(technique.name)
        except Exception as problem:
            self.applied.keep(count)
            del self.stages[stages:]
            self._check_loss()  # raises if the technique was not the cause
            self._leave_out(technique.name, problem)
            return False
        return True

    def _drop_if_slower(self, technique: Technique) -> None:
        """Leave out the technique that was added last if a step of the sizes measured with and without is not faster."""
        if len(self.stages) < 2:
            return
        (_, before), (_, after) = self.stages[-2:]
        both = before.measured.keys() & after.measured.keys()
        resident = find_resident_state(self.training, self.meter, after.blocks, self.request.host_bytes)
        without_s, with_s = (plain_cost(survey, resident, both)[1] for survey in (before, after))
        if with_s >= without_s:
            self.applied.keep(len(self.applied.techniques) - 1)
            self.stages.pop()
            words = f"a step takes {time_words(with_s)} with it and {time_words(without_s)} without"
            self._leave_out(technique.name, NotApplicable(words))

    def _leave_out(self, name: str, problem: BaseException) -> None:
        words = str(problem).strip().splitlines() or [type(problem).__name__]
        reason = words[0] if isinstance(problem, TonnageError) else f"{type(problem).__name__}: {words[0]}"
        self.left_out[name] = clipped(reason, 300)
        self.request.say(f"left out {name}: {reason}")
        self.request = replace(self.request, allowed=self.request.allowed - {name})

    def _settle(self) -> None:
        """Fix the techniques applied so far for every budget."""
        if not self.stages:
            raise RequestError(
                "Not even one row of the sample can be run through one block, or through the loss, on this card.",
                hint="Give fit a sample with a shorter sequence.",
            )
        self.base = len(self.applied.techniques)
        self.survey = self.stages[-1][1]
        self.survey.find_unrepeatable()
        for reason in self.survey.unrepeatable.values():
            self.left_out.setdefault("recompute of some blocks", reason)
        self.resident = self._find_resident_state()
        if "eight-bit-states" in self.training.applied:
            self.resident = with_coarse_states(self.resident, self.training)

    def _find_resident_state(self) -> ResidentState:
        return find_resident_state(self.training, self.meter, self.survey.blocks, self.request.host_bytes)

    def _add_stage(self, name: str) -> None:
        """Survey the training as it is. A stage that does not fit even block by block has no sizes."""
        survey = self._new_survey()
        if self.in_one_piece:
            survey.blocks = {}
        before = self.stages[-1][1] if self.stages else None
        candidates = [rows for rows in candidate_rows(survey.rows, divisible=True) if rows >= self.least_rows]
        if "compile" in self.training.applied and before is not None:
            # Each size is compiled anew: only the largest (likeliest) whose blocks fit alone in the free memory.
            room = max(0, self.request.budget_bytes - self.meter.allocated_bytes)
            self._suppose(before, candidates, before, room)
            for rows in sorted(before.sizes, reverse=True):
                if not survey.sizes and (before.sizes[rows].alone_bytes <= room or rows == self.least_rows):
                    self._measure(survey, [rows])
                    with eagerly():
                        self._measure(before, [rows] if survey.sizes else [])  # for comparison
        else:
            self._measure(survey, [self.least_rows, *([max(before.measured)] if before else [])])  # for comparison
            if survey.sizes:
                # The largest size whose parts fit alone in half of the free memory: the closest to what will run.
                smallest = survey.sizes[min(survey.sizes)]
                room = max(0, self.request.budget_bytes - self.meter.allocated_bytes) // 2
                fitting = [rows for rows in candidates if rows * smallest.alone_bytes <= room * smallest.rows]
                self._measure(survey, [max(fitting, default=smallest.rows)])
            if before is None and survey.sizes and self.meter.virtual and not is_telling(survey):
                # On a virtual card, measure enough rows to be representative of the whole batch, even beyond the budget.
                self._measure(survey, [rows for rows in candidates if rows >= enough_rows(survey.rows)][:1])
        if survey.sizes:
            self.stages.append((name, survey))
        torch.cuda.empty_cache()

    def _measure(self, survey: Survey, sizes: Iterable[int]) -> None:
        for rows in sizes:
            with suppress(torch.OutOfMemoryError):
                survey.at(rows)

    def _suppose(self, survey: Survey, candidates: list[int], like: Survey, room: int) -> None:
        """Estimate sizes that were not measured; what is outside the blocks is measured up to the largest that fits."""
        if self.training.ranks is None:
            with suppress(torch.OutOfMemoryError):
                survey.measure_outside(candidates, like, room)
        for rows in candidates:
            survey.suppose(rows, like)

    def _new_survey(self) -> Survey:
        return Survey(self.training, self.meter)

    def _check_loss(self) -> None:
        """Check the loss on one row, or on the whole sample if it does not accept fewer."""
        training, all_rows = self.training, batch_rows(self.training.sample)
        for rows in (self.least_rows, all_rows):
            part = take_rows(training.sample, slice(0, rows))
            noted = noted_autocast(training, [] if training.applied else self.own_autocast)
            try:
                with self._undisturbed(), eagerly(), noted, training.forward_pass(), suppress(torch.OutOfMemoryError):
                    loss = training.loss(training.model, part)
                    check_loss(loss)
                    check_finite(loss, part)
                self.least_rows = rows
                return
            except TonnageError:
                raise
            except Exception:
                if rows == all_rows or training.ranks is not None:
                    raise

    def _measure_sizes(self) -> None:
        """Estimate every micro-batch size that fits alone. The chosen one is measured later."""
        survey, room = self.survey, self.request.budget_bytes - self.resident.held_bytes
        divisible = self._may_divide()
        candidates = [rows for rows in candidate_rows(survey.rows, divisible=divisible) if rows >= self.least_rows]
        like = next((s for s in (survey, *(s for _, s in reversed(self.stages))) if len(s.measured) > 1), survey)
        self._suppose(survey, candidates, like, room)
        for rows in survey.supposed.intersection(candidates):
            if survey.sizes[rows].alone_bytes > room:
                survey.drop(rows)

    def _may_divide(self) -> bool:
        """Return whether the batch may be divided, and find the weighting of its parts."""
        if "micro-batches" not in self.request.allowed or self.survey.rows < 2:
            return False
        division = self.request.division
        reason = replace(division, count=2).why_not(self.training)
        if self.least_rows > 1:
            reason = "The loss does not take fewer rows than the sample has."
        if reason is None and division.weighting == "auto" and not self.meter.virtual:
            try:
                self.request = replace(self.request, division=replace(division, weighting=self._find_weighting()))
            except NotApplicable as problem:
                reason = str(problem)
        if reason is not None:
            self._leave_out("micro-batches", NotApplicable(reason))
        return reason is None

    def _find_weighting(self) -> Weighting:
        return find_weighting(self.training, resampled=self.request.division.dropout == "resampled")


def candidate_rows(rows: int, *, divisible: bool) -> list[int]:
    """Return the batch halved down to one row; if it may not be divided, the batch and an eighth of it."""
    if not divisible:
        return sorted({max(1, rows // 8), rows})
    divisors = [size for size in range(1, rows + 1) if rows % size == 0]
    return divisors if len(divisors) <= 6 else sorted({rows // 2**k for k in range(rows.bit_length())} | {1})


def usable(
    names: tuple[str, ...], training: Training, allowed: frozenset[str], budget_bytes: int
) -> Iterator[Technique]:
    """Yield those of use for this training and not yet applied; each is checked with the previous ones applied."""
    settings = {"chunked-loss": {"chunk_bytes": min(_LARGEST_CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, budget_bytes // 32))}}
    for name in names:
        dtypes = {parameter.dtype for parameter in trained_parameters(training.optimizer)}
        helps = {
            "autocast": dtypes <= {torch.float32},  # a narrower dtype speeds matrix products up
            "master-weights": dtypes <= {torch.float32} and "host-states" in allowed,
            "stochastic-bf16": dtypes <= {torch.bfloat16},
            "tiled-norm": "compile" not in training.applied,  # compiled blocks fuse their norms
        }
        if name in allowed and name not in training.applied and helps.get(name, True):
            technique = technique_class(name)(**settings.get(name, {}))
            if technique.why_not(training) is None:
                yield technique
