"""Bytes that training keeps per parameter: the parameter, its gradient, optimizer states and an FP32 master copy.

| framework        | precision  | parameter | gradient | master | Adam |
|------------------|------------|-----------|----------|--------|------|
| torch, fsdp2     | fp32, amp  | 4         | 4        |        | 8    |
| torch, fsdp2     | bf16       | 2         | 2        |        | 4    |
| deepspeed        | bf16-mixed | 2         | 2        | 4      | 8    |
| megatron         | bf16-mixed | 2         | 4        | 4      | 8    |
| … in halves      | bf16-mixed | 2         | 2        | 2      | 4    |

PyTorch's optimizers keep their states in the parameter's dtype; Megatron's precision-aware optimizer keeps only the half of the
master that a BF16 parameter lacks. Activations, and when any of this is alive, are up to `moments`.
"""

from dataclasses import dataclass

import numpy as np

from tonnage.budget.adapters import largest_matrix, lora_parameters, matrices
from tonnage.budget.configuration import Configuration, Number, Optimizer, Quantity
from tonnage.budget.frameworks import framework_of, gradient_bytes, master_bytes, state_bytes, working_bytes
from tonnage.budget.sharding import StageParameters, expert_tp, sharded, trained_stage
from tonnage.budget.terms import Term
from tonnage.ledger import Category
from tonnage.models.shape import ModelShape

# bitsandbytes and torchao: one byte per element, and one FP32 scale per block of this many.
EIGHT_BIT_BLOCK = 256


