"""What one GPU holds of a model: how parallelism divides its parameters, and the bytes that training keeps for each.

| framework        | precision  | parameter | gradient | master | Adam |
|------------------|------------|-----------|----------|--------|------|
| torch, fsdp2     | fp32, amp  | 4         | 4        |        | 8    |
| torch, fsdp2     | bf16       | 2         | 2        |        | 4    |
| deepspeed        | bf16-mixed | 2         | 2        | 4      | 8    |
| megatron         | bf16-mixed | 2         | 4        | 4      | 8    |
| … in halves      | bf16-mixed | 2         | 2        | 2      | 4    |

PyTorch's optimizers keep their states in the parameter's dtype; Megatron's precision-aware optimizer keeps only the half of the
master that a BF16 parameter lacks. A pipeline is represented by its two ends: the first stage has the most micro-batches in
flight and the embedding, the last one the head and the loss; stages between them need less than the first. When any of this is
alive is up to `moments`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tonnage.budget.terms import Term
from tonnage.budget.training.activations import BlockActivations, block_of
from tonnage.budget.training.adapters import largest_matrix, lora_parameters, matrices
from tonnage.budget.training.configuration import Configuration, Number, Optimizer, Quantity
from tonnage.ledger import Category
from tonnage.models.shape import LayerShape, LayerStack, ModelShape

# bitsandbytes and torchao: one byte per element, and one FP32 scale per block of this many.
EIGHT_BIT_BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class StageShare:
    """One GPU's share of a model on one pipeline stage, with its parameters by what divides them further."""

    shape: ModelShape
    configuration: Configuration
    name: str
    share: Quantity  # of the model's layers
    in_flight: Quantity  # micro-batches whose activations it keeps at its peak
    embeds: Quantity  # 1 if it holds the embedding, else 0
    heads: Quantity  # 1 if it holds the head and the loss, else 0
    dense: Quantity  # in its layers, without experts
    experts: Quantity
    outside: Quantity  # embedding, head, final norm

    @property
    def parameters(self) -> Quantity:
        """Parameters on the GPU before data-parallel sharding."""
        return self.dense + self.experts + self.outside

    @property
    def layers(self) -> Quantity:
        """Layers of the stage."""
        return sum(len(stack.layers) for stack in self.shape.stacks) * self.share

    def sharded(self, from_stage: int) -> Quantity:
        """Return the parameters per GPU of something that is sharded from that ZeRO stage on."""
        if self.configuration.zero < from_stage:
            return self.parameters
        dense = (self.dense + self.outside) / self.configuration.shards
        return dense + self.experts / self.configuration.expert_shards

    @property
    def parameters_kept(self) -> Quantity:
        """Parameters that stay on the GPU between their uses."""
        return self.sharded(self.configuration.traits.parameters_sharded_from)

    @property
    def gradients_kept(self) -> Quantity:
        """Gradients that stay on the GPU until the update."""
        return self.sharded(self.configuration.traits.gradients_sharded_from)

    @property
    def states_kept(self) -> Quantity:
        """Parameters whose optimizer states are on the GPU."""
        return self.sharded(1)

    @cached_property
    def trained(self) -> "StageShare":
        """The trained part of the stage: all of it unless parts of the model are frozen, which rules out a pipeline."""
        unfrozen = self.shape.unfrozen
        if unfrozen is None:
            return self
        runs = [(layer, count) for stack in self.shape.stacks for layer, count in stack.groups() if not layer.frozen]
        dense, experts = _parameters_on(runs, self.configuration)
        outside = (unfrozen.table + unfrozen.head) / self.configuration.tp + unfrozen.other
        spread = experts / (self.configuration.ep * self.configuration.expert_tp)
        return replace(self, dense=dense, experts=spread, outside=outside)

    @cached_property
    def updated(self) -> Quantity:
        """Parameters that the GPU updates: its shard of the model or of the adapters."""
        configuration = self.configuration
        if not configuration.lora_rank:
            return self.trained.states_kept
        dense, experts = lora_parameters(self.shape, configuration.lora_rank, configuration.lora_targets)
        count = dense / configuration.tp + experts / (configuration.ep * configuration.expert_tp)
        return count * self.share * self.parameters_kept / self.parameters

    @cached_property
    def largest_block(self) -> Quantity:
        """Parameters of the largest block on the GPU: what is gathered at once."""
        return _largest_block([layer for stack in self.shape.stacks for layer, _ in stack.kinds()], self.configuration)

    @cached_property
    def largest_trained_block(self) -> Quantity:
        """The same of the blocks that are trained."""
        layers = [layer for stack in self.shape.stacks for layer, _ in stack.kinds() if not layer.frozen]
        return _largest_block(layers, self.configuration)

    @cached_property
    def blocks(self) -> tuple[tuple[LayerStack, BlockActivations, Sequence[int]], ...]:
        """What each kind of block saves, with the indices of its layers."""
        return tuple(
            (stack, block_of(self.shape, layer, stack.hidden, self.configuration), places)
            for stack in self.shape.stacks
            for layer, places in stack.kinds()
        )

    @cached_property
    def kept(self) -> tuple[Term, ...]:
        """Parameters and optimizer states that stay on the GPU. Adapters have a frozen base in 16 bits or fewer."""
        configuration, trained = self.configuration, self.trained
        if configuration.lora_rank:
            size = optimizer_bytes(configuration.optimizer, configuration.state_bytes)
            return (
                *base_terms(self, self.parameters_kept / self.parameters),
                _term(Category.PARAMETERS, "adapters", self.updated, configuration.parameter_bytes),
                _term(Category.OPTIMIZER_STATES, f"{configuration.optimizer} states", self.updated, size),
            )
        count = trained.parameters_kept
        kept = [_term(Category.PARAMETERS, "parameters", count, configuration.working_bytes)]
        if trained is not self:
            frozen = self.parameters_kept - count
            kept.append(_term(Category.PARAMETERS, "frozen parameters", frozen, configuration.compute_bytes))
        if configuration.master_bytes:
            master = trained.states_kept
            kept.append(_term(Category.OPTIMIZER_STATES, "FP32 master copies", master, configuration.master_bytes))
        return (*kept, *_optimizer_terms(trained))

    @cached_property
    def kept_parameters(self) -> tuple[Term, ...]:
        """Kept parameters, trained and frozen."""
        return tuple(term for term in self.kept if term.category is Category.PARAMETERS)

    @cached_property
    def gradients(self) -> Term:
        """All gradients of the stage, whenever they are alive."""
        configuration, trained = self.configuration, self.trained
        if configuration.lora_rank:
            return _term(Category.GRADIENTS, "gradients", self.updated, configuration.parameter_bytes)
        count = trained.gradients_kept
        if configuration.step_in_backward:
            # One at a time: the largest is that of the embedding, of the head or of an MLP.
            largest = max(largest_matrix(self.shape), self.shape.vocab * self.shape.hidden) / configuration.tp
            count = count * np.minimum(largest / trained.parameters, 1.0)
        return _term(Category.GRADIENTS, "gradients", count, configuration.gradient_bytes)


