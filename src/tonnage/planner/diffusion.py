"""Plans for diffusion pipelines: the fastest training that fits, and the fastest image generation that fits.

A plan has its choices, its bytes at the peak and its seconds. Several GPUs train on separate batches (DDP) or generate
separate images.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, product
from math import ceil
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from tonnage.budget import largest
from tonnage.budget.demands import Demand, shortages
from tonnage.budget.diffusion import (
    DiffusionPass,
    Seconds,
    all_weights,
    crossing_s,
    pass_seconds,
    passes,
    streamed_s,
    text_size,
)
from tonnage.budget.terms import Term, total
from tonnage.budget.time.collectives import collective_seconds
from tonnage.budget.training.overheads import NCCL_CONNECTION_BYTES, NCCL_CONNECTIONS, context, workspace
from tonnage.budget.training.states import optimizer_bytes
from tonnage.clock.ranges import comparison_error
from tonnage.errors import BadLayout, RequestError
from tonnage.hardware import Cluster
from tonnage.hardware.cluster import common_clusters
from tonnage.ledger import Category
from tonnage.models.diffusion import Pipeline, Size
from tonnage.planner.training.demands import step_demands
from tonnage.planner.training.search import HEADROOM

Loop = Literal["cached", "frozen"]
Offload = Literal["none", "model", "group", "sequential"]
Kept = Literal["bf16", "fp8", "int8", "nf4"]
TrainedIn = Literal["bf16-mixed", "bf16"]
TrainedBy = Literal["adamw", "adamw-8bit", "lion", "adafactor", "sgd"]
LARGEST = {"micro_batch": 1024, "batch": 1024, "steps": 10_000, "lora_rank": 1024}
_FUSED_NUMBERS = 7  # elements that a fused Adam reads or writes per parameter: parameter, gradient and two states
# Error of a backward pass derived from its forward pass: two steps of SD 1.5 were predicted 6 % and 13 % below captured
# ones.
_TOLD_FROM_FORWARD = 0.15
_PIXEL_BYTES = 3 * 2
# Tiles overlap by a quarter in each direction; decoded pixels are kept until they are joined.
_TILE_STRIDE = 0.75
# Share of transient memory that the caching allocator holds beyond it at its peak: 15 % in the median of fourteen
# trainings on a virtual GPU (3 to 48 %). Between the parts of a pipeline it frees what it must; that value is a guess.
_HOLES = {"training": 0.15, "images": 0.08}
_FROM_HOST = ("model", "group", "sequential")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionRequest:
    """A training request; fields that are None are searched."""

    size: Size
    precision: TrainedIn = "bf16-mixed"
    optimizer: TrainedBy = "adamw"
    lora_rank: int = 0
    base: Kept = "bf16"
    ema: bool = False
    micro_batch: int | None = None
    checkpoint: str | None = None
    text: Loop | None = None
    vae: Loop | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequest:
    """An image generation request; fields that are None are searched."""

    size: Size
    batch: int = 1
    steps: int
    guided: bool
    weights: Kept = "bf16"
    slicing: bool = False
    tiling: bool | None = None
    offload: Offload | None = None


_Request = TypeVar("_Request", DiffusionRequest, ImageRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionPlan:
    """One configuration; `choices` are flags without their dashes."""

    choices: dict[str, str]
    cluster: Cluster
    terms: tuple[Term, ...]
    moment: str
    parts: dict[str, Seconds]
    moved_s: float = 0.0  # over the host link, not overlapped
    images: int = 1  # made in `parts`, on all GPUs
    host_bytes: float = 0.0
    trains: bool = False

    @property
    def total_bytes(self) -> int:
        """Bytes on one GPU."""
        return round(float(total(self.terms)))

    @property
    def peak_allocated_bytes(self) -> int:
        """Bytes of tensors, without context and fragmentation."""
        outside = (Category.CONTEXT, Category.FRAGMENTATION)
        return round(float(total(term for term in self.terms if term.category not in outside)))

    @property
    def demands(self) -> tuple[Demand, ...]:
        """What it needs of a GPU and of a host. Parts are read from mapped files, so loading takes no more than that."""
        return step_demands(self.total_bytes, self.host_bytes, 0, self.cluster)

    @property
    def shortages(self) -> tuple[Demand, ...]:
        """What there is too little of: memory of a GPU or of the host."""
        return shortages(self.demands)

    @property
    def fits(self) -> bool:
        """Whether there is enough of everything: the verdict of reports and exit statuses."""
        return not self.shortages

    @property
    def seconds(self) -> float:
        """Seconds of everything."""
        return sum(part.s for part in self.parts.values()) + self.moved_s

    @property
    def images_per_s(self) -> float:
        """Images per second of all GPUs."""
        return self.images / self.seconds

    @property
    def range_s(self) -> tuple[float, float]:
        """Range of seconds in which nine of ten runs lie."""
        ranges = [part.range_s(self.cluster.gpu) for part in self.parts.values()]
        told = _TOLD_FROM_FORWARD if self.trains else 0.0
        low, high = sum(low for low, _ in ranges), sum(high for _, high in ranges)
        return low * (1 - told) + self.moved_s, high * (1 + told) + self.moved_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionSearch:
    """Search results: the best (or closest) plan, alternatives, and the largest batch that fits."""

    pipeline: Pipeline
    cluster: Cluster
    request: DiffusionRequest | ImageRequest
    plan: DiffusionPlan
    others: tuple[DiffusionPlan, ...] = field(default=())
    most: int = 0
    remedies: "tuple[DiffusionRemedy, ...]" = ()

    @property
    def fits(self) -> bool:
        """Whether any plan fits."""
        return self.plan.fits


class DiffusionRemedy(NamedTuple):
    """A change that makes it fit, as a flag, and the best plan with it."""

    flag: str
    plan: DiffusionPlan


# Training -------------------------------------------------------------------------------------------------------------


def plan_training(pipeline: Pipeline, cluster: Cluster, request: DiffusionRequest) -> DiffusionSearch:
    """Return the fastest plan that fits; within the clock's error, the simplest."""
    check_training(pipeline, cluster, request)
    batches = [request.micro_batch] if request.micro_batch else [1 << power for power in range(9)]
    texts, vaes = ([given] if given else get_args(Loop) for given in (request.text, request.vae))
    space = [
        replace(request, checkpoint=checkpoint, text=text, vae=vae, micro_batch=batch)
        for checkpoint, text, vae, batch in product(_ways(pipeline, request), list(texts), list(vaes), batches)
    ]
    return _searched(pipeline, cluster, request, space, _trained, "micro_batch")


