"""What was asked of the planner: every choice that is fixed, and `None` for every one that is left to it.

`check` refuses what cannot be, before anything is searched. This module does not search.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

from tonnage.budget.configuration import (
    AttentionKernel,
    FrameworkName,
    Loss,
    Optimizer,
    OptimizerKernel,
    Place,
    Precision,
)
from tonnage.errors import BadLayout
from tonnage.hardware.cluster import Cluster
from tonnage.models.shape import ModelShape

# A step of about this many tokens where no batch was asked for: what models of a few billion parameters are tuned with.
DEFAULT_STEP_TOKENS = 2**19
_DEGREES = ("tp", "pp", "cp", "ep", "shard")
_LARGEST = {"seq": 2**24, "micro_batch": 2**16, "global_batch": 2**24} | dict.fromkeys(_DEGREES, 2**20)
# The ZeRO stages that a framework runs: plain torch has `ZeroRedundancyOptimizer`.
FRAMEWORK_STAGES: dict[FrameworkName, tuple[int, ...]] = {
    "torch": (0, 1),
    "fsdp2": (2, 3),
    "deepspeed": (0, 1, 2, 3),
    "megatron": (0, 1),
    "nanotron": (0, 1),
}
_CHECKPOINT = re.compile(r"none|selective|full|every-[1-9][0-9]{0,3}")


@dataclass(frozen=True, slots=True)
class Offload:
    """Where each thing lives that can leave the GPU."""

    optimizer: Place = "gpu"
    parameters: Place = "gpu"
    activations: Place = "gpu"

    @property
    def words(self) -> str:
        """As it is written after `--offload`."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        parts = [name if place == "host" else f"{name}:{place}" for name, place in named.items() if place != "gpu"]
        return ",".join(parts) or "none"


NO_OFFLOAD = Offload()


