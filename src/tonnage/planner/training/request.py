"""A training request: every fixed choice, and `None` for every one left to the planner.

`check` refuses impossible requests before anything is searched.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain

from tonnage.budget.serving.weights import WEIGHT_FORMATS
from tonnage.budget.training.adapters import ALL_LINEAR, EXPERTS, Base, lora_parameters
from tonnage.budget.training.configuration import (
    AttentionKernel,
    FrameworkName,
    Loss,
    Optimizer,
    OptimizerKernel,
    Place,
    Precision,
)
from tonnage.budget.training.objectives import NEXT_TOKEN, Objective, Reference, objective_names, objective_of
from tonnage.errors import BadLayout
from tonnage.hardware.cluster import Cluster
from tonnage.models.shape import ModelShape
from tonnage.planner import divisors
from tonnage.planner.training.lengths import Lengths

# Tokens per step if no batch was asked for: what models of a few billion parameters are tuned with.
DEFAULT_STEP_TOKENS = 2**19
# Sequences per step for adapters: recipes of torchtune (2 × 16) and axolotl (2 × 4 per GPU) have 8 to 32.
ADAPTER_SEQUENCES = 32
_DEGREES = ("tp", "pp", "cp", "ep", "shard", "pp_chunks")
# 4-bit checkpoints on which adapters are trained, and formats that trainers dequantize to 16 bits.
_BASES, _TURNED_BACK = ("int4", "nf4"), ("fp8", "mxfp4")
_LARGEST = {"seq": 2**24, "micro_batch": 2**16, "global_batch": 2**24} | dict.fromkeys(_DEGREES, 2**20)
# The ZeRO stages that a framework supports: plain torch has `ZeroRedundancyOptimizer`.
FRAMEWORK_STAGES: dict[FrameworkName, tuple[int, ...]] = {
    "torch": (0, 1),
    "fsdp2": (2, 3),
    "deepspeed": (0, 1, 2, 3),
    "megatron": (0, 1),
    "nanotron": (0, 1),
}
# Frameworks with interleaved schedules: Megatron's virtual stages, PyTorch's `ScheduleInterleaved1F1B`.
INTERLEAVED: tuple[FrameworkName, ...] = ("megatron", "fsdp2")
# Frameworks that train on other objectives than the next token.
_TRAINERS = ("torch", "fsdp2", "deepspeed")
_MOST_NEGATIVES = 4096
# Vocabularies of one tokenizer are padded to different lengths, by less than this share.
_PADDING = 0.01
_CHECKPOINT = re.compile(r"none|selective|full|every-[1-9][0-9]{0,3}")


@dataclass(frozen=True, slots=True)
class Offload:
    """Where everything that can be offloaded is stored."""

    optimizer: Place = "gpu"
    parameters: Place = "gpu"
    activations: Place = "gpu"

    @property
    def on_drives(self) -> bool:
        """Whether anything is offloaded to drives."""
        return "nvme" in (self.optimizer, self.parameters, self.activations)

    @property
    def words(self) -> str:
        """The value as `--offload` takes it."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        parts = [name if place == "host" else f"{name}:{place}" for name, place in named.items() if place != "gpu"]
        return ",".join(parts) or "none"


NO_OFFLOAD = Offload()