def usual_precision(pipeline: Pipeline) -> TrainedIn:
    """Return FP32 weights under autocast, or BF16 for models not trained that way."""
    return "bf16-mixed" if "full-mixed-checkpoint" in passes(pipeline.denoiser) else "bf16"


def check_training(pipeline: Pipeline, cluster: Cluster, request: DiffusionRequest) -> None:
    """Raise RequestError for an impossible request."""
    _check_numbers(request.micro_batch, "micro_batch")
    if request.lora_rank:
        _check_numbers(request.lora_rank, "lora_rank", flag="--lora")
    if request.base != "bf16" and not request.lora_rank:
        raise BadLayout(f"--base {request.base} freezes all weights, and nothing is trained.", hint="Add --lora 16.")
    if not cluster.gpu.has_bf16:
        hint = "Choose a card that has it: diffusion models are trained in it."
        raise BadLayout(f"{cluster.gpu.name} has no BF16.", hint=hint)
    if not _ways(pipeline, request):
        flags = {"full-mixed": "--checkpoint none", "full-mixed-checkpoint": "--checkpoint full", "lora": "--lora 16",
                 "full-bf16-checkpoint": "--precision bf16 --checkpoint full"}  # fmt: skip
        known = " or ".join(words for way, words in flags.items() if way in passes(pipeline.denoiser))
        raise BadLayout(f"What {pipeline.name} holds when it is trained so is not known.", hint=f"Use {known}.")