def stages(shape: ModelShape, configuration: Configuration) -> Iterator[StageShare]:
    """Yield the ends of the pipeline; without one, a single stage that is both."""
    pp, tp = configuration.pp, configuration.tp
    only = np.asarray(pp) == 1
    runs = [run for stack in shape.stacks for run in stack.groups()]
    count = sum(count for _, count in runs)
    dense, experts = _parameters_on(runs, configuration)
    for name in ("stage",) if np.all(only) else ("first stage", "last stage"):
        # 1.0 and 0.0; `[()]` turns a 0-d array into a plain number.
        embeds = np.asarray(only | (name != "last stage"), dtype=float)[()]
        heads = np.asarray(only | (name != "first stage"), dtype=float)[()]
        # Layers are shared out equally, or as nanotron balances cost, with the head counted as layers.
        layers: Quantity = -(-count // (pp * configuration.chunks)) * configuration.chunks
        if configuration.framework == "nanotron" and name != "stage":
            head = shape.vocab * shape.hidden / (runs[0][0].parameters - runs[0][0].norm_parameters)
            layers = np.minimum((count + head) / pp // 1 + 1, count)
            if name == "last stage":
                layers = np.maximum(count - ((count + head) * (pp - 1) / pp // 1 + 1), 0)
        share = layers / max(count, 1)
        # Both ends of a pipeline hold a copy of a tied embedding.
        tied_copy = shape.vocab * shape.hidden * (heads * (1 - embeds)) if shape.tied else 0.0
        split = embeds * shape.embedding_parameters + heads * shape.head_parameters + tied_copy
        yield StageShare(
            shape=shape, configuration=configuration, name=name, share=share,
            in_flight=_in_flight(configuration, pp if name == "first stage" else 1), embeds=embeds, heads=heads,
            dense=share * dense, experts=share * experts / (configuration.ep * configuration.expert_tp),
            outside=split / tp + heads * shape.other_parameters,
        )  # fmt: skip


def _parameters_on(runs: list[tuple[LayerShape, int]], configuration: Configuration) -> tuple[Quantity, int]:
    """Return the parameters of runs of layers: outside experts per tensor-parallel rank, and of all experts."""
    norms = sum(layer.norm_parameters * count for layer, count in runs)
    experts = sum(expert_parameters(layer) * count for layer, count in runs)
    matrices = sum(layer.parameters * count for layer, count in runs) - norms - experts
    return matrices / configuration.tp + norms, experts


def _in_flight(configuration: Configuration, behind: Number) -> Quantity:
    """Return the micro-batches whose activations a stage keeps: one per stage from itself to the last.

    Interleaved, it is two chunks per hop to the last stage, and a whole round for all chunks but one.
    """
    if configuration.pp_chunks == 1:
        return np.minimum(behind, configuration.accumulate)
    rounds = np.minimum(configuration.pp, configuration.accumulate)
    parts: Quantity = (configuration.chunks - 1) * rounds + 2 * (np.asarray(behind) - 1) + 1
    return np.asarray(np.minimum(parts / configuration.chunks, configuration.accumulate))[()]


def expert_parameters(layer: LayerShape) -> int:
    """Return the parameters of all routed experts of a layer."""
    mlp = layer.feed_forward
    return mlp.experts * layer.expert_parameters if mlp else 0


def _largest_block(layers: list[LayerShape], configuration: Configuration) -> Quantity:
    largest: Quantity = 0.0
    for layer in layers:
        experts = expert_parameters(layer)
        matrices = layer.parameters - layer.norm_parameters - experts
        split = matrices / configuration.tp + experts / (configuration.ep * configuration.expert_tp)
        largest = np.maximum(largest, split + layer.norm_parameters)
    return largest


def _optimizer_terms(trained: StageShare) -> list[Term]:
    shape, configuration, count = trained.shape, trained.configuration, trained.states_kept
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
        outside, each = count * trained.outside / trained.parameters, configuration.state_bytes
        return [
            _term(Category.OPTIMIZER_STATES, "muon momentum", count - outside, each),
            _term(Category.OPTIMIZER_STATES, "adamw states of embeddings and head", outside, 2 * each),
        ]
    size = optimizer_bytes(configuration.optimizer, configuration.state_bytes)
    return [_term(Category.OPTIMIZER_STATES, f"{configuration.optimizer} states", count, size)] if size else []


def optimizer_bytes(optimizer: Optimizer, number_bytes: int = 4) -> float:
    """Return the optimizer state bytes per parameter, for optimizers with a constant size per parameter."""
    if optimizer in ("adam", "adamw"):
        return 2 * number_bytes
    if optimizer == "adamw-8bit":
        return 2 * (1 + 4 / EIGHT_BIT_BLOCK)
    # Adafactor's rows and columns are negligible for adapters, where this is used.
    return {"sgd": 0, "adafactor": 0}.get(optimizer, number_bytes)


def base_terms(stage: StageShare, shrunk: Quantity) -> list[Term]:
    """Return weights that are not trained: blocks in the base's format, the rest in the compute dtype."""
    configuration = stage.configuration
    plain_bytes = configuration.compute_bytes
    if not configuration.quantized_base:
        return [_term(Category.PARAMETERS, "frozen parameters", stage.parameters * shrunk, plain_bytes)]
    norms = stage.share * sum(layer.norm_parameters for stack in stage.shape.stacks for layer in stack.layers)
    quantized, others = stage.dense + stage.experts - norms, stage.outside + norms
    name = f"frozen blocks in {configuration.base.upper()}"
    return [
        _term(Category.PARAMETERS, name, quantized * shrunk, configuration.base_bytes),
        _term(Category.PARAMETERS, "frozen embeddings, norms and head", others * shrunk, plain_bytes),
    ]


def _term(category: Category, name: str, count: Quantity, size: float) -> Term:
    return Term(category, name, count * size, "parameters on this GPU × bytes", {"parameters": count, "bytes": size})


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
