"""Which part of a model one GPU holds: how tensor, pipeline, expert and data parallelism divide its parameters.

A pipeline is represented by its two ends: the first stage has the most micro-batches in flight and the embedding, the
last one the head and the loss. Stages between them need less than the first. This module counts parameters, not bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tonnage.budget.configuration import Configuration, Number, Quantity
from tonnage.models.shape import LayerShape, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParameters:
    """Parameters on one GPU of one pipeline stage, by what divides them further."""

    name: str
    share: Quantity  # share of the model's layers
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


def stages(shape: ModelShape, configuration: Configuration) -> Iterator[StageParameters]:
    """Yield the ends of the pipeline; without one, a single stage that is both."""
    pp = configuration.pp
    only = np.asarray(pp) == 1
    ends = ("stage",) if np.all(only) else ("first stage", "last stage")
    for name in ends:
        # 1.0 and 0.0; `[()]` turns a 0-d array into a plain number.
        embeds = np.asarray(only | (name != "last stage"), dtype=float)[()]
        heads = np.asarray(only | (name != "first stage"), dtype=float)[()]
        runs = [run for stack in shape.stacks for run in stack.groups()]
        share = _layers_on(runs, shape, configuration, name) / max(sum(count for _, count in runs), 1)
        dense, experts = _parameters_on(runs, configuration)
        # Both ends of a pipeline hold a copy of a tied embedding.
        tied_copy = shape.vocab * shape.hidden * (heads * (1 - embeds)) if shape.tied else 0.0
        split = embeds * shape.embedding_parameters + heads * shape.head_parameters + tied_copy
        yield StageParameters(
            name=name,
            share=share,
            in_flight=_in_flight(configuration, pp if name == "first stage" else 1),
            embeds=embeds,
            heads=heads,
            dense=share * dense,
            experts=share * experts / (configuration.ep * expert_tp(configuration)),
            outside=split / configuration.tp + heads * shape.other_parameters,
        )


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


def trained_stage(shape: ModelShape, stage: StageParameters, configuration: Configuration) -> StageParameters:
    """Return the trained part of a stage: all of it unless parts of the model are frozen, which rules out a pipeline."""
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


def _layers_on(
    runs: list[tuple[LayerShape, int]], shape: ModelShape, configuration: Configuration, name: str
) -> Quantity:
    """Return the layers on a stage: an equal share, or as nanotron balances cost, with the head counted as layers."""
    count, pp = sum(count for _, count in runs), configuration.pp
    if configuration.framework != "nanotron" or name == "stage":
        chunks = configuration.chunks
        return -(-count // (pp * chunks)) * chunks
    layer = runs[0][0]
    head = shape.vocab * shape.hidden / (layer.parameters - layer.norm_parameters)
    if name == "first stage":
        return np.minimum((count + head) / pp // 1 + 1, count)
    return np.maximum(count - ((count + head) * (pp - 1) / pp // 1 + 1), 0)


def expert_parameters(layer: LayerShape) -> int:
    """Return the parameters of all routed experts of a layer."""
    mlp = layer.feed_forward
    return mlp.experts * layer.expert_parameters if mlp else 0


def expert_tp(configuration: Configuration) -> Quantity:
    """Return the tensor-parallel degree of an expert: that of the model, unless expert parallelism uses up its GPUs."""
    if np.ndim(configuration.ep) == 0 and configuration.ep == 1:
        return configuration.tp
    group = configuration.tp * configuration.cp * configuration.data
    return np.minimum(configuration.tp, np.maximum(group // configuration.ep, 1))


def shards(configuration: Configuration) -> Number:
    """Return how many GPUs share one copy of what ZeRO shards, including context-parallel ranks."""
    return configuration.shard * configuration.cp


def expert_shards(configuration: Configuration) -> Quantity:
    """Return the same for an expert, of which expert parallelism leaves fewer copies."""
    copies = configuration.tp * shards(configuration) // (configuration.ep * expert_tp(configuration))
    return np.maximum(copies, 1)


def sharded(stage: StageParameters, configuration: Configuration, from_stage: int) -> Quantity:
    """Return the parameters per GPU of something that is sharded from that ZeRO stage on."""
    if configuration.zero < from_stage:
        return stage.parameters
    dense = (stage.dense + stage.outside) / shards(configuration)
    return dense + stage.experts / expert_shards(configuration)


def block_parameters(shape: ModelShape, configuration: Configuration, *, trained: bool = False) -> Quantity:
    """Return the parameters of the largest (trained) block on one GPU: what is gathered at once."""
    layers = (layer for stack in shape.stacks for layer, _ in stack.kinds() if not (trained and layer.frozen))
    largest: Quantity = 0.0
    for layer in layers:
        experts = expert_parameters(layer)
        matrices = layer.parameters - layer.norm_parameters - experts
        split = matrices / configuration.tp + experts / (configuration.ep * expert_tp(configuration))
        largest = np.maximum(largest, split + layer.norm_parameters)
    return largest