def _check_numbers(number: int | None, name: str, flag: str = "") -> None:
    flag = flag or f"--{name.replace('_', '-')}"
    if number is not None and number < 1:
        raise BadLayout(f"{flag} {number}: there must be at least one.", hint=f"Write {flag} 1, or leave it out.")
    if number is not None and number > LARGEST[name]:
        raise BadLayout(f"{flag} {number} is beyond anything that is used.", hint=f"Write at most {LARGEST[name]:,}.")


def _ways(pipeline: Pipeline, request: DiffusionRequest) -> dict[str, DiffusionPass]:
    """Return the denoiser's passes for this kind of training, by what is recomputed."""
    known = passes(pipeline.denoiser)
    name = "lora" if request.lora_rank else f"full-{request.precision.removeprefix('bf16-')}"
    found = {"none": name, "full": f"{name}-checkpoint"}
    wanted = found if request.checkpoint is None else {request.checkpoint: found.get(request.checkpoint, "")}
    return {checkpoint: known[way] for checkpoint, way in wanted.items() if way in known}


def _trained(pipeline: Pipeline, cluster: Cluster, request: DiffusionRequest) -> DiffusionPlan:
    gpu, size, batch, rank = cluster.gpu, request.size, request.micro_batch or 1, request.lora_rank
    weights, forward = all_weights()[pipeline.denoiser], passes(pipeline.denoiser)["forward"]
    checkpoint = request.checkpoint or "none"
    way = _ways(pipeline, request)[checkpoint]
    number_bytes = 2 if request.precision == "bf16" and not rank else 4
    trained = way.adapters * rank if rank else weights.parameters
    # Persistent memory.
    kept = request.base if rank else ("bf16" if number_bytes == 2 else "fp32")
    frozen = "frozen " if rank else ""
    terms = [Term(Category.PARAMETERS, f"{frozen}denoiser", weights.size_bytes(kept), f"parameters in {kept}",
                  {"parameters": weights.parameters})]  # fmt: skip
    if rank:
        terms.append(Term(Category.PARAMETERS, "adapters", 4.0 * trained, "4 × parameters", {"parameters": trained}))
    each = optimizer_bytes(request.optimizer, number_bytes)
    numbers = {"parameters": trained, "bytes": each}
    terms.append(Term(Category.OPTIMIZER_STATES, "optimizer states", each * trained, "parameters × bytes", numbers))
    if request.ema:
        copy = float(number_bytes * trained)
        terms.append(Term(Category.OTHER, "EMA", copy, "a copy of what is trained", {"parameters": trained}))
    if request.text == "frozen":
        terms += [_part_term(name, "bf16") for name in pipeline.text]
    if request.vae == "frozen":
        terms.append(_part_term(pipeline.vae, "fp32" if pipeline.vae_fp32 else "bf16"))
    gradients = float(number_bytes * trained)
    if cluster.gpus > 1:
        terms.append(Term(Category.GRADIENTS, "DDP buckets", gradients, "a copy of the gradients", {}, "model"))
        buffers = float(NCCL_CONNECTION_BYTES * NCCL_CONNECTIONS)
        terms.append(Term(Category.CONTEXT, "NCCL buffers", buffers, source="model"))
    # Transient memory: the highest of the moments.
    shape = {"batch": batch, "positions": size.positions, "rank": rank}
    widened = weights.widened_bytes(kept)
    moments = {
        "forward and backward": Term(Category.ACTIVATIONS, "activations, gradients", way.held_bytes(batch, size, rank) + widened,
                                     "a + b × batch + c × batch × positions", shape, "virtual GPU"),
        "optimizer's step": Term(Category.GRADIENTS, "gradients", gradients, "parameters × bytes", {"bytes": number_bytes}),
    }  # fmt: skip
    parts = {"denoiser": _training_seconds(forward, request, cluster, trained, weights.linear if widened else 0)}
    if request.text == "frozen":
        for name, tokens in pipeline.text.items():
            read = passes(name)["forward"]
            held = read.held_bytes(batch, text_size(tokens))
            moments[f"text encoder {name}"] = Term(Category.ACTIVATIONS, "activations", held, source="virtual GPU")
            seconds = pass_seconds(read, batch, text_size(tokens), gpu)
            parts["text encoders"] = parts.get("text encoders", Seconds()) + seconds
    if request.vae == "frozen":
        encode = passes(pipeline.vae)["encode-fp32" if pipeline.vae_fp32 else "encode"]
        held = encode.held_bytes(batch, size)
        moments["VAE's encoding"] = Term(Category.ACTIVATIONS, "activations", held, source="virtual GPU")
        parts["VAE"] = pass_seconds(encode, batch, size, gpu)
    moment, highest = max(moments.items(), key=lambda item: float(item[1].size_bytes))
    choices = {
        "micro-batch": str(batch), "checkpoint": checkpoint, "text-encoders": request.text or "cached",
        "vae": request.vae or "cached",
    }  # fmt: skip
    return DiffusionPlan(
        choices=choices, cluster=cluster, terms=(*terms, highest, *_overheads(cluster, highest, trains=True)), moment=moment,
        parts=parts, images=batch * cluster.gpus, trains=True,
    )  # fmt: skip


