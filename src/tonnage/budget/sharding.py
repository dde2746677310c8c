"""Which part of a model one GPU holds: how tensor, pipeline, expert and data parallelism divide its parameters.

A pipeline is seen by its two ends: the first stage keeps the most micro-batches in flight and the embedding, the last one
holds the head and the loss. Every stage between them needs less than the first. This module does not know bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tonnage.budget.configuration import Configuration, Number, Quantity
from tonnage.models.shape import Layer, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Parameters on one GPU of one pipeline stage, by what divides them further."""

    name: str
    share: Quantity  # of the model's layers that are on this stage
    in_flight: Quantity  # micro-batches whose activations it keeps at its peak
    embeds: Quantity  # 1 where it holds the embedding, else 0
    heads: Quantity  # 1 where it holds the head and the loss, else 0
    dense: Quantity  # in its layers, experts left out
    experts: Quantity
    outside: Quantity  # embedding, head, final norm

    @property
    def parameters(self) -> Quantity:
        """All that the GPU holds before data-parallel sharding."""
        return self.dense + self.experts + self.outside


def stages(shape: ModelShape, configuration: Configuration) -> Iterator[Stage]:
    """The ends of the pipeline; where there is none, one stage that is both."""
    pp = configuration.pp
    only = np.asarray(pp) == 1
    ends = ("stage",) if np.all(only) else ("first stage", "last stage")
    for name in ends:
        # 1 and 0 for true and false: a plain number for a plain one.
        embeds = np.asarray(only | (name != "last stage"), dtype=float)[()]
        heads = np.asarray(only | (name != "first stage"), dtype=float)[()]
        runs = [run for stack in shape.stacks for run in stack.groups()]
        share = _layers_on(runs, shape, configuration, name) / max(sum(count for _, count in runs), 1)
        dense, experts = _parameters_on(runs, configuration)
        # Both ends of a pipeline hold a copy of what they tie.
        tied_copy = shape.vocab * shape.hidden * (heads * (1 - embeds)) if shape.tied else 0.0
        split = embeds * shape.embedding_parameters + heads * shape.head_parameters + tied_copy
        yield Stage(
            name=name,
            share=share,
            in_flight=_in_flight(configuration, pp if name == "first stage" else 1),
            embeds=embeds,
            heads=heads,
            dense=share * dense,
            experts=share * experts / (configuration.ep * expert_tp(configuration)),
            outside=split / configuration.tp + heads * shape.other_parameters,
        )


def _parameters_on(runs: list[tuple[Layer, int]], configuration: Configuration) -> tuple[Quantity, int]:
    """Of runs of layers: those outside of experts on one tensor-parallel rank, and those of all experts."""
    norms = sum(layer.norm_parameters * count for layer, count in runs)
    experts = sum(expert_parameters(layer) * count for layer, count in runs)
    matrices = sum(layer.parameters * count for layer, count in runs) - norms - experts
    return matrices / configuration.tp + norms, experts


def _in_flight(configuration: Configuration, behind: Number) -> Quantity:
    """Micro-batches whose activations a stage keeps with so many stages from itself to the last: one for each of them.

    Interleaved, two parts of a stage for each hop to the last, and for all parts but one a whole round.
    """
    if configuration.pp_chunks == 1:
        return np.minimum(behind, configuration.accumulate)
    rounds = np.minimum(configuration.pp, configuration.accumulate)
    parts: Quantity = (configuration.chunks - 1) * rounds + 2 * (np.asarray(behind) - 1) + 1
    return np.asarray(np.minimum(parts / configuration.chunks, configuration.accumulate))[()]


def trained_stage(shape: ModelShape, stage: Stage, configuration: Configuration) -> Stage:
    """What of a stage is trained: all of it, unless parts of the model are frozen, which no pipeline cuts."""
    if shape.unfrozen is None:
        return stage
    runs = [(layer, count) for stack in shape.stacks for layer, count in stack.groups() if not layer.frozen]
    dense, experts = _parameters_on(runs, configuration)
    unfrozen = shape.unfrozen
    return replace(
        stage,
        dense=dense,
        experts=experts / (configuration.ep * expert_tp(configuration)),
        outside=(unfrozen.table + unfrozen.head) / configuration.tp + unfrozen.other,
    )


def _layers_on(runs: list[tuple[Layer, int]], shape: ModelShape, configuration: Configuration, name: str) -> Quantity:
    """As many on each stage; nanotron balances cost, in which a head counts as the layers that are as large."""
    count, pp = sum(count for _, count in runs), configuration.pp
    if configuration.framework != "nanotron" or name == "stage":
        chunks = configuration.chunks
        return -(-count // (pp * chunks)) * chunks
    layer = runs[0][0]
    head = shape.vocab * shape.hidden / (layer.parameters - layer.norm_parameters)
    if name == "first stage":
        return np.minimum((count + head) / pp // 1 + 1, count)
    return np.maximum(count - ((count + head) * (pp - 1) / pp // 1 + 1), 0)


def expert_parameters(layer: Layer) -> int:
    """Of all the experts of a layer that are routed to."""
    mlp = layer.feed_forward
    return mlp.experts * layer.expert_parameters if mlp else 0


def expert_tp(configuration: Configuration) -> Quantity:
    """How far one expert is split: as the rest is, unless its group of GPUs is used up by expert parallelism."""
    if np.ndim(configuration.ep) == 0 and configuration.ep == 1:
        return configuration.tp
    group = configuration.tp * configuration.cp * configuration.data
    return np.minimum(configuration.tp, np.maximum(group // configuration.ep, 1))


def shards(configuration: Configuration) -> Number:
    """GPUs that share one copy of what ZeRO shards: the ranks of a context-parallel group do too."""
    return configuration.shard * configuration.cp


def expert_shards(configuration: Configuration) -> Quantity:
    """The same for an expert, of which expert parallelism leaves fewer copies."""
    copies = configuration.tp * shards(configuration) // (configuration.ep * expert_tp(configuration))
    return np.maximum(copies, 1)


def sharded(stage: Stage, configuration: Configuration, from_stage: int) -> Quantity:
    """Parameters for which one GPU keeps something that is sharded from that ZeRO stage on."""
    if configuration.zero < from_stage:
        return stage.parameters
    dense = (stage.dense + stage.outside) / shards(configuration)
    return dense + stage.experts / expert_shards(configuration)


def block_parameters(shape: ModelShape, configuration: Configuration, *, trained: bool = False) -> Quantity:
    """Of the largest block on one GPU before data-parallel sharding: what is gathered at once. Of those trained, if asked."""
    layers = (layer for stack in shape.stacks for layer, _ in stack.kinds() if not (trained and layer.frozen))
    largest: Quantity = 0.0
    for layer in layers:
        experts = expert_parameters(layer)
        matrices = layer.parameters - layer.norm_parameters - experts
        split = matrices / configuration.tp + experts / (configuration.ep * expert_tp(configuration))
        largest = np.maximum(largest, split + layer.norm_parameters)
    return largest
