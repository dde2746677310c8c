"""How a model is trained: every choice that changes memory or time.

Choices of kind are plain values. Choices of number (`micro_batch`, `tp`, ...) may be NumPy arrays of equal length: the
same formulas then answer for as many configurations at once, which is how the search sees a hundred thousand of them.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tonnage.budget.adapters import ALL_LINEAR, BASE_BITS, Base
from tonnage.budget.objectives import NEXT_TOKEN, Objective

# One number, or one for each of many configurations.
Number = int | NDArray[Any]
Quantity = float | NDArray[Any]

Precision = Literal["fp32", "tf32", "fp16-mixed", "bf16-mixed", "bf16", "fp8"]
Optimizer = Literal["sgd", "momentum", "adam", "adamw", "adamw-8bit", "adafactor", "lion", "muon"]
OptimizerKernel = Literal["foreach", "fused", "loop"]
# Flash: the fused kernel that PyTorch takes for a card; flash-2: FlashAttention 2 up to Hopper, as torchtitan and nanotron do.
AttentionKernel = Literal["flash", "flash-2", "eager"]
# Fused: the head's product and the loss of a few tokens at a time, with their gradients, as Liger's kernel takes them.
Loss = Literal["full", "chunked", "fused"]
Place = Literal["gpu", "host", "nvme"]
FrameworkName = Literal["torch", "fsdp2", "deepspeed", "megatron", "nanotron"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One way to train, or many of one family (see the module's docstring).

    The number of GPUs is `tp × cp × pp × data`; expert parallelism `ep` divides `tp × cp × data` and costs no GPUs of
    its own. `shard` is how many of the `data` ranks share one copy of what ZeRO shards (hybrid sharding where it is
    less than `data`). `micro_batch` is sequences on one GPU in one pass; `accumulate` passes make a step.
    """

    precision: Precision = "bf16-mixed"
    optimizer: Optimizer = "adamw"
    optimizer_kernel: OptimizerKernel = "foreach"
    checkpoint: str = "none"  # none, selective, full, every-K
    attention: AttentionKernel = "flash"
    loss: Loss = "full"
    zero: int = 0  # 0: every rank keeps all; 1: shards optimizer states; 2: gradients too; 3: parameters too
    framework: FrameworkName = "torch"
    pp_chunks: int = 1  # parts of each pipeline stage that take turns (virtual stages), where pp > 1
    sequence_parallel: bool = True  # where tp > 1: norms and residuals are split along the sequence
    optimizer_place: Place = "gpu"
    parameter_place: Place = "gpu"
    activation_place: Place = "gpu"
    lora_rank: int = 0  # 0: full training
    lora_targets: tuple[str, ...] = ALL_LINEAR
    base: Base = "16-bit"  # the frozen weights of blocks: QLoRA has them in 4 bits
    liger: bool = False  # its kernels for norms, rotary embeddings and gated MLPs, in blocks of transformers
    paged: bool = False  # optimizer states in managed memory, which leave the GPU where they would not fit
    step_in_backward: bool = False  # every parameter is updated as soon as its gradient is there, which is freed then
    bf16_gradients: bool = False  # beside an FP32 master: summed and reduced in 16 bits
    bf16_moments: bool = False  # the same of the optimizer's states; the master keeps what the parameter lacks
    keep_gradients: bool = False  # zeroed in place, not freed, between steps
    compile: bool = False
    wide_logits: bool = False  # the model gives them in FP32 and shifts them, as those of transformers did until 4.45
    objective: Objective = NEXT_TOKEN
    compile_loss: bool = True  # with `compile`: the loss too (torchtitan left it out until 2025)
    dropout: bool = False  # after attention and MLP, where the model has none by default
    lora_dropout: bool = False  # of what adapters read
    tiled_mlp: bool = False  # an MLP takes a few tokens at a time and keeps their input alone
    logit_share: float = 1.0  # of the tokens, those with a loss: in reinforcement learning, completions
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
        """How many it takes."""
        return self.tp * self.cp * self.pp * self.data

    @property
    def global_batch(self) -> Number:
        """Sequences in one optimizer step."""
        return self.micro_batch * self.accumulate * self.data

    @property
    def tokens(self) -> Quantity:
        """Of one micro-batch on one GPU."""
        return self.micro_batch * self.seq / self.cp

    @property
    def samples(self) -> Number:
        """In one pass of one GPU: pairs, where a sample has two sequences."""
        return self.micro_batch // self.objective.in_pass

    @property
    def chunks(self) -> Number:
        """Parts of a stage that take turns."""
        return np.where(np.asarray(self.pp) > 1, self.pp_chunks, 1)[()] if self.pp_chunks > 1 else 1

    @property
    def autocast(self) -> bool:
        """PyTorch casts at each operator, so that what flows between blocks stays in FP32.

        A frozen base is 16 bits wide itself.
        """
        return self.mixed and self.framework == "torch" and not self.lora_rank

    @property
    def quantized_base(self) -> bool:
        """Whether the frozen weights are kept in fewer bits than they are computed with."""
        return self.base != "16-bit"

    @property
    def base_bytes(self) -> float:
        """Of one frozen weight of a block, with its share of the scales."""
        return BASE_BITS[self.base] / 8 if self.quantized_base else self.compute_bytes

    @property
    def fused_loss(self) -> bool:
        """Logits are never whole, and not made twice."""
        return self.loss == "fused"

    @property
    def mixed(self) -> bool:
        """FP32 parameters, computed on in 16 bits or less."""
        return self.precision in ("fp16-mixed", "bf16-mixed", "fp8")

    @property
    def parameter_bytes(self) -> int:
        """Of one trained parameter where it is kept."""
        return 2 if self.precision == "bf16" else 4

    @property
    def compute_bytes(self) -> int:
        """Of one number in the forward pass."""
        return 4 if self.precision in ("fp32", "tf32") else 2

    def at(self, index: int) -> "Configuration":
        """One of the many, in plain numbers."""
        numbers: dict[str, Any] = {}
        for name in NUMBERS:
            value = getattr(self, name)
            numbers[name] = int(value[index]) if isinstance(value, np.ndarray) else value
        return replace(self, **numbers)


NUMBERS = ("seq", "micro_batch", "accumulate", "tp", "pp", "cp", "ep", "data", "shard")
