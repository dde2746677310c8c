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

from collections.abc import Iterator
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
        config = self.configuration
        if not config.lora_rank:
            return self.trained.states_kept
        dense, experts = lora_parameters(self.shape, config.lora_rank, config.lora_targets)
        count = dense / config.tp + experts / (config.ep * config.expert_tp)
        return count * self.share * self.parameters_kept / self.parameters

    @cached_property
    def largest_block(self) -> Quantity:
        """Parameters of the largest block on the GPU: what is gathered at once."""
        return _largest_block([layer for _, layer, _ in self.kinds], self.configuration)

    @cached_property
    def largest_trained_block(self) -> Quantity:
        """The same of the blocks that are trained."""
        if self.shape.unfrozen is None:
            return self.largest_block
        return _largest_block([layer for _, layer, _ in self.kinds if not layer.frozen], self.configuration)

    @cached_property
    def kinds(self) -> list[tuple[LayerStack, LayerShape, list[int]]]:
        """Each kind of layer with its stack and the indices of its layers."""
        return [(stack, *kind) for stack in self.shape.stacks for kind in stack.kinds()]

    @cached_property
    def blocks(self) -> list[tuple[LayerStack, BlockActivations, list[int]]]:
        """What each kind of block saves, with the indices of its layers."""
        shape, config = self.shape, self.configuration
        return [(stack, block_of(shape, layer, stack.hidden, config), places) for stack, layer, places in self.kinds]

    @cached_property
    def kept(self) -> tuple[Term, ...]:
        """Parameters and optimizer states that stay on the GPU. Adapters have a frozen base in 16 bits or fewer."""
        config, trained = self.configuration, self.trained
        if config.lora_rank:
            size = optimizer_bytes(config.optimizer, config.state_bytes)
            return (
                *base_terms(self, self.parameters_kept / self.parameters),
                _term(Category.PARAMETERS, "adapters", self.updated, config.parameter_bytes),
                _term(Category.OPTIMIZER_STATES, f"{config.optimizer} states", self.updated, size),
            )
        count = trained.parameters_kept
        kept = [_term(Category.PARAMETERS, "parameters", count, config.working_bytes)]
        if trained is not self:
            frozen = self.parameters_kept - count
            kept.append(_term(Category.PARAMETERS, "frozen parameters", frozen, config.compute_bytes))
        if config.master_bytes:
            master = trained.states_kept
            kept.append(_term(Category.OPTIMIZER_STATES, "FP32 master copies", master, config.master_bytes))
        return (*kept, *_optimizer_terms(trained))

    @cached_property
    def kept_parameters(self) -> tuple[Term, ...]:
        """Kept parameters, trained and frozen."""
        return tuple(term for term in self.kept if term.category is Category.PARAMETERS)

    @cached_property
    def gradients(self) -> Term:
        """All gradients of the stage, whenever they are alive."""
        config, trained = self.configuration, self.trained
        if config.lora_rank:
            return _term(Category.GRADIENTS, "gradients", self.updated, config.parameter_bytes)
        count = trained.gradients_kept
        if config.step_in_backward:
            # One at a time: the largest is that of the embedding, of the head or of an MLP.
            largest = max(largest_matrix(self.shape), self.shape.vocab * self.shape.hidden) / config.tp
            count = count * np.minimum(largest / trained.parameters, 1.0)
        return _term(Category.GRADIENTS, "gradients", count, config.gradient_bytes)


