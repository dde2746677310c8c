"""Peak memory while loading, before the first step: of the host by rank, and of a GPU.

| loader                                         | on the host                               | on a GPU, beside what it keeps  |
|------------------------------------------------|-------------------------------------------|---------------------------------|
| plain PyTorch, DeepSpeed below ZeRO 3          | every rank builds the whole model         |                                 |
| FSDP2 as accelerate sets it up                 | every rank reads it, all but the first    | one whole tensor                |
|                                                | of a host copy it                         |                                 |
| DeepSpeed's `zero.Init`                        | each rank's part in 16 bits, for a moment | one whole tensor                |
| FSDP2 with a pipeline or experts, Megatron     | one tensor at a time of each rank's part  |                                 |
| a base quantized while it is read, vLLM        | pages of the file                         | one matrix in 16 bits           |

Safetensors are memory-mapped: a tensor used in its stored dtype is file pages, which all ranks of a host share and the OS may
drop. Upcast tensors are the rank's own memory. The facts are from the sources of transformers 5.17, accelerate 1.15, DeepSpeed
0.19 and vLLM, which until 0.15 had the whole model on the GPU before quantizing it. `benchmarks/plan_loading.py` compares them
with runs. Loading time is not modelled.

With `cpu_ram_efficient_loading` only the first rank of a host needs weights, but transformers 5 reads them on all ranks, then
allocates zeros of the same size on the others (transformers#43749); what was read lives until all zeros exist. DeepSpeed's ZeRO 3
moves the shards of parameters to the host and back to make them contiguous.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tonnage.budget.demands import Demand
from tonnage.budget.serving.weights import WEIGHT_FORMATS
from tonnage.budget.training.adapters import largest_matrix
from tonnage.ledger import Category
from tonnage.models.shape import ModelShape

if TYPE_CHECKING:
    from tonnage.budget.serving.memory import ServingBudget
    from tonnage.budget.training.configuration import Configuration, Quantity
    from tonnage.hardware import Cluster

Way = Literal["every rank", "first rank", "own part", "split", "mapped"]
_HALF_BYTES = 2
# Formats that a server quantizes to while loading; others need files that are already quantized.
_QUANTIZED_ON_LOADING = {"vllm": ("fp8", "nf4"), "sglang": ("fp8",), "tonnage": ("fp8", "int8")}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingSizes:
    """Peak bytes while loading: of a host's first rank, of each of its others, and of the fullest GPU.

    Plain numbers for one configuration, or one number for each of many. `in_parts`: each rank reads its own part of the
    model; otherwise all is loaded in the way `way`.
    """

    way: Way
    in_parts: Any
    first_rank_bytes: "Quantity"
    other_rank_bytes: "Quantity"
    card_bytes: "Quantity"

    def demands(self, cluster: "Cluster") -> tuple[Demand, ...]:
        """Return what loading needs of a host and of a GPU."""
        host_bytes = self.first_rank_bytes + (cluster.gpus_per_host - 1) * self.other_rank_bytes
        return loading_demands(host_bytes, self.card_bytes, cluster, cluster.gpu.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Peak bytes while loading: of each rank of one host, of the files, and of the fullest GPU."""

    way: Way
    host_bytes_by_rank: tuple[int, ...]
    checkpoint_bytes: int
    card_bytes: int

    @property
    def host_bytes(self) -> int:
        """Bytes on one host, without file pages."""
        return sum(self.host_bytes_by_rank)

    def demands(self, cluster: "Cluster", room_bytes: int | None = None) -> tuple[Demand, ...]:
        """Return what loading needs of a host and of a GPU, of which `room_bytes` are free (default: all)."""
        room = cluster.gpu.memory_bytes if room_bytes is None else room_bytes
        return loading_demands(self.host_bytes, self.card_bytes, cluster, room)


def loading_demands(
    host_bytes: "Quantity", card_bytes: "Quantity", cluster: "Cluster", room_bytes: int
) -> tuple[Demand, ...]:
    """Return the demands of loading; with unified memory, host and GPU count together."""
    gpus = cluster.gpus_per_host
    if not cluster.host_memory_bytes:
        both = card_bytes + host_bytes / gpus
        return (Demand(part="loading on the GPU", needed_bytes=both, available_bytes=room_bytes),)
    host = Demand(
        part="loading on the host", needed_bytes=host_bytes, available_bytes=cluster.host_memory_bytes, gpus=gpus
    )
    return host, Demand(part="loading on the GPU", needed_bytes=card_bytes, available_bytes=room_bytes)


def training_loading(shape: ModelShape, config: "Configuration", cluster: "Cluster") -> Loading:
    """Return the loading of one configuration with plain numbers, as its framework loads a checkpoint."""
    sizes = loading_sizes(shape, config, cluster)
    others = (round(float(sizes.other_rank_bytes)),) * (cluster.gpus_per_host - 1)
    by_rank = (round(float(sizes.first_rank_bytes)), *others)
    way: Way = "own part" if sizes.in_parts else sizes.way
    return Loading(
        way=way if any(by_rank) else "mapped",
        host_bytes_by_rank=by_rank,
        checkpoint_bytes=checkpoint_bytes(shape),
        card_bytes=round(float(sizes.card_bytes)),
    )