def _training_seconds(
    forward: DiffusionPass, request: DiffusionRequest, cluster: Cluster, trained: int, widened: int
) -> Seconds:
    """Return the seconds of the denoiser's step, its optimizer, and the exposed part of the gradient all-reduce."""
    gpu, batch = cluster.gpu, request.micro_batch or 1
    again = request.checkpoint == "full"
    step = pass_seconds(forward, batch, request.size, gpu, "inputs" if request.lora_rank else "all", again)
    number_bytes = 2 if request.precision == "bf16" and not request.lora_rank else 4
    moved = float(_FUSED_NUMBERS * number_bytes * trained)
    if number_bytes == 4 and not request.lora_rank:
        moved += 12.0 * trained  # autocast reads FP32 weights and writes 16 bits, and casts gradients back
    moved += 2.5 * widened * (3 if again else 2)  # dequantize from four or eight bits to sixteen in every pass
    extra_s = streamed_s(moved, gpu)
    if cluster.gpus > 1:
        reduced_s = collective_seconds(cluster)("all_reduce", number_bytes * trained, cluster.gpus, 1)
        extra_s += max(0.0, reduced_s - step.s / 2)
    return step + Seconds(extra_s, 0.0)


# Making images --------------------------------------------------------------------------------------------------------


def plan_images(pipeline: Pipeline, cluster: Cluster, request: ImageRequest) -> DiffusionSearch:
    """Return the fastest plan that fits; within the clock's error, the one that moves least."""
    check_images(pipeline, cluster, request)
    movable = get_args(Offload) if request.weights in ("bf16", "fp8") else ("none", "model")
    movable = movable if cluster.host_memory_bytes else ("none",)
    tilings = [request.tiling] if request.tiling is not None else [False, True]
    space = [
        replace(request, offload=offload, tiling=tiling)
        for offload in ([request.offload] if request.offload else movable)
        for tiling in tilings
        if not (tiling and request.size.frames > 1)
    ]
    return _searched(pipeline, cluster, request, space, _made, "batch")


def check_images(pipeline: Pipeline, cluster: Cluster, request: ImageRequest) -> None:
    """Raise RequestError for an impossible request."""
    if request.offload in _FROM_HOST and not cluster.host_memory_bytes:
        problem = f"--offload {request.offload}: the memory of {cluster.gpu.name} is its host's own."
        raise BadLayout(problem, hint="Leave --offload out.")
    _check_numbers(request.batch, "batch")
    _check_numbers(request.steps, "steps")
    if request.weights in ("int8", "nf4") and request.offload in ("group", "sequential"):
        hint = "Use --offload model, or leave one of the two out."
        problem = f"--offload {request.offload} cannot move the {request.weights} weights of bitsandbytes."
        raise BadLayout(problem, hint=hint)
    if request.tiling and pipeline.is_video:
        raise BadLayout(f"The VAE of {pipeline.name} goes through a video in turns, and is not tiled here.",
                        hint="Leave --vae-tiling out.")  # fmt: skip


