"""`fit` over the ranks of a mesh: every rank does the same, from what they agreed on.

Ranks may pass different samples, of which the first rank's is measured, and different budgets, of which the smallest
counts. On a GPU stage 2 is tried before stage 3, and that before offloading to the host: the first that fits is the
fastest. A timed call is repeated equally often on every rank, since each repetition gathers parameters from all of
them; the first rank's measurements count for all, while shard sizes are those of this rank. It does not know how FSDP2
wraps a model or how a choice is made.
"""

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tonnage.errors import RequestError
from tonnage.fit.checks import check_loss_function, check_model, check_sample
from tonnage.fit.choose.placement import ResidentState
from tonnage.fit.choose.solver import DoesNotFit, Solution
from tonnage.fit.fitted import Fitted, apply_plan
from tonnage.fit.fitting import Fitting, allowed_names
from tonnage.fit.plan import FitPlan, given_plan
from tonnage.fit.prove.rehearsal import Rehearsed
from tonnage.fit.sharding.agreement import Agreement, RankFailed
from tonnage.fit.sharding.shard import Shard, mesh_device
from tonnage.fit.sharding.wrapping import reshard
from tonnage.fit.stepping.batches import Weighting, change_tensors, tensors
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.survey.measuring import BlockCall, parameter_bytes
from tonnage.fit.survey.meter import Duration, GpuMeter
from tonnage.fit.survey.resident_state import find_resident_state, tensors_of
from tonnage.fit.survey.stages import Request
from tonnage.fit.survey.survey import SizeProfile, Survey
from tonnage.fit.training import Batch, Loss, Training
from tonnage.hardware.host_memory import free_host_bytes
from tonnage.units import budget_bytes

Found = TypeVar("Found")

# Fastest first: gathered once; gathered twice, with sharded gradient sums; shards on the host.
_CHOICES = (Shard(stage=2), Shard(stage=3, gradients="each"), Shard(stage=3, gradients="each", offload=True))


