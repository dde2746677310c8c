"""Seconds that GPUs talk to each other: how much, over which link, and how much of it the arithmetic hides.

| parallelism | what is sent                                                       | hidden behind                |
|-------------|--------------------------------------------------------------------|------------------------------|
| tensor      | a gather and a scatter of activations around attention and MLP     | nothing                      |
| context     | keys and values around a ring                                      | the attention of that layer  |
| expert      | tokens to their experts and back                                   | nothing                      |
| pipeline    | activations to the next stage, gradients back                      | nothing                      |
| data        | gradients; parameters where they are sharded                       | the pass that they belong to |

Ranks are laid out with tensor parallelism innermost, then context, data and, outermost, the pipeline. Bandwidths are the
makers', times the share that NCCL reaches; every step of a ring costs a hop.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tonnage.budget.configuration import Configuration, Number, Quantity
from tonnage.budget.frameworks import gradient_bytes
from tonnage.budget.roofline import Calibration
from tonnage.budget.sharding import Stage
from tonnage.budget.states import sharded_parameters
from tonnage.hardware.cluster import Cluster
from tonnage.models.shape import AttentionKind, ModelShape


@dataclass(frozen=True, slots=True)
class Network:
    """The links of a cluster as collectives use them."""

    cluster: Cluster
    shares: Calibration

    def gather_s(self, size_bytes: Quantity, ranks: Number, stride: Number = 1, messages: Quantity = 1) -> Quantity:
        """All-gathers (or reduce-scatters) of that many bytes in all, among `ranks` that are `stride` apart."""
        steps = np.asarray(ranks) - 1
        hops_s = messages * self._hop_s(ranks, stride)
        return steps * (size_bytes / ranks / self._ring_bytes_per_s(ranks, stride) + hops_s)

    def reduce_s(self, size_bytes: Quantity, ranks: Number, stride: Number = 1, messages: Quantity = 1) -> Quantity:
        """All-reduces: a reduce-scatter, then an all-gather."""
        return 2 * self.gather_s(size_bytes, ranks, stride, messages)

    def exchange_s(self, size_bytes: Quantity, ranks: Number, messages: Quantity = 1) -> Quantity:
        """All-to-alls among neighbours in which each of `ranks` sends that many bytes in all."""
        steps = np.asarray(ranks) - 1
        hops_s = messages * self._hop_s(ranks, 1) * (steps > 0)
        return steps / ranks * size_bytes / self.pair_bytes_per_s(ranks) + hops_s

    def pair_bytes_per_s(self, span: Quantity) -> Quantity:
        """From one GPU to another, within so many neighbours."""
        return self.cluster.link_bytes_per_s(np.asarray(span, dtype=np.int64)) * self.shares.link_ceiling

    def _ring_bytes_per_s(self, ranks: Number, stride: Number) -> Quantity:
        """Within a host its link; beyond, every member of the group in a host brings its own network card."""
        span = np.asarray(ranks) * stride
        members = np.maximum(self.cluster.gpus_per_host // np.asarray(stride), 1)
        inside = self.cluster.peer_bytes_per_s
        outside = np.minimum(inside, self.cluster.network_bytes_per_s * members)
        near = self.cluster.link_bytes_per_s(np.minimum(span, self.cluster.gpus_per_host))
        return np.where(span > self.cluster.gpus_per_host, outside, near) * self.shares.link_ceiling

    def _hop_s(self, ranks: Number, stride: Number) -> Quantity:
        """One step of a ring, on average: of the members in a host, one sends to the next host."""
        members = np.maximum(self.cluster.gpus_per_host // np.asarray(stride), 1)
        far = (self.shares.network_hop_s + (members - 1) * self.shares.link_hop_s) / members
        return np.where(np.asarray(ranks) * stride > self.cluster.gpus_per_host, far, self.shares.link_hop_s)


class Traffic(NamedTuple):
    """Seconds of one micro-batch on one stage, and of one step. What can be hidden is named for what hides it."""

    plain_s: Quantity  # a micro-batch, tensor and expert parallelism and pipeline: not hidden
    ring_s: Quantity  # a micro-batch, context parallelism: behind attention
    forward_s: Quantity  # a micro-batch, gathered parameters: behind the forward pass
    backward_s: Quantity  # a micro-batch, gathered parameters and scattered gradients: behind the backward pass
    last_backward_s: Quantity  # a step, gradients: behind the last backward pass
    step_s: Quantity  # a step, updated parameters: not hidden


def traffic(shape: ModelShape, stage: Stage, configuration: Configuration, network: Network) -> Traffic:
    """Of one configuration or many."""
    plain_s = _tensor_s(shape, stage, configuration, network)
    plain_s = plain_s + _expert_s(shape, stage, configuration, network) + _pipeline_s(shape, configuration, network)
    gather_s, scatter_s, reduce_s = _data_s(_layers(shape), stage, configuration, network)
    zero, none = configuration.zero, 0.0 * gather_s
    ring_s = _ring_s(shape, stage, configuration, network)
    if zero == 0:
        return Traffic(plain_s, ring_s, none, none, reduce_s, none)
    if not sharded_parameters(configuration):
        every = zero == 2
        return Traffic(plain_s, ring_s, none, scatter_s if every else none, none if every else scatter_s, gather_s)
    again = 1 if zero == 3 else 0
    return Traffic(plain_s, ring_s, gather_s, again * gather_s + scatter_s, none, none)


def _activation_bytes(shape: ModelShape, configuration: Configuration) -> Quantity:
    """One micro-batch between two layers, all tensor-parallel ranks together."""
    tokens = configuration.micro_batch * configuration.seq / configuration.cp
    return tokens * shape.hidden * configuration.compute_bytes


def _layers(shape: ModelShape) -> int:
    return sum(len(stack.layers) for stack in shape.stacks)


def _passes(configuration: Configuration) -> int:
    """Forward and backward, and the forward again where all is recomputed."""
    return 3 if configuration.checkpoint == "full" else 2


def _tensor_s(shape: ModelShape, stage: Stage, configuration: Configuration, network: Network) -> Quantity:
    """Two pairs of collectives a layer and pass, which an all-reduce without sequence parallelism is too; one pair outside."""
    pair_s = network.reduce_s(_activation_bytes(shape, configuration), configuration.tp)
    layers = _layers(shape) * stage.share
    return pair_s * (2 * layers * _passes(configuration) + 2)


def _ring_s(shape: ModelShape, stage: Stage, configuration: Configuration, network: Network) -> Quantity:
    """Keys and values go around once forward; backward they do so with their gradients."""
    tokens = configuration.micro_batch * configuration.seq / configuration.cp
    widths = [
        layer.attention.kv_heads * (layer.attention.head_dim + layer.attention.value_head_dim)
        for stack in shape.stacks
        for layer in stack.layers
        if layer.attention is not None and layer.attention.kind is not AttentionKind.RECURRENT
    ]
    per_rank = tokens * sum(widths) * stage.share * configuration.compute_bytes / configuration.tp
    messages = len(widths) * stage.share
    once_s = network.gather_s(per_rank * configuration.cp, configuration.cp, configuration.tp, messages)
    return once_s * (_passes(configuration) + 1)


def _expert_s(shape: ModelShape, stage: Stage, configuration: Configuration, network: Network) -> Quantity:
    """To the experts and back, in every pass."""
    chosen = [
        layer.feed_forward.experts_per_token
        for stack in shape.stacks
        for layer in stack.layers
        if layer.feed_forward is not None and layer.feed_forward.experts
    ]
    size = _activation_bytes(shape, configuration) / configuration.tp * sum(chosen) * stage.share
    return 2 * _passes(configuration) * network.exchange_s(size, configuration.ep, len(chosen) * stage.share)


def _pipeline_s(shape: ModelShape, configuration: Configuration, network: Network) -> Quantity:
    """To the next stage and back."""
    size = _activation_bytes(shape, configuration) / configuration.tp
    span = configuration.tp * np.asarray(configuration.cp) * configuration.data + 1
    return 2 * size / network.pair_bytes_per_s(span) * (np.asarray(configuration.pp) > 1)


def _data_s(
    layers: int, stage: Stage, configuration: Configuration, network: Network
) -> tuple[Quantity, Quantity, Quantity]:
    """To gather the parameters, to scatter the gradients, to reduce them in full; layer by layer.

    Hybrid sharding scatters within a shard group, then reduces what is left between the groups.
    """
    trained = 0.0 if configuration.lora_rank else 1.0
    parameters, messages = stage.parameters, layers * stage.share
    ranks, stride = configuration.shard * np.asarray(configuration.cp), configuration.tp
    everyone = configuration.data * np.asarray(configuration.cp)
    gradients = trained * parameters * gradient_bytes(configuration)
    gather_s = network.gather_s(parameters * configuration.compute_bytes, ranks, stride, messages)
    scatter_s = network.gather_s(gradients, ranks, stride, messages)
    scatter_s = scatter_s + network.reduce_s(gradients / ranks, everyone // ranks, stride * ranks, messages)
    return gather_s, scatter_s, network.reduce_s(gradients, everyone, stride, messages)