def _made(pipeline: Pipeline, cluster: Cluster, request: ImageRequest) -> DiffusionPlan:
    gpu, size, offload = cluster.gpu, request.size, request.offload or "none"
    guided = request.guided
    at_once = request.batch * (2 if guided and pipeline.guidance == "batch" else 1)
    turns = request.steps * (2 if guided and pipeline.guidance == "passes" else 1)
    prompts = request.batch * (2 if guided else 1)
    # Every part: its format, what its passes hold, and their seconds.
    kept: dict[str, str] = dict.fromkeys((pipeline.denoiser, *pipeline.text), request.weights)
    kept[pipeline.vae] = "fp32" if pipeline.vae_fp32 else "bf16"
    held: dict[str, float] = {}
    parts: dict[str, Seconds] = {}
    for name, tokens in pipeline.text.items():
        held[name] = passes(name)["forward"].held_bytes(prompts, text_size(tokens))
        seconds = pass_seconds(passes(name)["forward"], prompts, text_size(tokens), gpu)
        parts["text encoders"] = parts.get("text encoders", Seconds()) + seconds
    denoiser = passes(pipeline.denoiser)["forward"]
    held[pipeline.denoiser] = denoiser.held_bytes(at_once, size)
    one = pass_seconds(denoiser, at_once, size, gpu)
    if request.weights != "bf16":
        one = one + Seconds(streamed_s(2.5 * all_weights()[pipeline.denoiser].linear, gpu))
    held[pipeline.vae], parts["VAE"] = _decoded(pipeline, cluster, request)
    for name in (pipeline.denoiser, *pipeline.text):
        held[name] += all_weights()[name].widened_bytes(request.weights)
    # Offloading: weights on the GPU beside a part's activations, and transfers.
    resident = {name: _resident(name, kept, offload, name == pipeline.denoiser) for name in kept}
    moved_s = 0.0
    if offload != "none":
        one, moved_s = _moved(pipeline, cluster, kept, offload, one, turns)
    parts["denoiser"] = one * turns
    moment = max(kept, key=lambda name: resident[name] + held[name])
    title = {pipeline.denoiser: "denoising", pipeline.vae: "VAE's decoding"}.get(moment, f"text encoder {moment}")
    # The weights on the GPU at that moment.
    terms = [_part_term(name, how, denoiser=pipeline.denoiser) for name, how in kept.items()]
    if offload != "none":
        how = "the largest layer" if offload == "sequential" else "the part at work"
        if offload == "group" and moment == pipeline.denoiser:
            how = "two blocks, and what is outside of them"
        name = _part_name(moment, pipeline.denoiser)
        terms = [Term(Category.PARAMETERS, f"{name} on the card", resident[moment], how)]
    shape = {"batch": at_once if moment == pipeline.denoiser else request.batch, "positions": size.positions}
    highest = Term(
        Category.ACTIVATIONS, "activations", held[moment], "a + b × batch + c × batch × positions", shape, "virtual GPU"
    )
    whole = sum(all_weights()[name].size_bytes(how) for name, how in kept.items())
    tiling = {"vae-tiling": "on" if request.tiling else "off"}
    return DiffusionPlan(
        choices={"offload": offload, **tiling, "weights": request.weights, "batch": str(request.batch)}, cluster=cluster,
        terms=(*terms, highest, *_overheads(cluster, highest, trains=False)), moment=title, parts=parts, moved_s=moved_s,
        images=request.batch * cluster.gpus, host_bytes=whole if offload in _FROM_HOST else 0.0,
    )  # fmt: skip


def _resident(name: str, kept: dict[str, str], offload: str, is_denoiser: bool) -> float:
    weights, how = all_weights()[name], kept[name]
    each = weights.size_bytes(how) / weights.parameters
    if offload == "none":
        return sum(all_weights()[part].size_bytes(kind) for part, kind in kept.items())
    if offload == "sequential":
        return each * weights.leaf
    if offload == "group" and is_denoiser:
        return each * min(weights.parameters, 2 * weights.block + weights.outside)
    return weights.size_bytes(how)