def fit_on_mesh(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    loss: Loss,
    sample: Batch,
    mesh: DeviceMesh,
    shard: Shard | None = None,
    budget: str | int | None = None,
    host: str | int | None = None,
    exact: bool = True,
    allow: Sequence[str] = (),
    without: Sequence[str] = (),
    clip_norm: float | None = None,
    plan: FitPlan | str | Path | None = None,
    measure: bool = True,
    verbose: bool = False,
) -> Fitted:
    """Shard a training over the ranks of a mesh and fit each of them. Call it on all ranks.

    Other arguments are those of `tonnage.fit`.

    | argument | means                                                                         |
    |----------|-------------------------------------------------------------------------------|
    | `mesh`   | 1-D, or 2-D: replicas × shards (hybrid sharding)                              |
    | `shard`  | how to shard (default: on a GPU the fastest way that fits, elsewhere stage 3) |
    | `budget` | per rank; on the CPU without a budget or plan, the model is only sharded      |
    """
    check_mesh(mesh)
    agreement = Agreement(mesh)
    try:
        with agreement.together(settled=True):
            training = _training(model, optimizer, loss, sample, agreement, clip_norm)
            plan = None if plan is None else given_plan(plan)
            allowed = allowed_names(exact, allow, without)
            _check_alike([repr(shard), plan and plan.to_json(), sorted(allowed), measure], agreement)
            if plan is None and (training.device.type == "cuda" or budget is not None):
                meter = AgreedMeter(training.device, agreement)
                gpu_bytes = budget_bytes(budget, meter.free_bytes())
                ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # as torchrun reports it
                host_bytes = budget_bytes(host, free_host_bytes() // ranks_here, name="host", least_bytes=0)
                gpu_bytes, host_bytes = (int(size) for size in agreement.smallest(gpu_bytes, host_bytes))
                request = Request(
                    budget_bytes=gpu_bytes,
                    host_bytes=host_bytes,
                    allowed=allowed - set(Shard.conflicts),
                    say=print if verbose and agreement.first else lambda _: None,
                    measure=measure,
                )
                fitted = _choose(training, meter, request, (shard,) if shard else _CHOICES)
            else:
                fitted = apply_plan(training, _sharding_plan(plan, shard, training.device))
                if plan is not None and measure:
                    fitted.not_proven = "ranks prove together: call fitted.prove(batch) on all of them."
            reshard(model)  # the last trial may have been a forward alone
    except BaseException:
        agreement.close()
        raise
    fitted.afterwards(agreement.close)
    return fitted


def _check_alike(asked: Sequence[Any], agreement: Agreement) -> None:
    """Check that ranks apply the same plan, sharding and techniques; only budgets may differ."""

    def jsonable(value: Any) -> Any:
        return dict(value) if isinstance(value, Mapping) else getattr(value, "__qualname__", repr(value))

    found = agreement.gather(json.dumps(asked, default=jsonable))
    other = next((place for place, words in enumerate(found) if words != found[0]), None)
    if other is not None:
        raise RequestError(
            f"Ranks {agreement.members[0]} and {agreement.members[other]} ask for different plans, shardings or techniques.",
            hint="Call fit with the same arguments on every rank; only the sample and the budgets may differ.",
        )


def check_mesh(mesh: Any) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise RequestError(
            f"mesh= takes a DeviceMesh, and got {type(mesh).__name__}.",
            hint='Make one: torch.distributed.device_mesh.init_device_mesh("cuda", (ranks,)).',
        )
    if mesh.ndim > 2:
        raise RequestError(
            f"The mesh has {mesh.ndim} dimensions, and sharding knows one, or two: replicas × shards.",
            hint='Give the part of it that data is divided over: mesh["replicate", "shard"].',
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise RequestError(
            "The dimensions of the mesh have no names, and FSDP2 replicates over the first and shards over the second.",
            hint='Name them: init_device_mesh(kind, (replicas, shards), mesh_dim_names=("replicate", "shard")).',
        )
    if mesh.get_coordinate() is None:
        raise RequestError(
            f"Rank {dist.get_rank()} is not part of the mesh.", hint="Call fit on the ranks of the mesh only."
        )


def _training(
    model: nn.Module, optimizer: Optimizer, loss: Loss, sample: Batch, agreement: Agreement, clip_norm: float | None
) -> Training:
    check_model(model, optimizer)
    check_loss_function(loss, model, sample)
    device, found = mesh_device(agreement.mesh), next(model.parameters()).device
    if found.type not in (device.type, "cpu"):
        raise RequestError(
            f"The model is on {found}, and the mesh is of {device.type!r}.",
            hint="Make the model on the CPU: its blocks are moved one at a time as they are sharded.",
        )
    check_sample(sample, device)
    # Every rank measures on the first rank's rows, so that all run the same collectives.
    host = change_tensors(sample, lambda tensor: tensor.detach().cpu()) if agreement.first else None
    on_host = [tensor.device.type == "cpu" for tensor in tensors(sample)]
    # Keep CPU tensors beside GPU tensors on the CPU.
    lengths = iter(on_host if not all(on_host) else [False] * len(on_host))
    sample = change_tensors(agreement.share(host), lambda t: t if next(lengths) else t.to(device))
    stepper = Stepper(optimizer, clip_norm=clip_norm)
    return Training(model, optimizer, loss, sample, device, stepper, mesh=agreement.mesh, agreement=agreement)


def _sharding_plan(plan: FitPlan | None, shard: Shard | None, device: torch.device) -> FitPlan:
    """Return the plan with its sharding: one made for one GPU is sharded as requested, one that shards stays."""
    if plan is not None:
        planned = [technique for technique in plan.techniques if isinstance(technique, Shard)]
        if planned and shard is not None and planned[0] != shard:
            raise RequestError("The plan shards in another way than shard= says.", hint="Leave shard= out.")
        return plan if planned else replace(plan, techniques=(shard or Shard(), *plan.techniques))
    return FitPlan(  # sharding alone, nothing measured
        techniques=(shard or Shard(),),
        device=device.type,
        torch=torch.__version__,
        batch_rows=0,
        budget_bytes=0,
        host_budget_bytes=0,
        peak_bytes=0,
        step_s=0.0,
        plain_peak_bytes=0,
        plain_step_s=0.0,
    )


def _choose(training: Training, meter: "AgreedMeter", request: Request, choices: Sequence[Shard]) -> Fitted:
    for shard in choices[:-1]:
        with suppress(DoesNotFit):
            return ShardedFitting(training, meter, request, shard).run()
    return ShardedFitting(training, meter, request, choices[-1]).run()


# Measuring -------------------------------------------------------------------------------------------------------------


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

    def __init__(self, training: Training, meter: AgreedMeter, request: Request, shard: Shard) -> None:
        super().__init__(training, meter, request)
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
        """Return this rank's share: shards stay, and one more block is gathered than the one that runs."""
        whole = find_resident_state(self.training, self.meter, self.survey.blocks, self.request.host_bytes)
        parameters = list(self.training.model.parameters())
        share = local_bytes(parameters) / parameter_bytes(parameters)
        on_gpu = 0.0 if self.shard.offload else share
        ahead_bytes = max((parameter_bytes(block.parameters()) for block in self.survey.blocks.values()), default=0)
        waiting = 1.0 if self.shard.gradients == "once" else on_gpu  # whole sums wait for the reduction
        held_bytes = local_bytes([*parameters, *tensors_of(self.training.optimizer)])
        besides_bytes = max(0, self.meter.allocated_bytes - (0 if self.shard.offload else held_bytes))
        on_host = int(share * (whole.gradients_bytes + whole.states_bytes + parameter_bytes(parameters)))
        own = replace(
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
        return self.agreement.share(own)

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
    return parameter_bytes(tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