def parse_offload(text: str) -> Offload:
    """Parse "optimizer", "optimizer,parameters", "optimizer:nvme", "all" or "none"."""
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
    """Fixed choices; fields that are `None` are searched."""

    seq: int
    precision: Precision = "bf16-mixed"
    optimizer: Optimizer = "adamw"
    attention: AttentionKernel = "flash"
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ALL_LINEAR
    base: Base = "16-bit"
    compile: bool = False
    liger: bool = False
    paged: bool = False
    step_in_backward: bool = False
    bf16_gradients: bool = False
    bf16_moments: bool = False
    compile_loss: bool = True
    wide_logits: bool = False
    tiled_mlp: bool = False
    dropout: bool = False
    lora_dropout: bool = False
    logit_share: float = 1.0
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
    pp_chunks: int = 1
    shard: int | None = None
    sequence_parallel: bool = True
    framework: FrameworkName | None = None
    offload: Offload | None = None
    drives: bool = True  # hosts have some
    lengths: Lengths | None = None  # of samples, if they differ: `seq` is where they are truncated
    objective: Objective = NEXT_TOKEN

    def step_sequences(self, gpus: int) -> int:
        """Return samples per step: as asked, or by `DEFAULT_STEP_TOKENS` or `ADAPTER_SEQUENCES`, at least one per GPU."""
        if self.global_batch is not None:
            return self.global_batch
        padded = self.lengths is not None and self.lengths.batching != "pack"
        tokens = self.lengths.mean if self.lengths is not None and padded else self.seq
        usual = ADAPTER_SEQUENCES if self.lora_rank else DEFAULT_STEP_TOKENS / tokens
        share = max(usual / self.objective.sequences / gpus, 1)
        return (1 << round(math.log2(share))) * gpus  # a power of two per GPU, which micro-batches divide


def asked_objective(
    name: str, *, adapters: bool, reference: Reference | None = None, teacher: ModelShape | None = None,
    teacher_base: Base | None = None, negatives: int | None = None, grad_cache: bool = False,
) -> Objective:  # fmt: skip
    """Return the objective with its options; raises RequestError for those that do not apply."""
    row = objective_of(name)
    if reference and not row.reference:
        having = ", ".join(other for other in objective_names() if objective_of(other).reference)
        raise BadLayout(f"--reference {reference}: {name} has no reference.", hint=f"Leave it out; {having} have one.")
    if reference == "adapters-off" and not adapters:
        hint = "Add --lora 16, or write --reference copy."
        raise BadLayout("--reference adapters-off: no adapters are trained.", hint=hint)
    if name == "distill" and teacher is None:
        hint = "Add --teacher MODEL, like --teacher llama-3.1-70b."
        raise BadLayout("--objective distill takes a teacher.", hint=hint)
    if name != "distill" and (teacher is not None or teacher_base):
        flag = "--teacher" if teacher is not None else "--teacher-weights"
        raise BadLayout(f"{flag}: {name} has no teacher.", hint="Add --objective distill, or leave it out.")
    if name != "contrastive" and (negatives is not None or grad_cache):
        flag = "--grad-cache" if grad_cache else "--negatives"
        raise BadLayout(f"{flag}: {name} compares no pairs of a batch.", hint="Add --objective contrastive.")
    if negatives is not None and not 0 <= negatives <= _MOST_NEGATIVES:
        problem = f"--negatives {negatives}: a pair has between 0 and {_MOST_NEGATIVES:,} of its own."
        raise BadLayout(problem, hint="Write --negatives 7, say.")
    how: Reference | None = reference or ("adapters-off" if adapters else "copy") if row.reference else None
    return replace(
        row, sequences=row.sequences + (negatives or 0), how=how, teacher=teacher, teacher_base=teacher_base or "16-bit",
        grad_cache=grad_cache,
    )  # fmt: skip


def for_checkpoint(request: TrainingRequest, shape: ModelShape) -> TrainingRequest:
    """Adapt the request to the checkpoint's format: 4 bits are a base for adapters, other integers can only be served.

    FP8 and MXFP4 are dequantized to 16 bits while loading, as trainers do.
    """
    kept = shape.dtype
    if kept not in WEIGHT_FORMATS or not WEIGHT_FORMATS[kept].quantized or kept in _TURNED_BACK:
        return request
    if kept not in _BASES:
        problem = f"A checkpoint in {kept} is made to be served: its weights cannot be trained."
        raise BadLayout(problem, hint=f"Train {shape.name} itself, in 16 bits, and quantise what comes out.")
    if not request.lora_rank:
        hint = f"Add --lora 16 to train adapters on it, or train {shape.name} itself, in 16 bits."
        raise BadLayout(f"Weights in {kept} cannot be trained themselves: they are a base for adapters.", hint=hint)
    return replace(request, base="nf4") if request.base == "16-bit" else request