def _moved(
    pipeline: Pipeline, cluster: Cluster, kept: dict[str, str], offload: str, one: Seconds, turns: int
) -> tuple[Seconds, float]:
    """Return a denoiser pass including overlapped copies, and the seconds of copies that are not overlapped."""
    gpu = cluster.gpu
    sizes = {name: all_weights()[name].size_bytes(how) for name, how in kept.items()}
    others = sum(size for name, size in sizes.items() if name != pipeline.denoiser)
    own = sizes[pipeline.denoiser]
    if offload == "sequential":  # from pageable memory, layer by layer; nothing is copied back
        return one, crossing_s(others, gpu, pinned=False) + turns * crossing_s(own, gpu, pinned=False)
    whole = others + (own if offload == "model" else 0.0)
    moved_s = crossing_s(whole, gpu, pinned=False) + crossing_s(whole, gpu, pinned=False, back=True)
    if offload == "group":  # a separate stream prefetches the next block
        one = Seconds(max(one.card_s, crossing_s(own, gpu, pinned=True)), one.host_s)
    return one, moved_s


def _decoded(pipeline: Pipeline, cluster: Cluster, request: ImageRequest) -> tuple[float, Seconds]:
    decode = passes(pipeline.vae)["decode-fp32" if pipeline.vae_fp32 else "decode"]
    size, gpu = request.size, cluster.gpu
    batch, slices = (1, request.batch) if request.slicing else (request.batch, 1)
    side = 8 * pipeline.tile
    if not request.tiling or (size.height <= side and size.width <= side):
        slices_bytes = _PIXEL_BYTES * size.pixels * (request.batch if request.slicing else 0)
        return decode.held_bytes(batch, size) + slices_bytes, pass_seconds(decode, batch, size, gpu) * slices
    tile = Size(min(size.height, side), min(size.width, side))
    tiles = ceil(size.height / (_TILE_STRIDE * side)) * ceil(size.width / (_TILE_STRIDE * side))
    pixels = _PIXEL_BYTES * (2 if pipeline.vae_fp32 else 1) * request.batch * (size.pixels + tiles * tile.pixels)
    return decode.held_bytes(batch, tile) + pixels, pass_seconds(decode, batch, tile, gpu) * (tiles * slices)


# Both -----------------------------------------------------------------------------------------------------------------


def _part_name(name: str, denoiser: str) -> str:
    return "denoiser" if name == denoiser else "VAE" if name.startswith("vae") else f"text encoder {name}"


def _part_term(name: str, how: str, denoiser: str = "") -> Term:
    weights, title = all_weights()[name], _part_name(name, denoiser)
    numbers = {"parameters": weights.parameters}
    return Term(Category.PARAMETERS, title, weights.size_bytes(how), f"parameters in {how}", numbers)


def _overheads(cluster: Cluster, highest: Term, *, trains: bool) -> list[Term]:
    """Return cuBLAS's workspace per thread, the CUDA context, and fragmentation."""
    both, threads = workspace(cluster.gpu), 2 if trains else 1
    share = _HOLES["training" if trains else "images"]
    size = float(both.size_bytes) * threads / 2
    holes = Term(Category.FRAGMENTATION, "fragmentation", share * float(highest.size_bytes), "share × what comes and goes",
                 {"share": share}, "model")  # fmt: skip
    return [replace(both, size_bytes=size, formula=f"{threads} × bytes"), context(cluster.gpu), holes]