def parse_offload(text: str) -> Offload:
    """ "optimizer", "optimizer,parameters", "optimizer:nvme", "all", "none"."""
    if text == "none":
        return NO_OFFLOAD
    names = [field.name for field in fields(Offload)]
    places: dict[str, Place] = {}
    for part in text.split(","):
        name, _, place = part.strip().partition(":")
        chosen = names if name == "all" else [name]
        if not set(chosen) <= set(names) or place not in ("", "host", "nvme"):
            hint = "Write optimizer, parameters, activations or all, each with :host or :nvme after it, or none."
            raise BadLayout(f"--offload {text}: {part!r} cannot be offloaded.", hint=hint)
        places |= dict.fromkeys(chosen, "nvme" if place == "nvme" else "host")
    return Offload(**places)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """Choices that are fixed; `None` is searched."""

    seq: int
    precision: Precision = "bf16-mixed"
    optimizer: Optimizer = "adamw"
    attention: AttentionKernel = "flash"
    lora_rank: int = 0
    quantized_base: bool = False
    compile: bool = False
    micro_batch: int | None = None
    global_batch: int | None = None
    optimizer_kernel: OptimizerKernel | None = None
    checkpoint: str | None = None
    loss: Loss | None = None
    zero: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    shard: int | None = None
    sequence_parallel: bool = True
    framework: FrameworkName | None = None
    offload: Offload | None = None

    def step_sequences(self, gpus: int) -> int:
        """Sequences in a step: as asked, or about `DEFAULT_STEP_TOKENS`, and one for each GPU at least."""
        if self.global_batch is not None:
            return self.global_batch
        return max(-(-DEFAULT_STEP_TOKENS // (self.seq * gpus)), 1) * gpus


def check(request: TrainingRequest, shape: ModelShape, cluster: Cluster) -> None:
    """Refuse what cannot be: what was asked, what was found, what to write instead."""
    _check_numbers(request)
    if request.checkpoint is not None and not _CHECKPOINT.fullmatch(request.checkpoint):
        hint = "Write none, selective, full or every-2 (each second block)."
        raise BadLayout(f"--checkpoint {request.checkpoint} is not a way to recompute.", hint=hint)
    for problem, hint in _misfits(request, shape, cluster):
        raise BadLayout(problem, hint=hint)


def _check_numbers(request: TrainingRequest) -> None:
    for name in ("seq", "micro_batch", "global_batch", *_DEGREES):
        number, flag = getattr(request, name), f"--{name.replace('_', '-')}"
        if number is not None and number < 1:
            raise BadLayout(f"{flag} {number}: there must be at least one.", hint=f"Write {flag} 1, or leave it out.")
        if number is not None and number > _LARGEST[name]:
            hint = f"Write at most {_LARGEST[name]:,}."
            raise BadLayout(f"{flag} {number} is beyond anything that is trained.", hint=hint)
    if request.quantized_base and not request.lora_rank:
        raise BadLayout("--qlora trains adapters, and there are none.", hint="Add --lora 16.")


def _misfits(request: TrainingRequest, shape: ModelShape, cluster: Cluster) -> Iterator[tuple[str, str]]:
    """What does not divide, as problem and hint."""
    yield from _misfits_of_model(request, shape)
    gpus = cluster.gpus
    product = (request.tp or 1) * (request.pp or 1) * (request.cp or 1)
    if gpus % product:
        asked = " × ".join(f"{name} {getattr(request, name)}" for name in ("tp", "pp", "cp") if getattr(request, name))
        near = [str(number) for number in divisors(gpus)][-6:]
        yield f"{asked} = {product} does not divide {gpus} GPUs.", f"Choose a product of {', '.join(near)}."
    if request.ep and gpus // (request.pp or 1) % request.ep:
        yield f"--ep {request.ep} does not divide the {gpus // (request.pp or 1)} GPUs of a stage.", "Choose a divisor."
    yield from _misfits_of_sharding(request, gpus // product)
    yield from _misfits_of_batch(request, gpus // product, gpus)


def _misfits_of_sharding(request: TrainingRequest, most_ranks: int) -> Iterator[tuple[str, str]]:
    """A ZeRO stage that its framework does not have, and shards that leave ranks over."""
    if request.framework and request.zero is not None and request.zero not in FRAMEWORK_STAGES[request.framework]:
        stages = ", ".join(map(str, FRAMEWORK_STAGES[request.framework]))
        yield f"--framework {request.framework} does not run ZeRO {request.zero}.", f"It runs --zero {stages}."
    if request.shard and most_ranks % request.shard:
        near = ", ".join(str(number) for number in divisors(most_ranks))
        problem = f"--shard {request.shard} does not divide the {most_ranks} ranks that keep the same."
        yield problem, f"Choose {near}."


def _misfits_of_model(request: TrainingRequest, shape: ModelShape) -> Iterator[tuple[str, str]]:
    heads, layers, experts = head_counts(shape), layer_count(shape), expert_count(shape)
    for count in heads:
        if request.tp and count % request.tp:
            fitting = ", ".join(str(number) for number in divisors(count))
            yield (
                f"--tp {request.tp} does not divide the {count} attention heads of {shape.name}.",
                f"Choose {fitting}.",
            )
    if request.lora_rank > shape.hidden:
        yield f"--lora {request.lora_rank} is wider than {shape.name} itself, {shape.hidden}.", "Write --lora 16, say."
    if request.pp and request.pp > layers:
        yield f"--pp {request.pp}: {shape.name} has {layers} layers.", f"Choose at most {layers} stages."
    if request.cp and request.seq % request.cp:
        yield f"--cp {request.cp} does not divide --seq {request.seq}.", "Choose a divisor of the sequence."
    if request.ep and request.ep > 1 and not experts:
        yield f"--ep {request.ep}: {shape.name} has no experts.", "Leave --ep out."
    if request.ep and experts and experts % request.ep:
        fitting = ", ".join(str(number) for number in divisors(experts))
        yield f"--ep {request.ep} does not divide the {experts} experts of {shape.name}.", f"Choose {fitting}."


def _misfits_of_batch(request: TrainingRequest, most_ranks: int, gpus: int) -> Iterator[tuple[str, str]]:
    """A batch that no number of data-parallel ranks can share evenly."""
    batch, micro = request.global_batch, request.micro_batch or 1
    if batch is None:
        return
    free = [name for name in ("tp", "pp", "cp") if getattr(request, name) is None]
    ranks = [most_ranks] if not free else divisors(most_ranks)
    if not any(batch % (number * micro) == 0 for number in ranks):
        unit = ranks[0] * micro if free else most_ranks * micro
        near = max(unit, round(batch / unit) * unit)
        share = f"{most_ranks} data-parallel ranks" if not free else f"the data-parallel ranks of {gpus} GPUs"
        problem = f"--global-batch {batch} cannot be shared by {share} in micro-batches of {micro}."
        yield problem, f"Choose a multiple of {unit}: {near}, say."


def head_counts(shape: ModelShape) -> set[int]:
    """Attention heads, of every kind of layer."""
    mixers = (
        mixer for stack in shape.stacks for layer in stack.layers for mixer in (layer.attention, layer.cross_attention)
    )
    return {mixer.heads for mixer in mixers if mixer is not None}


def layer_count(shape: ModelShape) -> int:
    """Of all stacks."""
    return sum(len(stack.layers) for stack in shape.stacks)


def expert_count(shape: ModelShape) -> int:
    """Experts of a layer, 0 where it is dense."""
    mlps = (layer.feed_forward for stack in shape.stacks for layer in stack.layers)
    return max((mlp.experts for mlp in mlps if mlp is not None), default=0)


def divisors(number: int) -> list[int]:
    """In order."""
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})