def loading_sizes(shape: ModelShape, config: "Configuration", cluster: "Cluster") -> LoadingSizes:
    """Return the loading of one configuration or of each of many."""
    import numpy as np

    from tonnage.budget.terms import total
    from tonnage.budget.training.overheads import context, nccl
    from tonnage.budget.training.states import stages

    way = _way_of_whole(config)
    # Trainers that split the model read parts. accelerate has no pipeline and splits no experts; torchtitan builds its
    # parts on the meta device.
    degrees = {"first rank": (config.pp, config.ep), "every rank": (config.tp, config.pp, config.ep)}.get(way, ())
    in_parts: Any = way == "own part"
    for degree in degrees:
        in_parts = in_parts | (np.asarray(degree) > 1)
    kept: Quantity = 0.0
    for end in stages(shape, config):
        kept = np.maximum(kept, np.round(total(end.kept_parameters)))
    on_card = kept if config.parameter_place == "gpu" else 0.0
    if config.quantized_base and config.framework == "fsdp2":
        # bitsandbytes weights cannot be moved back to the meta device, so they are whole before they are sharded.
        on_card = round(shape.parameters * config.base_bytes)
    # Bytes per weight as loaded: FP32 for mixed-precision training, 16 bits if frozen.
    width = config.compute_bytes if config.lora_rank else config.parameter_bytes
    # On the host, a rank holds the whole model if it builds it, or its part if parameters stay there.
    whole = shape.parameters * width if width != stored_bytes(shape) else 0
    stays = kept if config.parameter_place == "host" else 0.0
    first = others = stays
    if way == "every rank":
        # DeepSpeed casts the parameters to 16 bits while they are on the host.
        narrowed = config.framework == "deepspeed" and width > config.compute_bytes
        cast = largest_tensor(shape) * config.compute_bytes if narrowed else 0
        first = others = np.maximum(whole, stays) + cast
    elif way == "split":
        part = shape.parameters * config.compute_bytes // config.shard
        first = others = part if config.parameter_place != "host" else stays
    elif way == "first rank":
        first, others = whole + stays, whole + shape.parameters * width + stays
    own = largest_tensor(shape) * width // config.tp + stays
    # What is briefly on the GPU: a tensor before it is sharded or quantized.
    passing = width * largest_tensor(shape) if way in ("first rank", "split") else 0
    if config.quantized_base:
        passing = _HALF_BYTES * largest_matrix(shape)
    outside = np.round(float(context(cluster.gpu).size_bytes) + nccl(config).size_bytes)
    return LoadingSizes(
        way=way,
        in_parts=in_parts,
        first_rank_bytes=np.where(in_parts, own, first),
        other_rank_bytes=np.where(in_parts, own, others),
        card_bytes=on_card + np.where(in_parts, 0, passing) + outside,
    )


def _way_of_whole(config: "Configuration") -> Way:
    """Return the way in which a framework loads a model that is not split over GPUs."""
    if config.quantized_base:
        return "mapped"
    if config.framework in ("megatron", "nanotron"):
        return "own part"
    if config.framework == "fsdp2":
        return "first rank"
    return "split" if config.framework == "deepspeed" and config.zero == 3 else "every rank"


def serving_loading(shape: ModelShape, budget: "ServingBudget", gpus_per_host: int) -> Loading:
    """Return the loading of a server, which copies mapped tensors to the GPU one by one and may quantize them."""
    from tonnage.budget.serving.vllm import find_release

    asked, ledger = budget.configuration, budget.ledger
    form = WEIGHT_FORMATS[asked.weights]
    kept, passing = ledger[Category.PARAMETERS], 0
    narrower = form.quantized and 8 * stored_bytes(shape) > form.bits
    quantizes = narrower and asked.weights in _QUANTIZED_ON_LOADING.get(asked.engine, ())
    if quantizes:
        passing = _HALF_BYTES * largest_matrix(shape) // asked.tp
        if asked.engine == "vllm" and asked.weights == "fp8" and find_release(asked.engine_version).quantizes_whole:
            passing = max(_HALF_BYTES * shape.parameters // asked.gpus - kept, 0)
    stored = round(shape.parameters * form.bits / 8) if narrower and not quantizes else checkpoint_bytes(shape)
    card, ranks = kept + passing + ledger[Category.CONTEXT], min(gpus_per_host, asked.gpus)
    return Loading(way="mapped", host_bytes_by_rank=(0,) * ranks, checkpoint_bytes=stored, card_bytes=card)


def stored_bytes(shape: ModelShape) -> float:
    """Return the bytes per weight in the files."""
    return WEIGHT_FORMATS[shape.dtype].bits / 8 if shape.dtype in WEIGHT_FORMATS else _HALF_BYTES


def checkpoint_bytes(shape: ModelShape) -> int:
    """Return the bytes of the files, without scales."""
    return round(shape.parameters * stored_bytes(shape))


def largest_tensor(shape: ModelShape) -> int:
    """Return the weights of the largest parameter: the embedding, or all experts of a block with fused gate and up."""
    mlps = [(layer.feed_forward, stack.hidden) for stack in shape.stacks for layer, _ in stack.groups()]
    experts = [(1 + mlp.gated) * mlp.experts * hidden * mlp.intermediate for mlp, hidden in mlps if mlp]
    return max([shape.vocab * shape.hidden, largest_matrix(shape), *experts])
