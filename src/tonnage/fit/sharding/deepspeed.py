"""`tonnage.fit(..., engine="deepspeed")`: let DeepSpeed run a training according to its own config.

ZeRO 1, 2 and 3, ZeRO-Offload and ZeRO-Infinity are all in the config, which `tonnage plan train --export` writes.
This module divides and weights batches, so that a step equals that of one process on all ranks' batches, and reports
a rank's failure to the others. Nothing is measured or chosen: a budget belongs to the plan.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from tonnage.errors import MissingPart, RequestError
from tonnage.fit.checks import check_model, check_sample
from tonnage.fit.sharding.agreement import Agreement
from tonnage.fit.sharding.ranks import Ranks
from tonnage.fit.stepping.batches import MicroBatch, Weighting, change_tensors
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.training import Batch, Loss, Training
from tonnage.fit.weighting import find_weighting
from tonnage.untrusted import Unreadable, parse_json, read_bytes

_OFFLOAD = ("cpu", "nvme")
_MOST_BYTES = 16 * 2**20


def fit_with_deepspeed(
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    loss: Loss,
    sample: Batch,
    config: Mapping[str, Any] | str | Path,
    weighting: Weighting = "auto",
) -> "EngineFitted":
    """Let DeepSpeed run a training. Call it on all ranks.

    | argument    | means                                                                        |
    |-------------|------------------------------------------------------------------------------|
    | `optimizer` | your optimizer; None: the one that the config describes                      |
    | `config`    | DeepSpeed's settings, or the file that holds them                            |
    | `weighting` | the weight of a rank's loss: as for micro-batches, or "ranks" (all the same) |
    """
    settings = read_config(config)
    _check_optimizer(optimizer, settings)
    if find_spec("deepspeed") is None:
        raise MissingPart('engine="deepspeed" needs DeepSpeed, which is not installed.', hint="pip install deepspeed")
    if optimizer is not None:
        check_model(model, optimizer)
    deepspeed = import_module("deepspeed")
    if not dist.is_initialized():
        deepspeed.init_distributed()
    kind = deepspeed.get_accelerator().device_name()
    agreement = Agreement(init_device_mesh(kind, (dist.get_world_size(),)))
    try:
        with agreement.together(settled=True):
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            engine = deepspeed.initialize(
                model=model, optimizer=optimizer, model_parameters=parameters, config=dict(settings)
            )[0]
            # The engine is the training's model: calling it gathers sharded parameters.
            check_sample(sample, engine.device)
            first = change_tensors(sample, lambda tensor: tensor.detach().cpu()) if agreement.first else None
            sample = change_tensors(agreement.share(first), lambda tensor: tensor.to(engine.device))
            device, stepper = torch.device(engine.device), Stepper(engine.optimizer)
            training = Training(engine, engine.optimizer, loss, sample, device, stepper, agreement=agreement)
            training.micro_batches = engine.gradient_accumulation_steps()
            return EngineFitted(engine, agreement, training, weighting)
    except BaseException:
        agreement.close()
        raise


def read_config(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """Return the settings; raises RequestError if the file holds none."""
    if isinstance(config, Mapping):
        return config
    hint = "Give DeepSpeed's settings, or the deepspeed.json that tonnage plan train --export wrote."
    try:
        found = parse_json(read_bytes(Path(config), _MOST_BYTES))
    except Unreadable as error:
        raise RequestError(f"{config} {error}.", hint=hint) from None
    if not isinstance(found, dict):
        raise RequestError(f"{config} holds no settings.", hint=hint)
    return found


def _check_optimizer(optimizer: Optimizer | None, settings: Mapping[str, Any]) -> None:
    """Require exactly one source of the optimizer, and DeepSpeed's own if states are on the host."""
    described = "optimizer" in settings
    if optimizer is None and not described:
        raise RequestError(
            "The config describes no optimizer, and none was given.", hint="Give one, or add the config's section."
        )
    if optimizer is not None and described:
        raise RequestError(
            f"The config describes an optimizer, and {type(optimizer).__name__} was given besides.",
            hint="Give None for the optimizer, or take the section out of the config.",
        )
    place = settings.get("zero_optimization", {}).get("offload_optimizer", {}).get("device")
    forced = place in _OFFLOAD and settings.get("zero_force_ds_cpu_optimizer", True)
    if optimizer is not None and forced and not type(optimizer).__module__.startswith("deepspeed"):
        raise RequestError(
            f"States on the host are stepped by DeepSpeed's own optimizer, not by {type(optimizer).__name__}.",
            hint='Give None and describe it in the config, or set "zero_force_ds_cpu_optimizer": false there.',
        )


class EngineRanks(Ranks):
    """Ranks whose steps are the engine's."""

    def compute(self, training: Training, parts: list[MicroBatch]) -> Tensor:
        engine: Any = training.model
        total = torch.zeros((), device=training.device)
        for part in parts:
            loss = part.weigh(training.loss(engine, part.batch))
            engine.backward(loss, scale_wrt_gas=False)  # the parts' weights already sum to one
            engine.step()
            total = total + loss.detach()
        return total


class EngineFitted:
    """A training that DeepSpeed runs. `engine` is DeepSpeed's own object, for checkpoints and anything else."""

    def __init__(self, engine: Any, agreement: Agreement, training: Training, weighting: Weighting) -> None:
        self.engine, self.training = engine, training
        found = find_weighting(training, resampled=True, by_losses=True) if weighting == "auto" else weighting
        training.weighting = "rows" if found == "ranks" else found
        self.ranks = EngineRanks(agreement, found)
        self.ranks.least_parts = training.micro_batches

    @property
    def model(self) -> nn.Module:
        """The caller's model, with its parameters as DeepSpeed stores them."""
        module: nn.Module = self.engine.module
        return module

    @property
    def optimizer(self) -> Any:
        return self.engine.optimizer

    def step(self, batch: Batch) -> Tensor:
        """Take one optimizer step on every rank's batch and return the loss over all of them."""
        return self.ranks.take_step(self.training, batch)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Wrap a loop whose number of batches may differ between ranks: finished ranks keep stepping with the others."""
        with self.ranks.agreement.telling():
            yield
        while self.ranks.follow(self.training):
            pass

    def close(self) -> None:
        """Remove DeepSpeed's hooks and buffers; the process group stays."""
        self.ranks.agreement.close()
        self.engine.destroy()
