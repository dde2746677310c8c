"""`fit`: survey, solve, apply, measure, correct.

Techniques that always pay (fused attention, chunked loss, compile) are applied first and measured; the solver then
chooses among the rest for the smallest step time within the budgets. One rehearsed step shows the real peak. If it
exceeds the budget, the difference is subtracted from the budget and the solver chooses again; if it is far below,
the overestimate is added. A technique that is refused, or that breaks a step, is left out. Finally loss and
gradients are compared with the plain model's.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tonnage.errors import RequestError
from tonnage.fit.checks import check_clip_norm, check_request
from tonnage.fit.choose.solver import BatchLayout, Solution, does_not_fit, smallest_budget, solve
from tonnage.fit.choose.summary import is_telling, plain_cost, summary_rows, time_words
from tonnage.fit.fitted import Fitted, apply_plan, prove_plan
from tonnage.fit.modules import draw_others
from tonnage.fit.plan import FitPlan, assemble, given_plan
from tonnage.fit.prove.proof import NotProven, NotTheSame, Proof, prove
from tonnage.fit.prove.rehearsal import Rehearsed, rehearse
from tonnage.fit.stepping.batches import Weighting
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.survey.meter import GpuMeter
from tonnage.fit.survey.resident_state import with_coarse_states
from tonnage.fit.survey.stages import COARSE_STATES, MASTERS, TILES, Request, Stages, usable
from tonnage.fit.survey.survey import KEEP
from tonnage.fit.technique import BY_PLAN, NAMES, Changes, NotApplicable, Technique, technique_class
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.training import Batch, Loss, Training
from tonnage.fit.virtual import uncaptured
from tonnage.hardware.host_memory import free_host_bytes
from tonnage.units import budget_bytes, format_bytes

_BREAKS = (NotApplicable, RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotTheSame)
_SEGMENT_BYTES = 2 << 20
_ROUNDS = 4  # of choosing, measuring and correcting
_STEPS_BY_CHANCE = 8  # extra rehearsals if steps run different blocks
_WELL_USED = 0.92  # share of the budget above which no faster solution is sought
_WORTHWHILE = 0.01  # share of a step's time that makes another try worthwhile
_MISJUDGED = 0.03  # tolerated share of slowdown against the prediction before another layout is tried
# Parts of a technique that can be left out alone.
_IN_SLICES, _BY_OPERATOR = "recompute in slices", "recompute by operator"


@dataclass(kw_only=True, eq=False)
class FitOptions:
    """The arguments of `tonnage.fit` that do not follow from a Trainer."""

    budget: str | int | None = None
    host: str | int | None = None
    exact: bool = True
    allow: Sequence[str] = ()
    without: Sequence[str] = ()
    weighting: Weighting = "auto"
    dropout: str = "same"
    plan: FitPlan | str | Path | None = None
    measure: bool = True
    verbose: bool = False


def fit(
    model: nn.Module, optimizer: Optimizer, *, loss: Loss, sample: Batch, clip_norm: float | None = None, **options: Any
) -> Fitted:
    """Fit a training on one GPU; `options` are those of `FitOptions`. See `tonnage.fit` for the arguments."""
    asked = FitOptions(**options)
    device = check_request(model, optimizer, loss, sample)
    stepper = Stepper(optimizer, clip_norm=clip_norm)
    training = Training(model=model, optimizer=optimizer, loss=loss, sample=sample, device=device, stepper=stepper)
    check_clip_norm(clip_norm)
    division = MicroBatches(count=1, weighting=asked.weighting, dropout=asked.dropout)
    if wrong := division.why_not_settings():
        raise RequestError(wrong, hint="See the table of tonnage.fit's arguments.")
    if asked.plan is not None:
        plan = given_plan(asked.plan)
        fitted = apply_plan(training, plan, weighting=asked.weighting)
        if asked.measure:
            prove_plan(fitted)
        return fitted
    meter = GpuMeter(device)
    request = Request(
        budget_bytes=budget_bytes(asked.budget, meter.free_bytes()),
        host_bytes=budget_bytes(asked.host, free_host_bytes(), name="host", least_bytes=0),
        allowed=allowed_names(asked.exact, asked.allow, asked.without),
        say=print if asked.verbose else lambda _: None,
        division=division,
        measure=asked.measure,
    )
    return Fitting(training, meter, request).run()


class Fitting(Stages):
    """One run of fit. If anything raises, the training is restored."""

    not_proven = ""  # why the last proof could not be made

    def run(self) -> Fitted:
        with self._all_or_nothing():
            with self._undisturbed():
                self._look()
            return self.choose(self.request.budget_bytes, self.request.host_bytes)

    def choose(self, budget_bytes: int, host_bytes: int) -> Fitted:
        """Choose and apply the remaining techniques for these budgets."""
        self.request = replace(self.request, budget_bytes=budget_bytes, host_bytes=host_bytes)
        self.resident = replace(self.resident, host_bytes=host_bytes)
        with self._all_or_nothing(), self._undisturbed():
            self._measure_sizes()
            solution, measured, proof = self._close_the_loop()
        torch.cuda.empty_cache()  # steps start as the rehearsed one did
        plan, left_out = self._plan(solution), dict(self.left_out)
        not_proven = "" if proof is not None else self.not_proven
        return Fitted(self.training, self.applied, plan, measured, proof, left_out, self.refit, not_proven)

    def refit(self, budget: str | int | None, host: str | int | None) -> Fitted:
        self.applied.keep(self.base)
        self.fresh = not self.training.optimizer.state  # states of steps taken since then are the training's own
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
                self.training.optimizer.state.clear()  # a rehearsal created them
            raise

    def _resort(self) -> bool:
        """Apply the next of the techniques reserved for when nothing fits; return whether there was one."""
        for names in (MASTERS, COARSE_STATES, TILES):
            techniques = list(usable(names, self.training, self.request.allowed, self.request.budget_bytes))
            if names == COARSE_STATES:
                if any(technique.name == "eight-bit-states" for technique in techniques):
                    self.applied.add(techniques)
                    self.base = len(self.applied.techniques)
                    self.resident = with_coarse_states(self.resident, self.training)
                    return True
            elif [technique for technique in techniques if self._put_in(technique)]:
                self._settle()
                self._measure_sizes()
                return True
        return False

    def _plan(self, solution: Solution) -> FitPlan:
        first, plain = self.stages[0]
        plain_peak, plain_s = plain_cost(plain, self.resident) if first == "plain" else (0, 0.0)
        host_bytes = solution.choice.moved_bytes
        if solution.placement.splits_states:
            host_bytes += self.resident.states_bytes - solution.states_on_gpu_bytes
        return FitPlan(
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
            host_bytes=host_bytes,
            rows=summary_rows(self.stages, self.resident, solution, self.applied.techniques),
        )

    def _close_the_loop(self) -> tuple[Solution, Rehearsed | None, Proof | None]:
        """Return the fastest solution whose real peak is within the budget and whose gradients are correct."""
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
                # The prediction will miss the same bytes next time; another solution may have more of them.
                unforeseen = max(unforeseen, measured.peak_reserved_bytes - solution.peak_bytes)
                budget = min(budget, wanted - unforeseen) - rounds * wanted // 100
                rounds += 1
        return (*self._smallest(), self._prove())

    def _use_more(self, solution: Solution, measured: Rehearsed | None) -> tuple[Solution, Rehearsed | None]:
        """If a step takes far less than predicted, spend the difference on a faster solution."""
        wanted = self.request.budget_bytes
        for _ in range(_ROUNDS):
            if measured is None or measured.peak_reserved_bytes > _WELL_USED * wanted or self.survey.by_chance:
                break  # another step may run more blocks than this one did
            spare = solution.peak_bytes - measured.peak_reserved_bytes
            faster = self._fastest(wanted + max(0, spare), resort=False)
            if faster is None or faster.step_s > (1 - _WORTHWHILE) * solution.step_s:
                break
            found = self._exchange(solution, faster)
            if found[0] is solution:
                return found
            solution, measured = found
        return solution, measured

    def _exchange(
        self, solution: Solution, other: Solution, within_s: float = math.inf
    ) -> tuple[Solution, Rehearsed | None]:
        """Try another solution, and return to the first if the other does not fit or takes longer than `within_s`."""
        self._back_to_base()
        seen = self._try(other)
        assert seen is not None
        fits = seen.peak_reserved_bytes <= self.request.budget_bytes
        if fits and (within_s == math.inf or (seen.step_s is not None and seen.step_s < within_s)):
            return other, seen
        self._back_to_base()
        return solution, self._try(solution)

    def _try_another_layout(
        self, solution: Solution, measured: Rehearsed | None, budget_bytes: int
    ) -> tuple[Solution, Rehearsed | None]:
        """If a step is slower than predicted, try the fastest other solution if that promises more.

        Parts that are recomputed are charged with the delay. If there are none, the layout is to blame, and left out.
        """
        for _ in range(_ROUNDS):
            if measured is None or measured.step_s is None or self.training.ranks is not None:
                break
            predicted_s = self._rehearsal_s(solution)
            if measured.step_s <= (1 + _MISJUDGED) * predicted_s:
                break
            worth_s = (1 - _WORTHWHILE) * measured.step_s
            delay_s = (measured.step_s - predicted_s) / self.survey.rehearsal_pace / solution.layout.micro_batches
            charged = self.survey.charge(solution.profiled_rows, solution.choice.modes, delay_s)
            without = None if charged else solution.layout
            supposed = self._solve(budget_bytes, without=without)
            if supposed is None or self._rehearsal_s(supposed) > worth_s:
                break  # before anything is compiled for it
            other = self._fastest(budget_bytes, resort=False, without=without)
            if other is None or self._rehearsal_s(other) > worth_s:
                break
            before = solution
            solution, measured = self._exchange(solution, other, worth_s)
            if solution is before or not charged:
                break
        return solution, measured

    def _rehearsal_s(self, solution: Solution) -> float:
        """Return the predicted seconds of a rehearsed step, whose blocks compute faster than a real one's."""
        blocks_s = solution.layout.micro_batches * solution.choice.micro_batch_s
        return solution.step_s - (1 - self.survey.rehearsal_pace) * blocks_s

    def _prove(self) -> Proof | None:
        """Prove gradients once, on as many rows as the plain model has room for; None on a virtual GPU."""
        if not self.request.measure or self.meter.virtual or self.training.ranks is not None:
            return None
        peak, _ = plain_cost(self.stages[0][1], self.resident)
        fixed = self.resident.held_bytes
        room = max(0, self.request.budget_bytes - fixed) / max(1, peak - fixed)
        # In parts of the size that will run, which is compiled already; if two do not fit, eagerly.
        all_rows, parts = self.survey.rows, self.training.micro_batches
        part_rows = -(-all_rows // parts)
        rows = max(1, int(min(1.0, room) * all_rows))
        compiled = rows // part_rows >= min(2, parts)
        rows = rows // part_rows * part_rows if compiled else rows
        if rows < self.least_rows:
            return None
        try:
            proof = prove(self.applied, self.training.sample, most_rows=rows, compiled=compiled)
        except NotProven as problem:
            self.request.say(str(problem))
            self.not_proven = str(problem)
            return None
        self.request.say(f"proven: {proof}")
        return proof

    def _leave_out_cause(self, solution: Solution, problem: Exception) -> None:
        """Leave out the technique that refused or broke a step; re-raise if none is found."""
        if not isinstance(problem, NotApplicable):
            if not self._leave_out_culprit(solution, problem):
                raise problem
            return
        # The technique that refused when it was applied, or while a step ran.
        name = getattr(problem, "technique", "recompute")
        self._back_to_base()
        if name == "recompute" and solution.layout.slices > 1 and solution.layout.sliced:
            self._leave_out(_IN_SLICES, problem)
        elif not self._leave_out_operators(name, problem):
            if name not in self.request.allowed:
                raise problem
            self._leave_out(name, problem)

    def _leave_out_operators(self, name: str, problem: BaseException) -> bool:
        """Recompute blocks whole or in part from now on, if that is another way; return whether it is."""
        found = name == "recompute" and self.survey.forget_operators()
        if found:
            self._leave_out(_BY_OPERATOR, problem)
        return found

    def _leave_out_culprit(self, solution: Solution, problem: BaseException) -> bool:
        """Find the technique without which a step runs and is proven, and leave it out; False if there is none."""
        self._back_to_base()
        chosen = list(assemble(solution, self.survey, self.request.division))
        for technique in chosen:
            if self._runs([other for other in chosen if other is not technique]):
                if not self._leave_out_operators(technique.name, problem):
                    self._leave_out(technique.name, problem)
                return True
        # The same among the techniques applied first, last one first; later stages are measured again.
        base = list(self.applied.techniques)
        for technique in reversed(base):
            self._rebase([other for other in base if other is not technique])
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
            return True
        except Exception:
            return False
        finally:
            self._back_to_base()

    def _back_to_base(self) -> None:
        """Return to the base techniques, dropping states that the rehearsal created unless they hold masters."""
        if self.fresh and "master-weights" not in self.training.applied:
            self.training.optimizer.state.clear()
        self.applied.keep(self.base)

    def _try(self, solution: Solution) -> Rehearsed | None:
        """Apply a solution, and measure it if requested."""
        self.applied.add(assemble(solution, self.survey, self.request.division))
        if not self.request.measure:
            return None
        measured = self._rehearse()
        predicted = f"{format_bytes(solution.peak_bytes)}, {time_words(solution.step_s)}"
        seconds = "" if measured.step_s is None else f", {time_words(measured.step_s)}"
        self.request.say(f"predicted {predicted}; measured {measured.words}{seconds}")
        return measured

    def _fastest(
        self, budget_bytes: int, *, resort: bool = True, without: BatchLayout | None = None
    ) -> Solution | None:
        """Solve until the chosen solution was measured as it will run: it has to be compiled anyway."""
        while solution := self._solve(budget_bytes, without=without):
            if self.survey.supposed:
                known = self._solve(budget_bytes, among=self.survey.measured, without=without)
                if known and known.step_s <= (1 + _WORTHWHILE) * solution.step_s:
                    solution = known
            if not (self._measure_size_of(solution) or self._measure_parts_of(solution)):
                return solution
        return self._fastest(budget_bytes) if resort and self._resort() else None

    def _solve(self, budget_bytes: int, **among: Any) -> Solution | None:
        """Solve; `among` selects layouts and sizes, as in `solve`."""
        found = solve(self.survey.sizes, self.resident, budget_bytes=budget_bytes, **among, **self._solve_options())
        return found[0] if found else None

    def _measure_size_of(self, solution: Solution) -> bool:
        """Measure the solution's size if it was only estimated; return whether it was."""
        survey, rows = self.survey, solution.profiled_rows
        if rows not in survey.supposed:
            return False
        self.request.say(f"measuring a micro-batch of {rows}")
        try:
            survey.at(rows)
        except torch.OutOfMemoryError:
            survey.drop(rows)
        for other in list(survey.supposed):
            survey.suppose(other, survey)  # estimate again, with the new measurement
        return True

    def _measure_parts_of(self, solution: Solution) -> bool:
        """Measure parts of blocks at the solution's size, if whole recomputation costs enough time."""
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
        """Return the solution of least memory if it fits after all; else raise an error with the measured need."""
        while self._resort():
            pass
        while (solution := self._smallest_solution()) and self._measure_size_of(solution):
            pass
        needed_bytes = solution.peak_bytes if solution else 0
        if solution and self.request.measure and needed_bytes < self.meter.free_bytes():
            try:
                measured = self._try(solution)
            except _BREAKS as problem:
                self._leave_out_cause(solution, problem)
                return self._smallest()
            assert measured is not None
            if measured.peak_reserved_bytes <= self.request.budget_bytes:
                return solution, measured
            # One more segment: library workspaces may be placed differently next time.
            needed_bytes = max(needed_bytes, measured.peak_reserved_bytes) + _SEGMENT_BYTES
            self._back_to_base()
        raise does_not_fit(self.resident, self.request.budget_bytes, solution, needed_bytes)

    def _smallest_solution(self) -> Solution | None:
        return smallest_budget(self.survey, self.resident, **self._solve_options())

    def _solve_options(self) -> dict[str, Any]:
        survey, allowed = self.survey, self.request.allowed
        sliceable = (
            survey.rows > 1 and bool(survey.blocks) and "recompute" in allowed and _IN_SLICES not in self.left_out
        )
        sliceable = sliceable and Recompute.all(self.training.model, slices=2).why_not(self.training) is None
        found = {"batch_rows": survey.rows, "sliceable": sliceable, "divisible": "micro-batches" in allowed}
        return {**found, "allowed": allowed, "outside": survey.outside}

    def _rehearse(self) -> Rehearsed:
        try:
            found = self._rehearse_once()
            for _ in range(_STEPS_BY_CHANCE if self.survey.by_chance else 0):
                draw_others(self.training.device)  # each rehearsal restores the RNG states
                found = max(found, self._rehearse_once(), key=lambda step: step.peak_reserved_bytes)
            return found
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            full = self.meter.capacity_bytes
            return Rehearsed(peak_allocated_bytes=full, peak_reserved_bytes=full, stepped=False)

    def _rehearse_once(self) -> Rehearsed:
        return rehearse(self.training, self.meter, fresh=self.fresh)


def allowed_names(exact: bool, allow: Iterable[str], without: Iterable[str]) -> frozenset[str]:
    allow = (allow,) if isinstance(allow, str) else tuple(allow)
    without = (without,) if isinstance(without, str) else tuple(without)
    for name in (*allow, *without):
        technique_class(name)  # raises for an unknown name
    by_plan = next((name for name in allow if name in BY_PLAN), None)
    if by_plan:
        raise RequestError(
            f"{by_plan} is not chosen by a budget.", hint="Name it in a plan, and give that to fit: fit(..., plan=...)."
        )
    chosen = set(NAMES) - BY_PLAN
    if exact:
        chosen = {name for name in chosen if technique_class(name).changes is not Changes.NUMERICS}
    return frozenset((chosen | set(allow)) - set(without))
