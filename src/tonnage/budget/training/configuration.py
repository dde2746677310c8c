"""A training configuration: every choice that changes memory or time, and what its framework does (`data/frameworks.toml`).

Categorical choices are plain values. Numeric ones (`micro_batch`, `tp`, ...) may be NumPy arrays of equal length: the
same formulas then evaluate that many configurations at once, which is how the search handles a hundred thousand of
them.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tonnage.budget import table
from tonnage.budget.training.adapters import ALL_LINEAR, BASE_BITS, Base
from tonnage.budget.training.objectives import NEXT_TOKEN, Objective

# One number, or one per configuration.
Number = int | NDArray[Any]
Quantity = float | NDArray[Any]

Precision = Literal["fp32", "tf32", "fp16-mixed", "bf16-mixed", "bf16", "fp8"]
Optimizer = Literal["sgd", "momentum", "adam", "adamw", "adamw-8bit", "adafactor", "lion", "muon"]
OptimizerKernel = Literal["foreach", "fused", "loop"]
# flash: the fused kernel that PyTorch picks for the GPU; flash-2: FlashAttention 2 up to Hopper, as in torchtitan and
# nanotron.
AttentionKernel = Literal["flash", "flash-2", "eager"]
# fused: head and loss of a few tokens at a time, with their gradients, as in Liger's kernel.
Loss = Literal["full", "chunked", "fused"]
Place = Literal["gpu", "host", "nvme"]
FrameworkName = Literal["torch", "fsdp2", "deepspeed", "megatron", "nanotron"]
# DeepSpeed's default `stage3_max_live_parameters`.
MAX_LIVE_PARAMETERS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One row of `data/frameworks.toml`, which explains the fields."""

    working_bytes: int
    gradient_bytes: int
    master_bytes: int
    keeps_gradients: bool
    parameters_sharded_from: int
    gradients_sharded_from: int
    loss_forward_bytes: int
    loss_backward_bytes: int
    parallel: Literal["torch", "own"]
    written: Literal["transformers", "fused", "native"]
    clips: bool
    bucket_bytes: float
    gathers_at_once: bool
    pipeline_messages: int
    pipeline_operators: int
    split_operators: tuple[int, int]
    selective: Literal["scores", "operators"]
    fuses_sums: bool
    cuts_products: bool
    architectures: tuple[str, ...]


@cache
def _frameworks() -> dict[str, Framework]:
    rows, lists = table("frameworks"), ("split_operators", "architectures")
    return {name: Framework(**rows[name] | {key: tuple(rows[name][key]) for key in lists}) for name in rows}