def stages(shape: ModelShape, config: Configuration) -> Iterator[StageShare]:
    """Yield the ends of the pipeline; without one, a single stage that is both."""
    pp, tp = config.pp, config.tp
    only = np.asarray(pp) == 1
    runs = [run for stack in shape.stacks for run in stack.groups()]
    count = sum(count for _, count in runs)
    dense, experts = _parameters_on(runs, config)
    for name in ("stage",) if np.all(only) else ("first stage", "last stage"):
        # 1.0 and 0.0; `[()]` turns a 0-d array into a plain number.
        embeds = np.asarray(only | (name != "last stage"), dtype=float)[()]
        heads = np.asarray(only | (name != "first stage"), dtype=float)[()]
        # Layers are shared out equally, or as nanotron balances cost, with the head counted as layers.
        layers: Quantity = -(-count // (pp * config.chunks)) * config.chunks
        if config.framework == "nanotron" and name != "stage":
            head = shape.vocab * shape.hidden / (runs[0][0].parameters - runs[0][0].norm_parameters)
            layers = np.minimum((count + head) / pp // 1 + 1, count)
            if name == "last stage":
                layers = np.maximum(count - ((count + head) * (pp - 1) / pp // 1 + 1), 0)
        share = layers / max(count, 1)
        # Both ends of a pipeline hold a copy of a tied embedding.
        tied_copy = shape.vocab * shape.hidden * (heads * (1 - embeds)) if shape.tied else 0.0
        split = embeds * shape.embedding_parameters + heads * shape.head_parameters + tied_copy
        # Micro-batches whose activations it keeps: one per stage from itself to the last. Interleaved, it is two chunks
        # per hop to the last stage, and a whole round for all chunks but one.
        behind = pp if name == "first stage" else 1
        in_flight: Quantity = np.minimum(behind, config.accumulate)
        if config.pp_chunks > 1:
            rounds = (config.chunks - 1) * np.minimum(pp, config.accumulate)
            in_flight = np.minimum((rounds + 2 * (np.asarray(behind) - 1) + 1) / config.chunks, config.accumulate)[()]
        yield StageShare(
            shape=shape, configuration=config, name=name, share=share,
            in_flight=in_flight, embeds=embeds, heads=heads,
            dense=share * dense, experts=share * experts / (config.ep * config.expert_tp),
            outside=split / tp + heads * shape.other_parameters,
        )  # fmt: skip


def _parameters_on(runs: list[tuple[LayerShape, int]], config: Configuration) -> tuple[Quantity, int]:
    """Return the parameters of runs of layers: outside experts per tensor-parallel rank, and of all experts."""
    norms = sum(layer.norm_parameters * count for layer, count in runs)
    experts = sum(expert_parameters(layer) * count for layer, count in runs)
    matrices = sum(layer.parameters * count for layer, count in runs) - norms - experts
    return matrices / config.tp + norms, experts


def expert_parameters(layer: LayerShape) -> int:
    """Return the parameters of all routed experts of a layer."""
    mlp = layer.feed_forward
    return mlp.experts * layer.expert_parameters if mlp else 0


def _largest_block(layers: list[LayerShape], config: Configuration) -> Quantity:
    largest: Quantity = 0.0
    for layer in layers:
        norms, experts = layer.norm_parameters, expert_parameters(layer)
        split = (layer.parameters - norms - experts) / config.tp + experts / (config.ep * config.expert_tp)
        largest = np.maximum(largest, split + norms)
    return largest


def _optimizer_terms(trained: StageShare) -> list[Term]:
    shape, config, count = trained.shape, trained.configuration, trained.states_kept
    if config.optimizer == "adafactor":
        # One FP32 number per row and per column of a matrix.
        blocks = ((layer, stack.hidden) for stack in shape.stacks for layer in stack.layers)
        factors = sum(inputs + outputs for block in blocks for _, inputs, outputs in matrices(*block))
        factors += (2 if shape.head_parameters else 1) * (shape.vocab + shape.hidden)
        held = 4 * (factors / max(shape.parameters, 1)) * count
        numbers = {"parameters": count, "factors": factors, "all": shape.parameters}
        formula = "4 B × parameters × factors ÷ all"
        return [Term(Category.OPTIMIZER_STATES, "adafactor rows and columns", held, formula, numbers)]
    if config.optimizer == "muon":
        # A momentum for the blocks' matrices; AdamW for embeddings and head, as Muon's authors train.
        outside, each = count * trained.outside / trained.parameters, config.state_bytes
        return [
            _term(Category.OPTIMIZER_STATES, "muon momentum", count - outside, each),
            _term(Category.OPTIMIZER_STATES, "adamw states of embeddings and head", outside, 2 * each),
        ]
    size = optimizer_bytes(config.optimizer, config.state_bytes)
    return [_term(Category.OPTIMIZER_STATES, f"{config.optimizer} states", count, size)] if size else []


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
    config = stage.configuration
    plain_bytes = config.compute_bytes
    if not config.quantized_base:
        return [_term(Category.PARAMETERS, "frozen parameters", stage.parameters * shrunk, plain_bytes)]
    norms = stage.share * sum(layer.norm_parameters for stack in stage.shape.stacks for layer in stack.layers)
    quantized, others = stage.dense + stage.experts - norms, stage.outside + norms
    name = f"frozen blocks in {config.base.upper()}"
    return [
        _term(Category.PARAMETERS, name, quantized * shrunk, config.base_bytes),
        _term(Category.PARAMETERS, "frozen embeddings, norms and head", others * shrunk, plain_bytes),
    ]


def _term(category: Category, name: str, count: Quantity, size: float) -> Term:
    return Term(category, name, count * size, "parameters on this GPU × bytes", {"parameters": count, "bytes": size})


def model_states_bytes(
    parameters: Number, *, zero: int = 0, ranks: Number = 1, parameter_bytes: float = 2, gradient_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> Quantity:  # fmt: skip
    """Return bytes of parameters, gradients and optimizer states on one of `ranks` at that ZeRO stage.

    The defaults are the ZeRO paper's mixed-precision Adam: 2 + 2 + (4 + 4 + 4) bytes per parameter.
    """
    kept = ((parameter_bytes, 3), (gradient_bytes, 2), (optimizer_bytes, 1))
    return sum((size * parameters / (ranks if zero >= stage else 1) for size, stage in kept), start=0.0)
