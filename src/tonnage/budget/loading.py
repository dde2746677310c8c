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
from typing import TYPE_CHECKING, Literal

from tonnage.budget.serving.weights import WEIGHT_FORMATS
from tonnage.budget.training.adapters import largest_matrix
from tonnage.ledger import Category
from tonnage.models.shape import ModelShape

if TYPE_CHECKING:
    from tonnage.budget.serving.memory import ServingBudget
    from tonnage.budget.training.configuration import Configuration
    from tonnage.hardware import Cluster

Way = Literal["every rank", "first rank", "own part", "split", "mapped"]
_HALF_BYTES = 2
# Formats that a server quantizes to while loading; others need files that are already quantized.
_QUANTIZED_ON_LOADING = {"vllm": ("fp8", "nf4"), "sglang": ("fp8",), "tonnage": ("fp8", "int8")}


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

    def too_large_for(self, cluster: "Cluster") -> Literal["", "host", "card"]:
        """Return which of host and card it exceeds; with unified memory, both together count."""
        memory = cluster.host_memory_bytes
        if memory and self.host_bytes > memory:
            return "host"
        shared = 0 if memory else self.host_bytes
        return "card" if self.card_bytes + shared > cluster.gpu.memory_bytes else ""


def training_loading(shape: ModelShape, config: "Configuration", cluster: "Cluster") -> Loading:
    """Return the loading of one configuration with plain numbers, as its framework loads a checkpoint."""
    from tonnage.budget.terms import total
    from tonnage.budget.training.overheads import context, nccl
    from tonnage.budget.training.states import stages

    way: Way = "every rank" if max(config.tp, config.pp, config.ep) == 1 else "own part"
    if config.framework in ("megatron", "nanotron"):
        way = "own part"
    elif config.framework == "fsdp2":
        # accelerate has no pipeline and splits no experts; torchtitan builds its parts on the meta device.
        way = "own part" if max(config.pp, config.ep) > 1 else "first rank"
    elif config.framework == "deepspeed" and config.zero == 3:
        way = "split"
    way = "mapped" if config.quantized_base else way
    part = round(float(max([total(end.kept_parameters) for end in stages(shape, config)])))
    on_card = part if config.parameter_place == "gpu" else 0
    if config.quantized_base and config.framework == "fsdp2":
        # bitsandbytes weights cannot be moved back to the meta device, so they are whole before they are sharded.
        on_card = round(shape.parameters * config.base_bytes)
    outside = float(context(cluster.gpu).size_bytes) + float(nccl(config).size_bytes)
    # Bytes per weight as loaded: FP32 for mixed-precision training, 16 bits if frozen.
    width = config.compute_bytes if config.lora_rank else config.parameter_bytes
    # On the host, a rank holds the whole model if it builds it, or its part if parameters stay there.
    whole, ranks = shape.parameters * width if width != stored_bytes(shape) else 0, cluster.gpus_per_host
    stays = part if config.parameter_place == "host" else 0
    by_rank = (stays,) * ranks
    if way == "every rank":
        # DeepSpeed casts the parameters to 16 bits while they are on the host.
        narrowed = config.framework == "deepspeed" and width > config.compute_bytes
        cast = largest_tensor(shape) * config.compute_bytes if narrowed else 0
        by_rank = (max(whole, stays) + cast,) * ranks
    elif way == "own part":
        by_rank = (largest_tensor(shape) * width // int(config.tp) + stays,) * ranks
    elif way == "split":
        by_rank = (stays or shape.parameters * config.compute_bytes // int(config.shard),) * ranks
    elif way == "first rank":
        by_rank = (whole + stays, *(whole + shape.parameters * width + stays,) * (ranks - 1))
    # What is briefly on the GPU: a tensor before it is sharded or quantized.
    passing = width * largest_tensor(shape) if way in ("first rank", "split") else 0
    if config.quantized_base:
        passing = _HALF_BYTES * largest_matrix(shape)
    way, card = way if any(by_rank) else "mapped", on_card + passing + round(outside)
    return Loading(way=way, host_bytes_by_rank=by_rank, checkpoint_bytes=checkpoint_bytes(shape), card_bytes=card)


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
