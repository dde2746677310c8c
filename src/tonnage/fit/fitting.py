"""`fit`: survey, solve, apply, measure, correct.

Techniques that always pay (fused attention, loss in chunks, compile) go in first and are measured; the solver then
chooses among the rest for the smallest step time within the budgets. One rehearsed step shows the real peak. Where it is
above the budget, the difference is taken off the budget and the solver chooses again; where it is far below, what was
predicted too much is added. A technique that is refused, or under which a step breaks, is left out and the solver goes on.
At last loss and gradients are compared with the plain model's.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tonnage.errors import RequestError, TonnageError
from tonnage.fit.checks import check_clip_norm, check_finite, check_loss, check_request
from tonnage.fit.choose.account import time_words
from tonnage.fit.choose.accounting import account_rows, enough_rows, is_telling, plain_cost
from tonnage.fit.choose.assembly import (
    always_paying,
    assemble,
    coarser_states,
    narrower_parameters,
    tiling,
    with_coarse_states,
)
from tonnage.fit.choose.outlook import does_not_fit, smallest_budget
from tonnage.fit.choose.placement import Holdings
from tonnage.fit.choose.solver import Layout, Solution, solve
from tonnage.fit.fitted import Applied, Fitted
from tonnage.fit.gradients import noted_autocast
from tonnage.fit.measure.holdings import find_holdings
from tonnage.fit.measure.measuring import draw_others, undisturbed
from tonnage.fit.measure.meter import Meter
from tonnage.fit.measure.survey import BLOCK, KEEP, Survey
from tonnage.fit.modules import eagerly
from tonnage.fit.moving.host import free_host_bytes
from tonnage.fit.plan import Plan, read_plan
from tonnage.fit.proof import NotProven, NotTheSame, Proof, prove
from tonnage.fit.recomputing.remembered import as_before
from tonnage.fit.registry import BY_PLAN, NAMES, find_conflict
from tonnage.fit.rehearsal import Rehearsed, rehearse
from tonnage.fit.stepping.batches import Weighting, batch_rows, take_rows
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.technique import Changes, NotApplicable, Technique
from tonnage.fit.techniques.compile import compiler_problem
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.training import Batch, Loss, Training
from tonnage.fit.virtual import uncaptured
from tonnage.fit.weighting import find_weighting
from tonnage.units import budget_bytes, format_bytes
from tonnage.untrusted import clipped

Say = Callable[[str], None]
_BREAKS = (NotApplicable, RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotTheSame)
_SEGMENT_BYTES = 2 << 20
_ROUNDS = 4  # of choosing, measuring and correcting
_STEPS_BY_CHANCE = 8  # more of a rehearsal, where steps run different blocks
_WELL_USED = 0.92  # share of the budget above which no faster solution is looked for
_WORTHWHILE = 0.01  # share of a step's time for which a solution is tried again
_MISJUDGED = 0.03  # share of its predicted time by which a step may be slower before another layout is looked at
_IN_SLICES = "recompute in slices"


@dataclass(frozen=True)
class Request:
    """What was asked for, in bytes and names."""

    budget_bytes: int
    host_bytes: int
    allowed: frozenset[str]  # techniques that may be used
    say: Say
    division: MicroBatches = field(default_factory=lambda: MicroBatches(count=1))  # whatever the count


def fit(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    loss: Loss,
    sample: Batch,
    budget: str | int | None = None,
    host: str | int | None = None,
    exact: bool = True,
    allow: Sequence[str] = (),
    without: Sequence[str] = (),
    clip_norm: float | None = None,
    weighting: Weighting = "auto",
    dropout: str = "same",
    plan: Plan | str | Path | None = None,
    measure: bool = True,
    verbose: bool = False,
) -> Fitted:
    """Fit a training on one GPU. `calling.fit`, which is `tonnage.fit`, says what the arguments mean."""
    device = check_request(model, optimizer, sample)
    stepper = Stepper(optimizer, clip_norm=clip_norm)
    training = Training(model=model, optimizer=optimizer, loss=loss, sample=sample, device=device, stepper=stepper)
    check_clip_norm(clip_norm)
    division = MicroBatches(count=1, weighting=weighting, dropout=dropout)
    wrong = division.why_not_settings()
    if wrong:
        raise RequestError(wrong, hint="See the table of tonnage.fit's arguments.")
    if plan is not None:
        return apply_plan(training, plan if isinstance(plan, Plan) else read_plan(plan), weighting=weighting)
    meter = Meter(device)
    request = Request(
        budget_bytes=budget_bytes(budget, meter.free_bytes()),
        host_bytes=budget_bytes(host, free_host_bytes(), name="host", least_bytes=0),
        allowed=allowed_names(exact, allow, without),
        say=print if verbose else lambda _: None,
        division=division,
    )
    return Fitting(training, meter, request, measure=measure).run()


def apply_plan(training: Training, plan: Plan, *, weighting: Weighting = "auto") -> Fitted:
    """What was planned, here or elsewhere. `weighting`: of parts of a batch, where the plan cannot hold it."""
    problem = find_conflict(list(plan.techniques))
    if problem:
        raise RequestError(f"The plan cannot be applied: {problem}.", hint="Make it again with tonnage.fit.")
    applied = Applied(training)
    try:
        techniques = list(plan.techniques) if _made_here(plan, training) else _carried_over(plan)
        if weighting != "auto":
            techniques = [replace(t, weighting=weighting) if isinstance(t, MicroBatches) else t for t in techniques]
        applied.add(techniques)
    except BaseException:
        applied.take_away()
        raise
    return Fitted(training, applied, plan, None)


def _made_here(plan: Plan, training: Training) -> bool:
    here = torch.cuda.get_device_name(training.device) if training.device.type == "cuda" else training.device.type
    return (plan.device, plan.torch) == (here, torch.__version__)


def _carried_over(plan: Plan) -> list[Technique]:
    """Which operators a block calls is a matter of device, type and version: elsewhere such blocks are recomputed whole."""
    techniques = [_without_operators(technique) for technique in plan.techniques]
    if techniques != list(plan.techniques):
        warnings.warn(
            f"The plan was made with torch {plan.torch or 'of an unknown version'} for {plan.device}: blocks that keep some of"
            " their operators there are recomputed whole here, which takes less memory and more time than it says.",
            stacklevel=4,
        )
    return techniques


def _without_operators(technique: Technique) -> Technique:
    if not isinstance(technique, Recompute):
        return technique
    modes = {block: mode if isinstance(mode, str) else BLOCK for block, mode in technique.modes.items()}
    return replace(technique, modes=modes)


class Fitting:
    """One run of fit. Until it ends well, whatever raises leaves the training as it was."""

    survey: Survey
    holdings: Holdings

    def __init__(self, training: Training, meter: Meter, request: Request, *, measure: bool) -> None:
        self.training, self.meter, self.request, self.measure = training, meter, request, measure
        self.applied = Applied(training)
        self.fresh = not training.optimizer.state
        self.stages: list[tuple[str, Survey]] = []
        self.base = 0  # techniques that always pay
        self.divides = False
        self.least_rows = 1  # that the loss takes
        self.own_autocast: list[torch.dtype] = []  # that the loss enters by itself
        self.in_one_piece = False  # whether the model is measured as a whole, not block by block
        self.left_out: dict[str, str] = {}

    def run(self) -> Fitted:
        with self._all_or_nothing():
            with self._undisturbed():
                self._look()
            return self.choose(self.request.budget_bytes, self.request.host_bytes)

    def choose(self, budget_bytes: int, host_bytes: int) -> Fitted:
        """The rest of the techniques for these budgets, beside those that always pay."""
        self.request = replace(self.request, budget_bytes=budget_bytes, host_bytes=host_bytes)
        self.holdings = replace(self.holdings, host_bytes=host_bytes)
        with self._all_or_nothing(), self._undisturbed():
            self._measure_sizes()
            solution, measured, proof = self._close_the_loop()
        torch.cuda.empty_cache()  # steps begin as the rehearsed one did
        fitted = Fitted(self.training, self.applied, self._plan(solution), measured, refit=self.refit)
        fitted.proof, fitted.left_out = proof, dict(self.left_out)
        return fitted

    def refit(self, budget: str | int | None, host: str | int | None) -> Fitted:
        self.applied.keep(self.base)
        asked = self.request
        gpu_bytes = asked.budget_bytes if budget is None else budget_bytes(budget, self.meter.free_bytes())
        host_free_bytes = asked.host_bytes if host is None else free_host_bytes()
        return self.choose(gpu_bytes, budget_bytes(host, host_free_bytes, name="host", least_bytes=0))

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        try:
            with uncaptured():
                yield
        except BaseException:
            self.applied.take_away()
            if self.fresh:
                self.training.optimizer.state.clear()  # a rehearsal made them
            raise

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        training = self.training
        with undisturbed(training.model, training.device), as_before(training.loss, training.model):
            yield

    def _look(self) -> None:
        """Survey the plain training, and again with each technique that always pays."""
        self._check_loss()
        if "compile" in self.request.allowed and not self.meter.virtual:
            compiler_problem(self.training.device.type)  # its processes start while blocks are still measured eagerly
        self._add_plain_stage()
        allowed = self.request.allowed - ({"autocast"} if self.own_autocast else set())
        for technique in always_paying(self.training, allowed, self.request.budget_bytes):
            self._put_in(technique)
        self._settle()

    def _put_in(self, technique: Technique) -> bool:
        """Whether the model runs with it; else it is left out."""
        self.request.say(f"trying {technique.title}")
        count, stages = len(self.applied.techniques), len(self.stages)
        try:
            self.applied.add([technique])
            if technique.name != "allocator":  # it changes what is reserved, not what is measured here
                self._add_stage(technique.name)
        except Exception as problem:
            self.applied.keep(count)
            del self.stages[stages:]
            self._check_loss()  # raises where it was not the technique
            self._leave_out(technique.name, problem)
            return False
        return True

    def _add_plain_stage(self) -> None:
        """Block by block; or in one piece, where blocks cannot be run without the rest (a list that the loss reads)."""
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

    def _leave_out(self, name: str, problem: BaseException) -> None:
        """Not to be tried again in this fit."""
        words = str(problem).strip().splitlines() or [type(problem).__name__]
        reason = words[0] if isinstance(problem, TonnageError) else f"{type(problem).__name__}: {words[0]}"
        self.left_out[name] = clipped(reason, 300)
        self.request.say(f"left out {name}: {reason}")
        self.request = replace(self.request, allowed=self.request.allowed - {name})

    def _settle(self) -> None:
        """What is in place now stays for every budget."""
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
        self.holdings = self._find_holdings()
        if "eight-bit-states" in self.training.applied:
            self.holdings = with_coarse_states(self.holdings, self.training)

    def _find_holdings(self) -> Holdings:
        return find_holdings(self.training, self.meter, self.survey.blocks, self.request.host_bytes)

    def _add_stage(self, name: str) -> None:
        """A stage that does not even fit block by block has no numbers."""
        survey = self._new_survey()
        if self.in_one_piece:
            survey.blocks = {}
        before = self.stages[-1][1] if self.stages else None
        if "compile" in self.training.applied and before is not None:  # each size is compiled anew
            for rows in self._likely_rows(before):
                if not survey.sizes:
                    self._measure(survey, [rows])
                    with eagerly():
                        self._measure(before, [rows] if survey.sizes else [])  # to compare them
        else:
            self._measure(survey, [self.least_rows, *([max(before.measured)] if before else [])])  # to compare them
            self._measure(survey, [self._common_rows(survey)] if survey.sizes else [])
            if before is None and survey.sizes and self.meter.virtual:
                self._measure_enough(survey)
        if survey.sizes:
            self.stages.append((name, survey))
        torch.cuda.empty_cache()

    def _measure(self, survey: Survey, sizes: Iterable[int]) -> None:
        for rows in sizes:
            with suppress(torch.OutOfMemoryError):
                survey.at(rows)

    def _measure_enough(self, survey: Survey) -> None:
        """So many rows that they say something of the whole batch, beyond the budget too: a virtual card may be asked."""
        enough = [rows for rows in candidate_rows(survey.rows, divisible=True) if rows >= enough_rows(survey.rows)]
        self._measure(survey, enough[:1] if not is_telling(survey) else [])

    def _common_rows(self, survey: Survey) -> int:
        """The largest size whose parts run alone in half of the room that there is: the nearest to what will run."""
        smallest = survey.sizes[min(survey.sizes)]
        room = max(0, self.request.budget_bytes - self.meter.allocated_bytes) // 2
        fitting = [
            rows for rows in candidate_rows(survey.rows, divisible=True)
            if rows >= self.least_rows and rows * smallest.alone_bytes <= room * smallest.rows
        ]  # fmt: skip
        return max(fitting, default=smallest.rows)

    def _likely_rows(self, before: Survey) -> list[int]:
        """Sizes whose blocks, as they were before, run alone in the room that there is: the largest is the likeliest."""
        room = max(0, self.request.budget_bytes - self.meter.allocated_bytes)
        candidates = [rows for rows in candidate_rows(before.rows, divisible=True) if rows >= self.least_rows]
        if self.training.ranks is None:
            with suppress(torch.OutOfMemoryError):
                before.measure_outside(candidates, before, room)
        for rows in candidates:
            before.suppose(rows, before)
        fitting = [rows for rows in before.sizes if before.sizes[rows].alone_bytes <= room or rows == self.least_rows]
        return sorted(fitting, reverse=True)

    def _new_survey(self) -> Survey:
        return Survey(self.training, self.meter)

    def _coarsen(self) -> bool:
        """Where nothing fits and it was allowed: states of 8 bits."""
        techniques = coarser_states(self.training, self.request.allowed)
        if techniques:
            self.applied.add(techniques)
            self.base = len(self.applied.techniques)
            self.holdings = with_coarse_states(self.holdings, self.training)
        return bool(techniques)

    def _resort(self) -> bool:
        """The next of the techniques that are kept for where nothing fits; whether there was one."""
        return self._narrow() or self._coarsen() or self._tile()

    def _narrow(self) -> bool:
        """Where nothing fits: FP32 parameters among the states, which can be on the host."""
        return self._resort_to(narrower_parameters(self.training, self.request.allowed))

    def _tile(self) -> bool:
        """Where nothing fits: long sequences in tiles, which cost a second forward pass of what is tiled."""
        return self._resort_to(list(tiling(self.training, self.request.allowed)))

    def _resort_to(self, techniques: Sequence[Technique]) -> bool:
        put_in = [technique for technique in techniques if self._put_in(technique)]
        if put_in:
            self._settle()
            self._measure_sizes()
        return bool(put_in)

    def _plan(self, solution: Solution) -> Plan:
        measured_plain = self.stages[0][0] == "plain"
        plain = self.stages[0][1]
        plain_peak, plain_s = plain_cost(plain, self.holdings) if measured_plain else (0, 0.0)
        return Plan(
            techniques=self.applied.techniques,
            device=torch.cuda.get_device_name(self.training.device),
            torch=torch.__version__,
            batch_rows=self.survey.rows,
            budget_bytes=self.request.budget_bytes,
            host_budget_bytes=self.request.host_bytes,
            peak_bytes=solution.peak_bytes,
            step_s=solution.step_s,
            plain_peak_bytes=plain_peak,
            plain_step_s=plain_s if is_telling(plain) else 0.0,
            host_bytes=_host_bytes(solution, self.holdings),
            rows=account_rows(self.stages, self.survey, self.holdings, solution, self.applied.techniques),
        )

    def _check_loss(self) -> None:
        """With one row; or with all, where the loss does not take fewer than the sample has."""
        try:
            self._check_loss_of(self.least_rows)
        except TonnageError:
            raise
        except Exception:
            rows = batch_rows(self.training.sample)
            if rows == self.least_rows or self.training.ranks is not None:
                raise
            self._check_loss_of(rows)
            self.least_rows = rows

    def _check_loss_of(self, rows: int) -> None:
        row = take_rows(self.training.sample, slice(0, rows))
        with (
            self._undisturbed(),
            eagerly(),
            noted_autocast(self.training, [] if self.training.applied else self.own_autocast),
            self.training.forward_pass(),
            suppress(torch.OutOfMemoryError),
        ):
            loss = self.training.loss(self.training.model, row)
            check_loss(loss)
            check_finite(loss, row)

    def _measure_sizes(self) -> None:
        """Every micro-batch size worth trying, as long as it fits alone. What will run is measured when it is chosen."""
        survey, room = self.survey, self.request.budget_bytes - self.holdings.held_bytes
        self.divides = self._may_divide()
        candidates = [rows for rows in candidate_rows(survey.rows, divisible=self.divides) if rows >= self.least_rows]
        like = next((s for s in (survey, *(s for _, s in reversed(self.stages))) if len(s.measured) > 1), survey)
        if self.training.ranks is None:
            with suppress(torch.OutOfMemoryError):
                survey.measure_outside(candidates, like, room)
        for rows in candidates:
            survey.suppose(rows, like)
            if rows in survey.supposed and survey.sizes[rows].alone_bytes > room:
                survey.drop(rows)

    def _may_divide(self) -> bool:
        """Whether a batch may be divided; how much its parts weigh is found out with it."""
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

    def _slices(self) -> bool:
        if self.survey.rows < 2 or not self.survey.blocks or "recompute" not in self.request.allowed:
            return False
        if _IN_SLICES in self.left_out:
            return False
        return Recompute.all(self.training.model, slices=2).why_not(self.training) is None

    def _close_the_loop(self) -> tuple[Solution, Rehearsed | None, Proof | None]:
        """The fastest solution whose real peak is within the budget and whose gradients are the plain ones."""
        wanted = budget = self.request.budget_bytes
        unforeseen = rounds = 0
        while rounds < _ROUNDS:
            solution = self._fastest(budget)
            if solution is None:
                break
            try:
                measured = self._try(solution)
                if measured is None or measured.peak_reserved_bytes <= wanted:
                    solution, measured = self._use_more(solution, measured)
                    solution, measured = self._try_another_layout(solution, measured, budget)
                    return solution, measured, self._prove()
            except _BREAKS as problem:
                self._leave_out_cause(solution, problem)
            else:
                self._back_to_base()
                # What the prediction did not see it will not see next time either; another solution may have more of it.
                unforeseen = max(unforeseen, measured.peak_reserved_bytes - solution.peak_bytes)
                budget = min(budget, wanted - unforeseen) - rounds * wanted // 100
                rounds += 1
        return (*self._smallest(), self._prove())

    def _use_more(self, solution: Solution, measured: Rehearsed | None) -> tuple[Solution, Rehearsed | None]:
        """Where a step takes far less than was predicted, what was too much buys a faster solution."""
        wanted = self.request.budget_bytes
        for _ in range(_ROUNDS):
            if measured is None or measured.peak_reserved_bytes > _WELL_USED * wanted or self.survey.by_chance:
                break  # another step may run more blocks than this one did
            spare = solution.peak_bytes - measured.peak_reserved_bytes
            faster = self._fastest(wanted + max(0, spare), resort=False)
            if faster is None or faster.step_s > (1 - _WORTHWHILE) * solution.step_s:
                break
            self._back_to_base()
            seen = self._try(faster)
            assert seen is not None
            if seen.peak_reserved_bytes > wanted:
                self._back_to_base()
                return solution, self._try(solution)
            solution, measured = faster, seen
        return solution, measured

    def _try_another_layout(
        self, solution: Solution, measured: Rehearsed | None, budget_bytes: int
    ) -> tuple[Solution, Rehearsed | None]:
        """Where a step is slower than predicted, the fastest with other micro-batches, if it promises to be faster than that."""
        if measured is None or measured.step_s is None or self.training.ranks is not None:
            return solution, measured
        if measured.step_s <= (1 + _MISJUDGED) * solution.step_s:
            return solution, measured
        worth_s = (1 - _WORTHWHILE) * measured.step_s
        supposed = self._solve(budget_bytes, without=solution.layout)
        if supposed is None or supposed.step_s > worth_s:
            return solution, measured  # nothing is compiled for it
        other = self._fastest(budget_bytes, resort=False, without=solution.layout)
        if other is None or other.step_s > worth_s:
            return solution, measured
        self._back_to_base()
        seen = self._try(other)
        assert seen is not None
        fits = seen.peak_reserved_bytes <= self.request.budget_bytes
        if fits and seen.step_s is not None and seen.step_s < worth_s:
            return other, seen
        self._back_to_base()
        return solution, self._try(solution)

    def _prove(self) -> Proof | None:
        """Once, where there are values, on as many rows as the plain model has room for within the budget."""
        if not self.measure or self.meter.virtual or self.training.ranks is not None:
            return None
        peak, _ = plain_cost(self.stages[0][1], self.holdings)
        fixed = self.holdings.held_bytes
        room = max(0, self.request.budget_bytes - fixed) / max(1, peak - fixed)
        # In parts of the size that will run, which is compiled already; where there is no room for two, eagerly.
        all_rows, parts = self.survey.rows, self.training.micro_batches
        part_rows = -(-all_rows // parts)
        rows = max(1, int(min(1.0, room) * all_rows)) // part_rows * part_rows
        compiled = rows >= min(2, parts) * part_rows
        if not compiled:
            rows = max(1, int(min(1.0, room) * all_rows))
        if rows < self.least_rows:
            return None
        try:
            with nullcontext() if compiled else eagerly():
                proof = prove(self.training, self.applied.plain_model, self.training.sample, most_rows=rows)
        except NotProven as problem:
            self.request.say(str(problem))
            return None
        self.request.say(f"proven: {proof}")
        return proof

    def _leave_out_cause(self, solution: Solution, problem: Exception) -> None:
        """Of a refusal, or of a step that broke; raise where there is none to be found."""
        if isinstance(problem, NotApplicable):
            self._leave_out_refused(solution, problem)
        elif not self._leave_out_culprit(solution, problem):
            raise problem

    def _leave_out_refused(self, solution: Solution, problem: NotApplicable) -> None:
        """The technique that said so when it was to be put in place, or while a step ran."""
        name = getattr(problem, "technique", "recompute")
        self._back_to_base()
        if name == "recompute" and solution.layout.slices > 1:
            self.left_out[_IN_SLICES] = str(problem).splitlines()[0]
        elif name == "recompute" and self.survey.has_operators:
            self.survey.forget_operators()
            self.left_out["recompute by operator"] = str(problem).splitlines()[0]
        elif name in self.request.allowed:
            self._leave_out(name, problem)
        else:
            raise problem

    def _leave_out_culprit(self, solution: Solution, problem: BaseException) -> bool:
        """Find the technique without which a step runs and is proven, and leave it out; False where there is none."""
        self._back_to_base()
        chosen = list(assemble(solution, self.survey, self.training, self.request.division))
        for technique in chosen:
            rest = [other for other in chosen if other is not technique]
            if self._runs(rest):
                if technique.name == "recompute" and self.survey.has_operators:
                    self.survey.forget_operators()
                    self.left_out["recompute by operator"] = clipped(str(problem).splitlines()[0], 300)
                else:
                    self._leave_out(technique.name, problem)
                return True
        return self._leave_out_of_base(chosen, problem)

    def _leave_out_of_base(self, chosen: Sequence[Technique], problem: BaseException) -> bool:
        """The same among techniques that were put in first, the last of them first; what follows is measured anew."""
        base = list(self.applied.techniques)
        for technique in reversed(base):
            rest = [other for other in base if other is not technique]
            self._rebase(rest)
            if self._runs(chosen):
                self._leave_out(technique.name, problem)
                stages = [stage for stage in self.stages if stage[0] != technique.name]
                self.stages, name = stages[:-1], stages[-1][0] if stages else "plain"
                self._add_stage(name)
                self._settle()
                self._measure_sizes()
                return True
        self._rebase(base)
        return False

    def _rebase(self, techniques: Sequence[Technique]) -> None:
        self.applied.keep(0)
        self.applied.add(techniques)
        self.base = len(techniques)

    def _runs(self, techniques: Sequence[Technique]) -> bool:
        try:
            self.applied.add(techniques)
            self._rehearse()
            self._prove()
        except Exception:
            return False
        finally:
            self._back_to_base()
        return True

    def _back_to_base(self) -> None:
        """States that only the rehearsal made are dropped, not brought back; with masters among them they stay."""
        if self.fresh and "master-weights" not in self.training.applied:
            self.training.optimizer.state.clear()
        self.applied.keep(self.base)

    def _try(self, solution: Solution) -> Rehearsed | None:
        """Put it in place, and measure it where that is wanted."""
        self.applied.add(assemble(solution, self.survey, self.training, self.request.division))
        if not self.measure:
            return None
        measured = self._rehearse()
        predicted = f"{format_bytes(solution.peak_bytes)}, {time_words(solution.step_s)}"
        seconds = "" if measured.step_s is None else f", {time_words(measured.step_s)}"
        self.request.say(f"predicted {predicted}; measured {measured.words}{seconds}")
        return measured

    def _fastest(self, budget_bytes: int, *, resort: bool = True, without: Layout | None = None) -> Solution | None:
        """Solved again until what is chosen was measured as it will run: its compilation is wanted in any case."""
        while solution := self._solve(budget_bytes, without=without):
            if self.survey.supposed:
                known = self._solve(budget_bytes, among=self.survey.measured, without=without)
                if known and known.step_s <= (1 + _WORTHWHILE) * solution.step_s:
                    solution = known
            if not (self._measure_size_of(solution) or self._measure_parts_of(solution)):
                return solution
        return self._fastest(budget_bytes) if resort and self._resort() else None

    def _solve(self, budget_bytes: int, **among: Any) -> Solution | None:
        """`among`: which layouts and sizes, as `solve` takes it."""
        found = solve(self.survey.sizes, self.holdings, budget_bytes=budget_bytes, **among, **self._frame())
        return found[0] if found else None

    def _measure_size_of(self, solution: Solution) -> bool:
        """Measure a size that was supposed so far, if the solution has one."""
        survey, rows = self.survey, solution.profiled_rows
        if rows not in survey.supposed:
            return False
        self.request.say(f"measuring a micro-batch of {rows}")
        try:
            survey.at(rows)
        except torch.OutOfMemoryError:
            survey.drop(rows)
        for other in list(survey.supposed):
            survey.suppose(other, survey)  # anew, with what is known by now
        return True

    def _measure_parts_of(self, solution: Solution) -> bool:
        """Measure parts of blocks at the size that runs, where recomputing blocks whole takes time worth saving."""
        survey, rows, layout = self.survey, solution.profiled_rows, solution.layout
        size = survey.sizes[rows]
        changed = [name for name, mode in zip(size.kinds, solution.choice.modes, strict=True) if mode != KEEP]
        again_s = sum(size.kept(name).forward_s for name in changed) * layout.slices * layout.micro_batches
        eager = survey.eager_modes(rows, set(solution.choice.modes))
        if not eager and (survey.is_detailed(rows) or again_s <= _WORTHWHILE * solution.step_s):
            return False
        self.request.say(f"measuring {'compiled ' if eager else ''}parts of blocks on a micro-batch of {rows}")
        with suppress(torch.OutOfMemoryError):
            if eager:
                survey.compile_modes(rows, eager)
            else:
                survey.detail(rows)
        return True

    def _smallest(self) -> tuple[Solution, Rehearsed | None]:
        """The solution of least memory where it fits after all; else an error that says what it takes, as measured."""
        while self._resort():
            pass
        holdings = self.holdings
        solution = self._least()
        needed_bytes = solution.peak_bytes if solution else 0
        if solution and self.measure and needed_bytes < self.meter.free_bytes():
            try:
                measured = self._try(solution)
            except _BREAKS as problem:
                self._leave_out_cause(solution, problem)
                return self._smallest()
            assert measured is not None
            if measured.peak_reserved_bytes <= self.request.budget_bytes:
                return solution, measured
            # A segment more: what the libraries hold may stand in another place next time.
            needed_bytes = max(needed_bytes, measured.peak_reserved_bytes) + _SEGMENT_BYTES
            self._back_to_base()
        raise does_not_fit(holdings, self.request.budget_bytes, solution, needed_bytes)

    def _least(self) -> Solution | None:
        while (solution := self._smallest_solution()) and self._measure_size_of(solution):
            pass
        return solution

    def _smallest_solution(self) -> Solution | None:
        return smallest_budget(self.survey, self.holdings, **self._frame())

    def _frame(self) -> dict[str, Any]:
        return {
            "batch_rows": self.survey.rows,
            "sliceable": self._slices(),
            "divisible": self.divides,
            "allowed": self.request.allowed,
            "outside": self.survey.outside,
        }

    def _rehearse(self) -> Rehearsed:
        try:
            found = self._rehearse_once()
            for _ in range(_STEPS_BY_CHANCE if self.survey.by_chance else 0):
                draw_others(self.training.device)  # each rehearsal puts random states back
                found = max(found, self._rehearse_once(), key=lambda step: step.peak_reserved_bytes)
            return found
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            full = self.meter.capacity_bytes
            return Rehearsed(peak_allocated_bytes=full, peak_reserved_bytes=full, stepped=False)

    def _rehearse_once(self) -> Rehearsed:
        return rehearse(self.training, self.meter, fresh=self.fresh)


def candidate_rows(rows: int, *, divisible: bool) -> list[int]:
    """Halves of the batch down to one row; where nothing may be divided, the batch and an eighth of it on the way."""
    if not divisible:
        return sorted({max(1, rows // 8), rows})
    divisors = [size for size in range(1, rows + 1) if rows % size == 0]
    return divisors if len(divisors) <= 6 else sorted({rows // 2**k for k in range(rows.bit_length())} | {1})


def _host_bytes(solution: Solution, holdings: Holdings) -> int:
    moved_states = holdings.states_bytes - solution.states_on_gpu_bytes if solution.placement.splits_states else 0
    return solution.choice.moved_bytes + moved_states


def allowed_names(exact: bool, allow: Iterable[str], without: Iterable[str]) -> frozenset[str]:
    from tonnage.fit.registry import technique_class

    for name in (*allow, *without):
        technique_class(name)  # an unknown name is told by its own error
    by_plan = next((name for name in allow if name in BY_PLAN), None)
    if by_plan:
        raise RequestError(
            f"{by_plan} is not chosen by a budget.", hint="Name it in a plan, and give that to fit: fit(..., plan=...)."
        )
    keeps = {
        name for name in set(NAMES) - BY_PLAN if technique_class(name).changes is not Changes.NUMERICS or not exact
    }
    return frozenset((keeps | set(allow)) - set(without))
