"""Measure a sharded training: all ranks run the same at the same time, and the first rank's results count for all.

A timed call is repeated equally often on every rank, since each repetition gathers parameters from all of them.
Shard sizes are those of this rank. It does not know how FSDP2 wraps a model.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tonnage.fit.choose.placement import ResidentState
from tonnage.fit.choose.solver import Solution
from tonnage.fit.fitted import Fitted
from tonnage.fit.fitting import Fitting
from tonnage.fit.prove.rehearsal import Rehearsed
from tonnage.fit.sharding.agreement import Agreement, RankFailed
from tonnage.fit.sharding.shard import Shard
from tonnage.fit.stepping.batches import Weighting
from tonnage.fit.survey.measuring import BlockCall, parameter_bytes
from tonnage.fit.survey.meter import Duration, GpuMeter
from tonnage.fit.survey.resident_state import find_resident_state, tensors_of
from tonnage.fit.survey.stages import Request
from tonnage.fit.survey.survey import SizeProfile, Survey
from tonnage.fit.training import Training

Found = TypeVar("Found")


class AgreedMeter(GpuMeter):
    """A meter whose timed calls are repeated equally often on every rank."""

    def __init__(self, device: torch.device, agreement: Agreement) -> None:
        super().__init__(device)
        self.agreement = agreement

    def _agreed(self, found: Duration) -> Duration:
        return self.agreement.share(found)


class AgreedSurvey(Survey):
    """A survey that uses the first rank's measurements. Running out of memory on one rank alone ends it for all."""

    def __init__(self, training: Training, meter: GpuMeter, agreement: Agreement) -> None:
        super().__init__(training, meter)
        self.agreement = agreement

    def _measure(self, rows: int) -> SizeProfile:
        return self.agreement.share(agreed(self.agreement, lambda: super(AgreedSurvey, self)._measure(rows)))

    def _operator_modes(self, block: nn.Module, call: BlockCall) -> list[str]:
        """Return none: a block's operators include its all-gather, which is not rerun with them."""
        return []

    def find_unrepeatable(self) -> None:
        agreed(self.agreement, super().find_unrepeatable)
        self.unrepeatable, self.sizes = self.agreement.share((self.unrepeatable, self.sizes))

    def detail(self, rows: int) -> None:
        agreed(self.agreement, lambda: super(AgreedSurvey, self).detail(rows))
        self._share_ways()

    def compile_modes(self, rows: int, modes: Collection[str]) -> None:
        agreed(self.agreement, lambda: super(AgreedSurvey, self).compile_modes(rows, modes))
        self._share_ways()

    def _share_ways(self) -> None:
        found = (self._ways_at, self._eager_ways, self.sizes)
        self._ways_at, self._eager_ways, self.sizes = self.agreement.share(found)


def agreed(agreement: Agreement, measure: Callable[[], Found]) -> Found:
    """Return this rank's result once all have theirs; re-raises out-of-memory only if all ranks hit it."""
    try:
        with agreement.together(settled=True):
            found = measure()
    except torch.OutOfMemoryError as error:
        if agreement.shared(error):
            raise
        raise RankFailed(
            agreement.rank, f"{error}, and the others did not: give each rank a card of its own"
        ) from error
    return found


class ShardedFitting(Fitting):
    """A run of fit with one way to shard."""

    def __init__(
        self, training: Training, meter: AgreedMeter, request: Request, shard: Shard, *, measure: bool
    ) -> None:
        super().__init__(training, meter, request, measure=measure)
        self.shard, self.agreement = shard, meter.agreement

    def run(self) -> Fitted:
        with self._all_or_nothing():
            self.request.say(f"sharding: stage {self.shard.stage}{', on the host' if self.shard.offload else ''}")
            self.applied.add([self.shard])
            return super().run()

    def choose(self, budget_bytes: int, host_bytes: int) -> Fitted:
        with self.agreement.together(settled=True):
            budget_bytes, host_bytes = (int(size) for size in self.agreement.smallest(budget_bytes, host_bytes))
            return super().choose(budget_bytes, host_bytes)

    def _new_survey(self) -> Survey:
        return AgreedSurvey(self.training, self.meter, self.agreement)

    def _find_resident_state(self) -> ResidentState:
        whole = find_resident_state(self.training, self.meter, self.survey.blocks, self.request.host_bytes)
        return self.agreement.share(self._of_this_rank(whole))

    def _of_this_rank(self, whole: ResidentState) -> ResidentState:
        """Return this rank's share: shards stay, and one more block is gathered than the one that runs."""
        parameters = list(self.training.model.parameters())
        share = local_bytes(parameters) / parameter_bytes(parameters)
        on_gpu = 0.0 if self.shard.offload else share
        ahead_bytes = max((parameter_bytes(block.parameters()) for block in self.survey.blocks.values()), default=0)
        waiting = 1.0 if self.shard.gradients == "once" else on_gpu  # whole sums wait for the reduction
        held_bytes = local_bytes([*parameters, *tensors_of(self.training.optimizer)])
        besides_bytes = max(0, self.meter.allocated_bytes - (0 if self.shard.offload else held_bytes))
        on_host = int(share * (whole.gradients_bytes + whole.states_bytes + parameter_bytes(parameters)))
        return replace(
            whole,
            parameters_bytes=int(on_gpu * parameter_bytes(parameters)) + ahead_bytes,
            besides_bytes=besides_bytes,
            gradients_bytes=int(waiting * whole.gradients_bytes),
            states_bytes=int(on_gpu * whole.states_bytes),
            outside_gradients_bytes=int(on_gpu * whole.outside_gradients_bytes),
            block_gradients_bytes=tuple(int(on_gpu * size) for size in whole.block_gradients_bytes),
            step_temporary_bytes=int(on_gpu * whole.step_temporary_bytes),
            optimizer_s=share * (whole.host_step_s if self.shard.offload else whole.optimizer_s),
            host_bytes=max(0, whole.host_bytes - on_host) if self.shard.offload else whole.host_bytes,
        )

    def _solve(self, budget_bytes: int, **among: Any) -> Solution | None:
        """Share the first rank's solution: the solver's time limit may end differently on each rank."""
        return self.agreement.share(super()._solve(budget_bytes, **among))

    def _find_weighting(self) -> Weighting:
        """Return "auto": the ranks found it together when the model was sharded."""
        return "auto"

    def _leave_out_culprit(self, solution: Solution, problem: BaseException) -> bool:
        """Never try: what breaks on one rank ends the job on all."""
        return False

    def _smallest_solution(self) -> Solution | None:
        return self.agreement.share(super()._smallest_solution())

    def _rehearse(self) -> Rehearsed:
        found = super()._rehearse()
        allocated, reserved = self.agreement.largest(found.peak_allocated_bytes, found.peak_reserved_bytes)
        return replace(found, peak_allocated_bytes=int(allocated), peak_reserved_bytes=int(reserved))

    def _rehearse_once(self) -> Rehearsed:
        return agreed(self.agreement, super()._rehearse_once)


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that this rank holds."""
    return parameter_bytes(tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