def model_states_bytes(
    parameters: Number,
    *,
    zero: int = 0,
    ranks: Number = 1,
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> Quantity:
    """Return bytes of parameters, gradients and optimizer states on one of `ranks` at that ZeRO stage.

    The defaults are the ZeRO paper's mixed-precision Adam: 2 + 2 + (4 + 4 + 4) bytes per parameter.
    """
    kept = [parameter_bytes, gradient_bytes, optimizer_bytes]
    return sum(
        (size * parameters / (ranks if zero >= stage else 1) for size, stage in zip(kept, (3, 2, 1), strict=True)),
        start=0.0,
    )


@dataclass(frozen=True, slots=True)
class States:
    """The states of one stage. `gradients` counts all of them, whenever they are alive."""

    kept: tuple[Term, ...]
    gradients: Term

    @property
    def parameters(self) -> tuple[Term, ...]:
        """Kept parameters, trained and frozen."""
        return tuple(term for term in self.kept if term.category is Category.PARAMETERS)


def states(shape: ModelShape, stage: StageParameters, configuration: Configuration) -> States:
    """Return the states that one GPU holds."""
    if configuration.lora_rank:
        return _lora_states(shape, stage, configuration)
    whole, stage = stage, trained_stage(shape, stage, configuration)
    count = sharded(stage, configuration, framework_of(configuration).parameters_sharded_from)
    kept = [_term(Category.PARAMETERS, "parameters", count, working_bytes(configuration))]
    if stage is not whole:
        frozen = sharded(whole, configuration, framework_of(configuration).parameters_sharded_from) - count
        kept.append(_term(Category.PARAMETERS, "frozen parameters", frozen, configuration.compute_bytes))
    if master_bytes(configuration):
        master = sharded(stage, configuration, 1)
        kept.append(_term(Category.OPTIMIZER_STATES, "FP32 master copies", master, master_bytes(configuration)))
    return States((*kept, *_optimizer_terms(shape, stage, configuration)), _gradients(shape, stage, configuration))


def trained_parameters(shape: ModelShape, stage: StageParameters, configuration: Configuration) -> Quantity:
    """Return the parameters that one GPU updates: its shard of the model or of the adapters."""
    if not configuration.lora_rank:
        return sharded(trained_stage(shape, stage, configuration), configuration, 1)
    dense, experts = lora_parameters(shape, configuration.lora_rank, configuration.lora_targets)
    count = (dense / configuration.tp + experts / (configuration.ep * expert_tp(configuration))) * stage.share
    return count * sharded(stage, configuration, framework_of(configuration).parameters_sharded_from) / stage.parameters


def sharded_parameters(configuration: Configuration) -> bool:
    """Say whether parameters are sharded and gathered for use."""
    return configuration.zero >= framework_of(configuration).parameters_sharded_from


def _gradients(shape: ModelShape, stage: StageParameters, configuration: Configuration) -> Term:
    count = sharded(stage, configuration, framework_of(configuration).gradients_sharded_from)
    if configuration.step_in_backward:
        # One at a time: the largest is that of the embedding, of the head or of an MLP.
        largest = max(largest_matrix(shape), shape.vocab * shape.hidden) / configuration.tp
        count = count * np.minimum(largest / stage.parameters, 1.0)
    return _term(Category.GRADIENTS, "gradients", count, gradient_bytes(configuration))


def _optimizer_terms(shape: ModelShape, stage: StageParameters, configuration: Configuration) -> list[Term]:
    count = sharded(stage, configuration, 1)
    if configuration.optimizer == "adafactor":
        # One FP32 number per row and per column of a matrix.
        blocks = ((layer, stack.hidden) for stack in shape.stacks for layer in stack.layers)
        factors = sum(inputs + outputs for block in blocks for _, inputs, outputs in matrices(*block))
        factors += (2 if shape.head_parameters else 1) * (shape.vocab + shape.hidden)
        held = 4 * (factors / max(shape.parameters, 1)) * count
        numbers = {"parameters": count, "factors": factors, "all": shape.parameters}
        formula = "4 B × parameters × factors ÷ all"
        return [Term(Category.OPTIMIZER_STATES, "adafactor rows and columns", held, formula, numbers)]
    if configuration.optimizer == "muon":
        # A momentum for the blocks' matrices; AdamW for embeddings and head, as Muon's authors train.
        outside, each = count * stage.outside / stage.parameters, state_bytes(configuration)
        return [
            _term(Category.OPTIMIZER_STATES, "muon momentum", count - outside, each),
            _term(Category.OPTIMIZER_STATES, "adamw states of embeddings and head", outside, 2 * each),
        ]
    size = optimizer_bytes(configuration.optimizer, state_bytes(configuration))
    return [_term(Category.OPTIMIZER_STATES, f"{configuration.optimizer} states", count, size)] if size else []


def optimizer_bytes(optimizer: Optimizer, number_bytes: int = 4) -> float:
    """Return the optimizer state bytes per parameter, for optimizers with a constant size per parameter."""
    if optimizer in ("adam", "adamw"):
        return 2 * number_bytes
    if optimizer == "adamw-8bit":
        return 2 * (1 + 4 / EIGHT_BIT_BLOCK)
    # Adafactor's rows and columns are negligible for adapters, where this is used.
    return {"sgd": 0, "adafactor": 0}.get(optimizer, number_bytes)


def _lora_states(shape: ModelShape, stage: StageParameters, configuration: Configuration) -> States:
    """Return LoRA's states: a frozen base in 16 bits or fewer (unless FP32), and those of the adapters."""
    base = sharded(stage, configuration, framework_of(configuration).parameters_sharded_from)
    count = trained_parameters(shape, stage, configuration)
    adapters = _term(Category.PARAMETERS, "adapters", count, configuration.parameter_bytes)
    states_bytes = optimizer_bytes(configuration.optimizer, state_bytes(configuration))
    kept = [*base_terms(shape, stage, configuration, base / stage.parameters), adapters]
    kept.append(_term(Category.OPTIMIZER_STATES, f"{configuration.optimizer} states", count, states_bytes))
    return States(tuple(kept), _term(Category.GRADIENTS, "gradients", count, configuration.parameter_bytes))


def base_terms(shape: ModelShape, stage: StageParameters, configuration: Configuration, shrunk: Quantity) -> list[Term]:
    """Return weights that are not trained: blocks in the base's format, the rest in the compute dtype."""
    plain_bytes = configuration.compute_bytes
    if not configuration.quantized_base:
        return [_term(Category.PARAMETERS, "frozen parameters", stage.parameters * shrunk, plain_bytes)]
    norms = stage.share * sum(layer.norm_parameters for stack in shape.stacks for layer in stack.layers)
    quantized, others = stage.dense + stage.experts - norms, stage.outside + norms
    name = f"frozen blocks in {configuration.base.upper()}"
    return [
        _term(Category.PARAMETERS, name, quantized * shrunk, configuration.base_bytes),
        _term(Category.PARAMETERS, "frozen embeddings, norms and head", others * shrunk, plain_bytes),
    ]


def _term(category: Category, name: str, count: Quantity, size: float) -> Term:
    return Term(category, name, count * size, "parameters on this GPU × bytes", {"parameters": count, "bytes": size})