def for_cluster(request: TrainingRequest, cluster: Cluster) -> TrainingRequest:
    """Adapt the request to the GPUs: FP16 mixed precision without BF16 support, no offload search with unified memory."""
    if request.precision == "bf16-mixed" and not cluster.gpu.has_bf16:
        request = replace(request, precision="fp16-mixed" if "fp16" in cluster.gpu.rates else "fp32")
    if request.offload is None and not cluster.host_memory_bytes:
        request = replace(request, offload=NO_OFFLOAD)
    return request


def check(request: TrainingRequest, shape: ModelShape, cluster: Cluster) -> None:
    """Raise RequestError for an impossible request."""
    for problem, hint in chain(
        _misfits_of_flags(request, cluster),
        () if request.objective.plain else _misfits_of_objective(request, shape),
        _misfits_of_model(request, shape),
        _misfits_of_framework(request, shape),
        _misfits_of_gpus(request, cluster.gpus),
    ):
        raise BadLayout(problem, hint=hint)


def _misfits_of_flags(request: TrainingRequest, cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Yield problem and hint for flags that are wrong by themselves or on these GPUs."""
    for name in ("seq", "micro_batch", "global_batch", *_DEGREES):
        number, flag = getattr(request, name), f"--{name.replace('_', '-')}"
        if number is not None and number < 1:
            yield f"{flag} {number}: there must be at least one.", f"Write {flag} 1, or leave it out."
        if number is not None and number > _LARGEST[name]:
            yield f"{flag} {number} is beyond anything that is trained.", f"Write at most {_LARGEST[name]:,}."
    if request.base != "16-bit" and not request.lora_rank:
        yield f"--base {request.base} freezes all weights, and nothing is trained.", "Add --lora 16."
    if request.checkpoint is not None and not _CHECKPOINT.fullmatch(request.checkpoint):
        hint = "Write none, selective, full or every-2 (each second block)."
        yield f"--checkpoint {request.checkpoint} is not a way to recompute.", hint
    if request.precision in ("bf16", "bf16-mixed") and not cluster.gpu.has_bf16:
        yield f"{cluster.gpu.name} has no BF16.", "Use --precision fp16-mixed, or leave it out."
    if request.paged and request.offload is not None and request.offload.optimizer != "gpu":
        yield "Paged states leave the GPU by themselves.", "Leave optimizer out of --offload."
    if request.step_in_backward:
        # Each backward pass must yield whole gradients of a whole step.
        early = "--step-in-backward frees gradients as they come:"
        if request.lora_rank:
            yield f"{early} adapters have few gradients.", "Leave one of the two out."
        if (request.pp or 1) > 1:
            yield f"{early} a pipeline adds up those of its micro-batches.", "Leave --pp out."
        if cluster.gpus > 1 and request.framework != "fsdp2":
            yield f"{early} only FSDP2 hands them over one by one.", "Add --framework fsdp2."
    if request.offload is not None and request.offload.on_drives and not request.drives:
        yield f"--offload {request.offload.words}, and --drive none.", "Leave :nvme out, or give --drive 7g/s."


def _misfits_of_objective(request: TrainingRequest, shape: ModelShape) -> Iterator[tuple[str, str]]:
    """Yield layouts and models that do not support an objective other than next-token prediction."""
    objective, name = request.objective, request.objective.name
    split = next((flag for flag in ("tp", "pp", "cp", "ep") if (getattr(request, flag) or 1) > 1), None)
    if split is not None:
        problem = f"--{split} with --objective {name}: trainers for it shard the model, and do not split it."
        yield problem, "Leave it out, or write --zero 3."
    if request.framework not in (None, *_TRAINERS):
        hint = f"Choose {', '.join(_TRAINERS)}, or leave it out."
        yield f"--framework {request.framework} trains on next tokens, not by {name}.", hint
    writes = shape.decoder.causal or objective.teacher is not None
    if objective.has_logits and not (shape.logits and shape.vocab and writes):
        problem = f"--objective {name} takes a model that writes, and {shape.name} does not."
        yield problem, "Choose classify or contrastive, or leave it out."
    if not objective.has_logits and request.loss != "full":
        yield f"--loss {request.loss}: {name} has no scores over a vocabulary to make in parts.", "Leave --loss out."
    teacher = objective.teacher
    if teacher is not None and abs(teacher.vocab - shape.vocab) > _PADDING * shape.vocab:
        words = f"{shape.name} has {shape.vocab:,} words, {teacher.name} {teacher.vocab:,}"
        yield f"{words}: their scores cannot be compared.", "Choose a teacher with the same tokenizer."
    if objective.sees_whole_batch and request.micro_batch and request.global_batch:
        hint = "Leave one of them out, or add --grad-cache."
        yield "--micro-batch with --global-batch: the pairs of a batch go through in one pass.", hint


def _misfits_of_model(request: TrainingRequest, shape: ModelShape) -> Iterator[tuple[str, str]]:
    """Yield what the model does not allow."""
    layers, experts = layer_count(shape), expert_count(shape)
    for count in head_counts(shape):
        if request.tp and count % request.tp:
            problem = f"--tp {request.tp} does not divide the {count} attention heads of {shape.name}."
            yield problem, f"Choose {', '.join(map(str, divisors(count)))}."
    if shape.fixed_tokens and request.seq != shape.fixed_tokens:
        yield f"--seq {request.seq}: {shape.name} sees {shape.fixed_tokens} tokens of every image.", "Leave --seq out."
    if shape.learned_positions and request.seq > shape.max_positions:
        problem = f"--seq {request.seq}: {shape.name} has learned {shape.max_positions} positions and no more."
        yield problem, f"Write --seq {shape.max_positions} at most."
    if request.lengths is not None and (request.cp or 1) > 1:
        yield "--lengths: sequences of many lengths are planned without --cp.", "Leave one of the two out."
    if request.lengths is not None and (shape.fixed_tokens or len(shape.stacks) > 1):
        yield f"--lengths: samples of {shape.name} are not text alone.", "Write --seq, and --images where it sees some."
    if request.lora_rank > shape.hidden:
        yield f"--lora {request.lora_rank} is wider than {shape.name} itself, {shape.hidden}.", "Write --lora 16, say."
    if shape.unfrozen is not None:
        if (request.pp or 1) > 1:
            yield "--freeze: frozen parts are planned without a pipeline.", "Leave --pp out."
        if request.framework in ("megatron", "nanotron"):
            yield f"--freeze: {request.framework} is planned to train all of a model.", "Leave --framework out."
        if request.lora_rank and not sum(lora_parameters(shape, request.lora_rank, request.lora_targets)):
            problem = "--lora with --freeze: every layer is frozen, and adapters stand beside those of layers."
            yield problem, "Freeze fewer parts, or leave --lora out."
    if request.lora_rank and EXPERTS in request.lora_targets and not experts:
        yield f"--lora-targets experts: {shape.name} has no experts.", "Leave experts out."
    if request.pp and request.pp > layers:
        yield f"--pp {request.pp}: {shape.name} has {layers} layers.", f"Choose at most {layers} stages."
    if request.cp and request.seq % request.cp:
        yield f"--cp {request.cp} does not divide --seq {request.seq}.", "Choose a divisor of the sequence."
    if request.ep and request.ep > 1 and not experts:
        yield f"--ep {request.ep}: {shape.name} has no experts.", "Leave --ep out."
    if request.ep and experts and experts % request.ep:
        problem = f"--ep {request.ep} does not divide the {experts} experts of {shape.name}."
        yield problem, f"Choose {', '.join(map(str, divisors(experts)))}."


def _misfits_of_framework(request: TrainingRequest, shape: ModelShape) -> Iterator[tuple[str, str]]:
    """Yield what the framework does not run, and flags that need another one."""
    chunks, layers = request.pp_chunks, layer_count(shape)
    if chunks > 1 and request.framework not in INTERLEAVED:
        yield "--pp-chunks takes a framework that interleaves stages.", f"Add --framework {' or '.join(INTERLEAVED)}."
    if chunks > 1 and (request.pp is None or request.pp == 1):
        yield "--pp-chunks divides the stages of a pipeline.", "Add --pp 4, say."
    elif chunks > 1 and request.pp and request.pp * chunks > layers:
        problem = f"--pp {request.pp} --pp-chunks {chunks}: {shape.name} has {layers} layers."
        yield problem, f"Choose at most {layers // request.pp} chunks."
    if request.bf16_moments or request.bf16_gradients:
        # 16-bit gradients and moments beside an FP32 master are Megatron's optimizer.
        flag = "--bf16-moments" if request.bf16_moments else "--bf16-gradients"
        if request.framework != "megatron":
            hint = "Add --framework megatron, or leave it out."
            yield f"{flag} is Megatron's: others keep them as they are made.", hint
        if request.precision != "bf16-mixed" or request.lora_rank:
            yield f"{flag} needs an FP32 master beside BF16 parameters.", "Train all of it with --precision bf16-mixed."
        if request.bf16_moments and (request.zero != 1 or request.optimizer not in ("adam", "adamw")):
            yield "--bf16-moments is a sharded Adam's in Megatron.", "Add --zero 1 --optimizer adamw."
    if not request.compile_loss and not request.compile:
        yield "--eager-loss goes with a compiled model.", "Add --compile, or leave --eager-loss out."
    if request.lora_dropout and not request.lora_rank:
        yield "--lora-dropout: no adapters are trained.", "Add --lora 16, or leave --lora-dropout out."


def _misfits_of_gpus(request: TrainingRequest, gpus: int) -> Iterator[tuple[str, str]]:
    """Yield degrees that do not divide the GPUs, shards that leave ranks over, and batches that ranks cannot share."""
    product = (request.tp or 1) * (request.pp or 1) * (request.cp or 1)
    ranks = gpus // product  # at most
    if gpus % product:
        asked = " × ".join(f"{name} {getattr(request, name)}" for name in ("tp", "pp", "cp") if getattr(request, name))
        near = [str(number) for number in divisors(gpus)][-6:]
        yield f"{asked} = {product} does not divide {gpus} GPUs.", f"Choose a product of {', '.join(near)}."
    if request.ep and gpus // (request.pp or 1) % request.ep:
        yield f"--ep {request.ep} does not divide the {gpus // (request.pp or 1)} GPUs of a stage.", "Choose a divisor."
    if request.framework and request.zero is not None and request.zero not in FRAMEWORK_STAGES[request.framework]:
        stages = ", ".join(map(str, FRAMEWORK_STAGES[request.framework]))
        yield f"--framework {request.framework} does not run ZeRO {request.zero}.", f"It runs --zero {stages}."
    if request.shard and ranks % request.shard:
        problem = f"--shard {request.shard} does not divide the {ranks} ranks that keep the same."
        yield problem, f"Choose {', '.join(map(str, divisors(ranks)))}."
    batch, micro = request.global_batch, request.micro_batch or 1
    free = [name for name in ("tp", "pp", "cp") if getattr(request, name) is None]
    shared = divisors(ranks) if free else [ranks]
    if batch is not None and not any(batch % (number * micro) == 0 for number in shared):
        unit = shared[0] * micro
        near_batch = max(unit, round(batch / unit) * unit)
        share = f"the data-parallel ranks of {gpus} GPUs" if free else f"{ranks} data-parallel ranks"
        problem = f"--global-batch {batch} cannot be shared by {share} in micro-batches of {micro}."
        yield problem, f"Choose a multiple of {unit}: {near_batch}, say."


def head_counts(shape: ModelShape) -> set[int]:
    """Return the attention head counts of every kind of layer."""
    layers = (layer for stack in shape.stacks for layer in stack.layers)
    return {mixer.heads for layer in layers for mixer in (layer.attention, layer.cross_attention) if mixer}


def layer_count(shape: ModelShape) -> int:
    """Return the number of layers in all stacks."""
    return sum(len(stack.layers) for stack in shape.stacks)


def expert_count(shape: ModelShape) -> int:
    """Return the experts per layer, 0 for dense models."""
    mlps = (layer.feed_forward for stack in shape.stacks for layer in stack.layers)
    return max((mlp.experts for mlp in mlps if mlp is not None), default=0)