def _searched(
    pipeline: Pipeline, cluster: Cluster, request: _Request, space: list[_Request],
    planned: Callable[[Pipeline, Cluster, _Request], DiffusionPlan], batch: str,
) -> DiffusionSearch:  # fmt: skip
    """Plan every request of the space: the best plan, those beside it, and the largest batch that fits."""
    plans = [planned(pipeline, cluster, each) for each in space]
    fitting = [plan for plan in plans if plan.fits]
    if fitting:
        roomy = [plan for plan in fitting if plan.total_bytes <= (1 - HEADROOM) * plan.cluster.gpu.memory_bytes]
        least = max(plan.images_per_s for plan in roomy or fitting) * (1 - comparison_error())
        quick = [plan for plan in roomy or fitting if plan.images_per_s >= least]
        # Plans come simplest first, and batches from small to large.
        best = min(quick, key=lambda plan: plan.choices.get("checkpoint", "none") != "none")
    else:
        best = min(
            plans,
            key=lambda plan: (sum(demand.missing_bytes for demand in plan.shortages), plan.total_bytes),
        )
    # The best plan with each other value of a single choice; for batches, half and double.
    others: list[DiffusionPlan] = []
    for name, value in best.choices.items():
        near = (int(value) // 2, 2 * int(value)) if name == "micro-batch" else ()
        others += [
            plan
            for plan in plans
            if plan.choices[name] != value
            and {**plan.choices, name: value} == best.choices
            and (not near or int(plan.choices[name]) in near)
        ]
    kept = space[plans.index(best)]

    def fits(count: int) -> bool:
        changed: dict[str, Any] = {batch: count}
        return planned(pipeline, cluster, replace(kept, **changed)).fits

    most = largest(1, LARGEST["batch"], fits) if best.fits else 0
    return DiffusionSearch(
        pipeline=pipeline, cluster=cluster, request=request, plan=best, others=tuple(others), most=most
    )


# What would fit --------------------------------------------------------------------------------------------------------

_MOST_REMEDIES = 4
_RELEASED = {
    "micro_batch": "--micro-batch {}", "checkpoint": "--checkpoint {}", "text": "--text-encoders {}", "vae": "--vae {}",
    "offload": "--offload {}",
}  # fmt: skip


def remedies(findings: DiffusionSearch) -> tuple[DiffusionRemedy, ...]:
    """Return single changes that make it fit, the mildest first, and the smallest common GPU that is enough."""
    pipeline, cluster, request = findings.pipeline, findings.cluster, findings.request
    helpful: Iterator[DiffusionRemedy] = _helpful(pipeline, _changes(cluster, request))
    others = ((f"--gpus {each.name}", each, request) for each in common_clusters(cluster.gpu.maker) if each.gpus == 1)
    cards = _helpful(pipeline, ((flag, each.as_stated(cluster.stated), asked) for flag, each, asked in others))
    return (*islice(helpful, _MOST_REMEDIES), *islice(cards, 1))


_Candidate = tuple[str, Cluster, DiffusionRequest | ImageRequest]


def _helpful(pipeline: Pipeline, candidates: Iterator[_Candidate]) -> Iterator[DiffusionRemedy]:
    """Yield the candidates that fit. In a flag, `{}` stands for the value found."""
    for flag, cluster, request in candidates:
        with suppress(RequestError):
            if isinstance(request, ImageRequest):
                plan = plan_images(pipeline, cluster, request).plan
            else:
                plan = plan_training(pipeline, cluster, request).plan
            if plan.fits:
                yield DiffusionRemedy(
                    flag.format(plan.choices.get(flag.removeprefix("--").partition(" ")[0], "")), plan
                )


def _changes(cluster: Cluster, request: DiffusionRequest | ImageRequest) -> Iterator[_Candidate]:
    """Yield given flags that are left to the search, and leaner ways of doing the same."""
    for name, flag in _RELEASED.items():
        if getattr(request, name, None) is not None:
            released: dict[str, Any] = {name: None}
            yield flag, cluster, replace(request, **released)
    if isinstance(request, ImageRequest):
        yield "--vae-tiling", cluster, replace(request, tiling=True)
        yield "--vae-slicing", cluster, replace(request, slicing=True)
        if request.batch > 1:
            yield f"--batch {request.batch // 2}", cluster, replace(request, batch=request.batch // 2)
        for weights in ("fp8", "nf4"):
            kept: Any = weights
            yield f"--weights {weights}", cluster, replace(request, weights=kept)
        return
    if request.ema:
        yield "no --ema", cluster, replace(request, ema=False)
    if not request.lora_rank:
        yield "--optimizer adamw-8bit", cluster, replace(request, optimizer="adamw-8bit")
        yield "--precision bf16", cluster, replace(request, precision="bf16")
        yield "--lora 16", cluster, replace(request, lora_rank=16)
    elif request.base == "bf16":
        yield "--base nf4", cluster, replace(request, base="nf4")