def architectures(name: FrameworkName) -> tuple[str, ...]:
    """Return the architectures a framework implements; empty if it takes any."""
    return _frameworks()[name].architectures


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One training configuration, or many of one family (see the module docstring).

    It uses `tp × cp × pp × data` GPUs; expert parallelism `ep` divides `tp × cp × data` and needs no GPUs of its own.
    `shard` of the `data` ranks share one copy of what ZeRO shards (hybrid sharding if less than `data`). `micro_batch`
    is sequences per GPU and pass; `accumulate` passes make a step.
    """

    precision: Precision = "bf16-mixed"
    optimizer: Optimizer = "adamw"
    optimizer_kernel: OptimizerKernel = "foreach"
    checkpoint: str = "none"  # none, selective, full, every-K
    attention: AttentionKernel = "flash"
    loss: Loss = "full"
    zero: int = 0  # 0: everything is replicated; 1: shards optimizer states; 2: gradients too; 3: parameters too
    framework: FrameworkName = "torch"
    pp_chunks: int = 1  # chunks of each pipeline stage (virtual stages), if pp > 1
    sequence_parallel: bool = True  # if tp > 1: norms and residuals are split along the sequence
    optimizer_place: Place = "gpu"
    parameter_place: Place = "gpu"
    activation_place: Place = "gpu"
    lora_rank: int = 0  # 0: full training
    lora_targets: tuple[str, ...] = ALL_LINEAR
    base: Base = "16-bit"  # frozen weights of blocks: QLoRA has them in 4 bits
    liger: bool = False  # Liger kernels for norms, rotary embeddings and gated MLPs, in blocks of transformers
    paged: bool = False  # optimizer states in managed memory, which is evicted from the GPU when it runs short
    step_in_backward: bool = False  # update each parameter as soon as its gradient exists, then free the gradient
    bf16_gradients: bool = False  # beside an FP32 master: accumulated and reduced in 16 bits
    bf16_moments: bool = False  # the same for optimizer states; the master keeps only the bits that the parameter lacks
    keep_gradients: bool = False  # zeroed in place between steps, not freed
    compile: bool = False
    wide_logits: bool = False  # the model returns FP32 logits and shifts them, as transformers did until 4.45
    objective: Objective = NEXT_TOKEN
    compile_loss: bool = True  # with `compile`: the loss too (torchtitan left it out until 2025)
    dropout: bool = False  # after attention and MLP, where the model has none by default
    lora_dropout: bool = False  # dropout on the inputs of adapters
    tiled_mlp: bool = False  # the MLP processes a few tokens at a time and saves only their input
    logit_share: float = 1.0  # share of tokens with a loss: in reinforcement learning, completions
    seq: Number = 4096
    micro_batch: Number = 1
    accumulate: Number = 1
    tp: Number = 1
    pp: Number = 1
    cp: Number = 1
    ep: Number = 1
    data: Number = 1
    shard: Number = 1

    @property
    def gpus(self) -> Number:
        """GPUs that it uses."""
        return self.tp * self.cp * self.pp * self.data

    @property
    def global_batch(self) -> Number:
        """Sequences in one optimizer step."""
        return self.micro_batch * self.accumulate * self.data

    @property
    def tokens(self) -> Quantity:
        """Tokens of one micro-batch on one GPU."""
        return self.micro_batch * self.seq / self.cp

    @property
    def samples(self) -> Number:
        """Samples in one pass of one GPU: pairs, if a sample has two sequences."""
        return self.micro_batch // self.objective.in_pass

    @property
    def chunks(self) -> Number:
        """Interleaved chunks per pipeline stage."""
        return np.where(np.asarray(self.pp) > 1, self.pp_chunks, 1)[()] if self.pp_chunks > 1 else 1

    @property
    def autocast(self) -> bool:
        """Whether PyTorch casts at each operator, so that the residual stream stays in FP32.

        Adapters have a frozen base in 16 bits already.
        """
        return self.mixed and self.framework == "torch" and not self.lora_rank

    @property
    def quantized_base(self) -> bool:
        """Whether the frozen weights are quantized below the compute dtype."""
        return self.base != "16-bit"

    @property
    def base_bytes(self) -> float:
        """Bytes per frozen weight of a block, with its share of the scales."""
        return BASE_BITS[self.base] / 8 if self.quantized_base else self.compute_bytes

    @property
    def mixed(self) -> bool:
        """Whether FP32 parameters are computed with in 16 bits or less."""
        return self.precision in ("fp16-mixed", "bf16-mixed", "fp8")

    @property
    def parameter_bytes(self) -> int:
        """Bytes per trained parameter as stored."""
        return 2 if self.precision == "bf16" else 4

    @property
    def compute_bytes(self) -> int:
        """Bytes per element in the forward pass."""
        return 4 if self.precision in ("fp32", "tf32") else 2

    @property
    def traits(self) -> Framework:
        """What its framework does."""
        return _frameworks()[self.framework]

    @property
    def working_bytes(self) -> int:
        """Bytes per trained parameter in the dtype it is computed with or gathered from."""
        return self.traits.working_bytes if self.mixed else self.parameter_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes per gradient as stored."""
        if not self.mixed:
            return self.parameter_bytes
        return 2 if self.bf16_gradients else self.traits.gradient_bytes

    @property
    def made_bytes(self) -> int:
        """Bytes per gradient as the backward pass computes it: the dtype of the parameter it computed with."""
        return self.compute_bytes if self.framework == "fsdp2" else self.working_bytes

    @property
    def master_bytes(self) -> int:
        """Bytes of the FP32 master per 16-bit parameter, or of the part it lacks; 0 if there is none."""
        kept = self.traits.master_bytes if self.mixed else 0
        return kept // 2 if self.bf16_moments else kept

    @property
    def state_bytes(self) -> int:
        """Bytes per element of an optimizer state."""
        return 2 if self.precision == "bf16" or self.bf16_moments else 4

    @property
    def offloads(self) -> bool:
        """Whether anything is offloaded to the host or a drive."""
        return self.paged or {self.optimizer_place, self.parameter_place, self.activation_place} != {"gpu"}

    @property
    def compiled_whole(self) -> bool:
        """Whether a transformers model is compiled with its head and loss; FSDP2 compiles block by block."""
        return self.compile and self.traits.written == "transformers" and self.framework != "fsdp2"

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are sharded and gathered for use."""
        return self.zero >= self.traits.parameters_sharded_from

    @property
    def reduces_once(self) -> Quantity:
        """1 if a pipeline schedule defers FSDP2's reductions and resharding to the last micro-batch, else 0."""
        return (np.asarray(self.pp) > 1) * float(self.framework == "fsdp2" and self.zero > 0)

    @property
    def shards(self) -> Number:
        """GPUs that share one copy of what ZeRO shards, including context-parallel ranks."""
        return self.shard * self.cp

    @property
    def expert_tp(self) -> Quantity:
        """Tensor-parallel degree of an expert: that of the model, unless expert parallelism uses up its GPUs."""
        if np.ndim(self.ep) == 0 and self.ep == 1:
            return self.tp
        return np.minimum(self.tp, np.maximum(self.tp * self.cp * self.data // self.ep, 1))

    @property
    def expert_shards(self) -> Quantity:
        """GPUs that share one copy of an expert, of which expert parallelism leaves fewer."""
        return np.maximum(self.tp * self.shards // (self.ep * self.expert_tp), 1)

    def at(self, index: int) -> "Configuration":
        """Return one of many configurations, as plain numbers."""
        numbers: dict[str, Any] = {}
        for name in NUMBERS:
            value = getattr(self, name)
            numbers[name] = int(value[index]) if isinstance(value, np.ndarray) else value
        return replace(self, **numbers)


NUMBERS = ("seq", "micro_batch", "accumulate", "tp", "pp", "cp", "ep", "data", "shard")
