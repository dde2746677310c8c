"""Sharding: parameters, gradients and optimizer states divided over the ranks of a mesh, by FSDP2.

A 1-D mesh shards over all of its ranks; a 2-D mesh shards over the second dimension and replicates over the first
(hybrid sharding). Blocks are gathered one at a time. Other techniques see plain parameters inside each block's
forward; those that handle parameters or their steps themselves are refused.
"""

import gc
from contextlib import ExitStack, nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy

from tonnage.fit.modules import find_blocks, why_not_blocks
from tonnage.fit.sharding.agreement import Agreement
from tonnage.fit.sharding.ranks import RANKS, Ranks
from tonnage.fit.sharding.wrapping import Plain, forget_step, reshard, retarget, sharded_like, whole
from tonnage.fit.stepping.batches import WEIGHTINGS, Weighting, is_weighting
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.technique import NotApplicable, Technique
from tonnage.fit.training import Training, set_attributes
from tonnage.fit.weighting import find_weighting

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Elementwise optimizers step shards as they step tensors; these do not.
_WHOLE_STEPS = {
    "Adafactor": "its moments are means over whole rows and columns",
    "LBFGS": "its step runs the loss again, and searches along one vector of all parameters",
}


class Shard(Technique, name="shard"):
    """Shards a training over the ranks of a mesh with FSDP2.

    | setting     | means                                                                                           |
    |-------------|-------------------------------------------------------------------------------------------------|
    | `stage`     | 3: blocks are unsharded only while they run; 2: from forward to backward, and gathered once     |
    | `blocks`    | modules to gather one at a time (default: the repeated blocks)                                  |
    | `dtype`     | compute dtype ("bfloat16"); shards keep their own, gradients are reduced in FP32                |
    | `offload`   | keep shards, gradients and states on the host; the optimizer steps there                        |
    | `gradients` | micro-batches: "once" reduces whole sums at the end; "each" adds to shards and uses less memory |
    | `weighting` | the weight of a rank's loss: as for micro-batches, or "ranks" (all the same)                    |
    """

    stage: int = 3
    blocks: tuple[str, ...] = ()
    dtype: str = ""
    offload: bool = False
    gradients: str = "once"
    weighting: Weighting = "auto"

    def why_not(self, training: Training) -> str | None:
        if training.mesh is None:
            return "there is no mesh of ranks: give mesh="
        if training.applied:
            return f"{training.applied[0]} is in place already, and sharding comes first"
        if self.stage not in (2, 3):
            return f"stage={self.stage!r}: FSDP2 has stages 2 and 3; engine='deepspeed' has stage 1"
        if self.dtype and self.dtype not in DTYPES:
            return f"dtype={self.dtype!r} is none of {', '.join(DTYPES)}"
        if self.gradients not in ("once", "each"):
            return f'gradients= takes "once" or "each", not {self.gradients!r}'
        known_weightings = ("auto", RANKS, *WEIGHTINGS)
        if self.weighting not in known_weightings and not is_weighting(self.weighting):
            return f"{self.weighting!r} is no weighting; known are {', '.join(known_weightings)}, or a function."
        if self.blocks and (wrong := why_not_blocks(training.model, self.blocks)):
            return wrong
        # No parameter may be shared by two groups, or have no dimensions.
        owners: dict[int, str] = {}
        blocks = self._blocks(training.model)
        for name, parameter in training.model.named_parameters(remove_duplicate=False):
            owner = next((block for block in blocks if name.startswith(f"{block}.")), "")
            if owners.setdefault(id(parameter), owner) != owner:
                return f"{name} is shared by blocks that are gathered apart"
            if not parameter.dim():
                return (
                    f"{name} is a parameter without dimensions, which FSDP2 cannot divide: "
                    "make it one of one element, torch.ones(1)"
                )
        for name in (kind.__name__ for kind in type(training.optimizer).__mro__):
            if name in _WHOLE_STEPS:
                return f"{name} cannot step shards: {_WHOLE_STEPS[name]}. AdamW, SGD and the like can"
        kinds = training.mesh.get_group(0)._device_types
        if self.offload and training.stepper.clip_norm is not None and torch.device("cpu") not in kinds:
            return (
                "gradients on the host are clipped over the host's own backend, and the process group has none: "
                'init_process_group("cpu:gloo,cuda:nccl")'
            )
        return None

    def _blocks(self, model: nn.Module) -> tuple[str, ...]:
        return self.blocks or tuple(find_blocks(model))

    def place(self, training: Training, stack: ExitStack) -> None:
        model, optimizer, agreement = training.model, training.optimizer, training.agreement
        assert training.mesh is not None and agreement is not None
        device = mesh_device(training.mesh)
        with torch.no_grad():
            agreement.copy_from_first([*model.parameters(), *model.buffers()], device)
        plain, blocks = Plain(model), self._blocks(model)
        stack.callback(_take_off, training, agreement, plain)
        narrow = DTYPES[self.dtype] if self.dtype else None
        host = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        plain.wrap(
            model,
            blocks,
            keep_blocks=self.stage == 2,
            mesh=training.mesh,
            mp_policy=MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32 if narrow else None),
            offload_policy=host if self.offload else OffloadPolicy(),
        )
        sharded = dict(model.named_parameters(remove_duplicate=False))
        retarget(optimizer, {plain.parameters[name]: new for name, new in sharded.items()}, sharded_like)
        assert isinstance(model, FSDPModule)
        if self.gradients == "each":
            # Gradient accumulation asks the model how to postpone the reduction: not at all.
            stack.callback(set_attributes(model, no_sync=nullcontext))
        stack.callback(training.replace_stepper(ShardStepper(model, training.stepper)))
        # Run the first rank's sample on every rank, so that all find the same weighting.
        weighting = self.weighting
        if weighting == "auto":
            try:
                weighting = find_weighting(training, resampled=True, by_losses=True, narrow=narrow)
            except NotApplicable as problem:
                hint = 'Let every rank\'s loss count the same: Shard(weighting="ranks").'
                raise NotApplicable(str(problem), hint=hint) from None
        training.ranks = Ranks(agreement, weighting)


def _take_off(training: Training, agreement: Agreement, plain: Plain) -> None:
    if not agreement.meet():
        return  # the job is over, and other ranks' shards are lost
    reshard(training.model)
    sharded = dict(training.model.named_parameters(remove_duplicate=False))
    gradients = {name: whole(new.grad) for name, new in sharded.items() if new.grad is not None}
    plain.unwrap(training.model)
    plain_of = {sharded[name]: old for name, old in plain.parameters.items()}
    retarget(training.optimizer, plain_of, lambda value, old: whole(value).to(old.device))
    for name, gradient in gradients.items():
        plain.parameters[name].grad = gradient.to(plain.devices[name])
    training.ranks = None
    del sharded, gradients, plain_of
    gc.collect()  # FSDP2's states form reference cycles that hold the shards


class ShardStepper(Stepper):
    """Steps shards: the norm is over all shards, and a failed step leaves FSDP2 ready for the next."""

    def __init__(self, model: nn.Module, inner: Stepper) -> None:
        super().__init__(inner.optimizer, clip_norm=inner.clip_norm)
        self.model = model

    def finish(self) -> None:
        super().finish()
        if self.gradient_norm is not None:
            self.gradient_norm = whole(self.gradient_norm)

    def abandon(self) -> None:
        forget_step(self.model)
        super().abandon()


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """Return the device that this rank computes on."""
    kind = mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
