"""Seconds that GPUs talk to each other: how much, over which link, and how much of it the arithmetic hides.

| parallelism | what is sent                                                       | hidden behind                |
|-------------|--------------------------------------------------------------------|------------------------------|
| tensor      | a gather and a scatter of activations around attention and MLP     | nothing; some of it products |
| context     | keys and values around a ring                                      | the attention of that layer  |
| expert      | tokens to their experts and back                                   | nothing                      |
| pipeline    | activations to the next stage, gradients back                      | nothing                      |
| data        | gradients; parameters where they are sharded                       | the pass that they belong to |
| FSDP2 in a  | parameters for the first micro-batch; gradients after the last one | the first forward pass;      |
| pipeline    |                                                                    | nothing                      |

Ranks are laid out with tensor parallelism innermost, then context, data and, outermost, the pipeline. The experts of a layer lie
on neighbours, so that copies of one are apart by the GPUs that hold all of them. Bandwidths are the makers', times the share that
NCCL reaches; every step of a ring costs a hop, every message a start.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tonnage.budget.configuration import Configuration, Number, Quantity
from tonnage.budget.frameworks import framework_of, gradient_bytes, made_bytes, reduces_once
from tonnage.budget.roofline import Calibration
from tonnage.budget.sharding import Stage, expert_shards, expert_tp, shards, trained_stage
from tonnage.budget.states import sharded_parameters
from tonnage.hardware.cluster import Cluster
from tonnage.models.shape import AttentionKind, ModelShape

_LARGE_TENSORS = 3  # of a layer: before attention, into and out of the MLP
_LEAST_MESSAGES = 1e-9  # a part of a stage without layers


@dataclass(frozen=True, slots=True)
class Network:
    """The links of a cluster as collectives use them."""

    cluster: Cluster
    shares: Calibration

    def gather_s(self, size_bytes: Quantity, ranks: Number, stride: Number = 1, messages: Quantity = 1) -> Quantity:
        """All-gathers (or reduce-scatters) of that many bytes in all, among `ranks` that are `stride` apart: in a ring."""
        steps = np.asarray(ranks) - 1
        piece = size_bytes / ranks / np.maximum(messages, _LEAST_MESSAGES)
        return messages * steps * self._step_s(piece, ranks, stride) + messages * self.shares.link_start_s * (steps > 0)

    def reduce_s(self, size_bytes: Quantity, ranks: Number, stride: Number = 1, messages: Quantity = 1) -> Quantity:
        """All-reduces: a reduce-scatter, then an all-gather; or over a tree of hosts, which is less deep than a ring is long."""
        ring_s = 2 * self.gather_s(size_bytes, ranks, stride, messages)
        members = np.minimum(self._members(stride), ranks)
        hosts = np.maximum(np.ceil(np.asarray(ranks) / members), 1)
        deep_s = 2 * (np.ceil(np.log2(hosts)) * self._network_hop_s + (members - 1) * self.shares.link_hop_s)
        rate = self._ring_bytes_per_s(ranks, stride) * self.cluster.host.network_tree_share
        sent_s = 2 * size_bytes * (np.asarray(ranks) - 1) / ranks / rate
        tree_s = sent_s + messages * (deep_s + self.shares.link_start_s)
        return np.where(hosts > 1, np.minimum(ring_s, tree_s), ring_s)

    def exchange_s(self, size_bytes: Quantity, ranks: Number, messages: Quantity = 1) -> Quantity:
        """All-to-alls among neighbours in which each of `ranks` sends that many bytes in all."""
        steps = np.asarray(ranks) - 1
        starts_s = messages * (self.shares.link_start_s + self._hop_s(ranks, 1)) * (steps > 0)
        return steps / ranks * size_bytes / self.pair_bytes_per_s(ranks) + starts_s

    def send_s(self, size_bytes: Quantity, span: Quantity, messages: Quantity = 1) -> Quantity:
        """From one GPU to another, within so many neighbours."""
        return size_bytes / self.pair_bytes_per_s(span) + messages * (self.shares.link_start_s + self._hop_s(span, 1))

    def pair_bytes_per_s(self, span: Quantity) -> Quantity:
        """From one GPU to another, within so many neighbours."""
        return self.cluster.link_bytes_per_s(np.asarray(span, dtype=np.int64)) * self.shares.link_ceiling

    @property
    def _network_hop_s(self) -> float:
        return self.cluster.host.network_hop_s or self.shares.network_hop_s

    def _members(self, stride: Number) -> Any:
        """Of a group whose ranks are so far apart, how many are in one host."""
        return np.maximum(self.cluster.gpus_per_host // np.asarray(stride), 1)

    def _ring_bytes_per_s(self, ranks: Number, stride: Number) -> Quantity:
        """Within a host its link; beyond, every member of the group in a host brings its own network card."""
        span = np.asarray(ranks) * stride
        inside = self.cluster.peer_bytes_per_s
        outside = np.minimum(inside, self.cluster.network_bytes_per_s * self._members(stride))
        near = self.cluster.link_bytes_per_s(np.minimum(span, self.cluster.gpus_per_host))
        return np.where(span > self.cluster.gpus_per_host, outside, near) * self.shares.link_ceiling

    def _step_s(self, piece_bytes: Quantity, ranks: Number, stride: Number) -> Quantity:
        """One step of a ring. Between hosts, small pieces go by a protocol that is quicker to begin and slower to go on."""
        hop_s, rate = self._hop_s(ranks, stride), self._ring_bytes_per_s(ranks, stride)
        large_s = hop_s + piece_bytes / rate
        small_s = hop_s - self.shares.network_small_saves_s + piece_bytes / self.shares.network_small_bytes_per_s
        beyond = np.asarray(ranks) * stride > self.cluster.gpus_per_host
        return np.where(beyond, np.minimum(large_s, np.maximum(small_s, piece_bytes / rate)), large_s)

    def _hop_s(self, ranks: Quantity, stride: Number) -> Quantity:
        """From one to the next. All of a ring go on together: one that leaves the host holds the others up."""
        beyond = np.asarray(ranks) * stride > self.cluster.gpus_per_host
        return np.where(beyond, self._network_hop_s, self.shares.link_hop_s)


class Traffic(NamedTuple):
    """Seconds of one micro-batch on one stage, and of one step. What can be hidden is named for what hides it."""

    plain_s: Quantity  # a micro-batch, tensor and expert parallelism and pipeline: not hidden
    products_s: Quantity  # a micro-batch, tensor parallelism: behind the products of the backward pass
    ring_s: Quantity  # a micro-batch, context parallelism: behind attention
    forward_s: Quantity  # a micro-batch, gathered parameters: behind the forward pass
    backward_s: Quantity  # a micro-batch, gathered parameters and scattered gradients: behind the backward pass
    last_backward_s: Quantity  # a step, gradients: behind the last backward pass
    first_forward_s: Quantity  # a step, parameters that are gathered once: behind the first forward pass
    step_s: Quantity  # a step, updated parameters and gradients of what two stages tie: not hidden
    ends: Quantity  # share of what is named for a pass that nothing hides: the embedding's, at either end of it


def traffic(shape: ModelShape, stage: Stage, configuration: Configuration, network: Network) -> Traffic:
    """Of one configuration or many."""
    plain_s, products_s = _tensor_s(shape, stage, configuration, network)
    stages_apart = configuration.tp * np.asarray(configuration.cp) * configuration.data
    in_pipeline = np.asarray(configuration.pp) > 1
    # A pipeline: to the next stage and back, from each of its parts.
    sent_bytes = 2 * (_activation_bytes(shape, configuration) / configuration.tp)
    next_s = network.send_s(sent_bytes, stages_apart + 1, framework_of(configuration).pipeline_messages)
    pipeline_s = next_s * configuration.chunks * in_pipeline
    plain_s = plain_s + _expert_s(shape, stage, configuration, network) + pipeline_s
    # Its first stage and its last sum the gradients of an embedding that is the head, too.
    tied_bytes = shape.embedding_parameters * gradient_bytes(configuration) / configuration.tp
    tied = shape.tied and not configuration.lora_rank
    tied_s = network.reduce_s(tied_bytes, 2, stages_apart) * in_pipeline * tied
    gather_s, scatter_s, reduce_s = _data_s(shape, stage, configuration, network)
    zero, none = configuration.zero, 0.0 * gather_s
    ends = stage.embeds * shape.embedding_parameters / configuration.tp / stage.parameters
    ring_s = _ring_s(shape, stage, configuration, network)
    if zero == 0:
        return Traffic(plain_s, products_s, ring_s, none, none, reduce_s, none, tied_s, ends)
    if not sharded_parameters(configuration):
        each_s, last_s = (scatter_s, none) if zero == 2 else (none, scatter_s)
        return Traffic(plain_s, products_s, ring_s, none, each_s, last_s, none, gather_s + tied_s, ends)
    again_s, once = gather_s * (zero == 3), reduces_once(configuration)
    # In a pipeline a forward pass finds what the backward pass before it has gathered.
    first_s, after_s, each = once * gather_s, once * scatter_s, 1 - once
    return Traffic(
        plain_s, products_s, ring_s, each * gather_s, again_s + each * scatter_s, none, first_s, after_s + tied_s, ends
    )


def _activation_bytes(shape: ModelShape, configuration: Configuration) -> Quantity:
    """One micro-batch between two layers, all tensor-parallel ranks together."""
    return configuration.tokens * shape.hidden * configuration.compute_bytes


def _layers(shape: ModelShape) -> int:
    return sum(len(stack.layers) for stack in shape.stacks)


def _passes(configuration: Configuration) -> int:
    """Forward and backward, and the forward again where all is recomputed."""
    return 3 if configuration.checkpoint == "full" else 2


def _tensor_s(
    shape: ModelShape, stage: Stage, configuration: Configuration, network: Network
) -> tuple[Quantity, Quantity]:
    """What nothing hides, and what runs behind the products of a backward pass.

    Two pairs of collectives a layer and pass, which an all-reduce without sequence parallelism is too; one pair outside. Those
    with code of their own scatter the gradient of an input while that of the weight is computed, and gather the input again.
    Selective checkpoints of operators keep what was scattered, and gather again.
    """
    once_s = network.gather_s(_activation_bytes(shape, configuration), configuration.tp)
    layers = _layers(shape) * stage.share
    everything = 4 * layers * _passes(configuration) + 4
    if configuration.checkpoint == "selective" and framework_of(configuration).selective == "operators":
        everything = everything + 2 * layers * configuration.sequence_parallel
    if framework_of(configuration).parallel == "torch":
        return once_s * everything, 0.0 * once_s
    hidden = 2 if configuration.sequence_parallel else 4
    return once_s * (everything - hidden * layers), once_s * 4 * layers


def _ring_s(shape: ModelShape, stage: Stage, configuration: Configuration, network: Network) -> Quantity:
    """Keys and values go around once forward; backward they do so with their gradients."""
    widths = [
        layer.attention.kv_heads * (layer.attention.head_dim + layer.attention.value_head_dim)
        for stack in shape.stacks
        for layer in stack.layers
        if layer.attention is not None and layer.attention.kind is not AttentionKind.RECURRENT
    ]
    per_rank = configuration.tokens * sum(widths) * stage.share * configuration.compute_bytes / configuration.tp
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


def _messages(parameters: Quantity, layers: Quantity, configuration: Configuration) -> Quantity:
    """Sharded parameters are gathered layer by layer. Else gradients go in buckets, of which a large tensor is one."""
    bucket = framework_of(configuration).bucket_bytes
    if sharded_parameters(configuration) or not bucket:
        return layers
    buckets = np.clip(parameters * made_bytes(configuration) / bucket, 1, _LARGE_TENSORS * layers + 1)
    return buckets * (np.asarray(parameters) > 0)


class _Ring(NamedTuple):
    """Parameters that the same GPUs hold copies and shards of."""

    parameters: Quantity
    layers: Quantity
    shards: Any
    copies: Any
    stride: Any  # from one of these GPUs to the next


def _rings(shape: ModelShape, stage: Stage, configuration: Configuration) -> list[_Ring]:
    """One of all parameters; experts that are spread have fewer copies, which lie further apart."""
    ranks, everyone = shards(configuration), configuration.data * np.asarray(configuration.cp)
    layers = _layers(shape) * stage.share
    spread = np.asarray(configuration.ep) > 1
    if not np.any(spread):
        return [_Ring(stage.parameters, layers, ranks, everyone, configuration.tp)]
    apart = configuration.ep * expert_tp(configuration)
    copies = np.maximum(configuration.tp * everyone // apart, 1)
    experts = stage.experts * spread
    mixtures = sum(layer.expert_parameters > 0 for stack in shape.stacks for layer in stack.layers)
    return [
        _Ring(stage.parameters - experts, layers, ranks, everyone, configuration.tp),
        _Ring(experts, mixtures * stage.share * spread, expert_shards(configuration), copies, apart),
    ]


def _data_s(
    shape: ModelShape, stage: Stage, configuration: Configuration, network: Network
) -> tuple[Quantity, Quantity, Quantity]:
    """To gather the parameters, to scatter the gradients, to reduce them in full; layer by layer.

    Hybrid sharding scatters within a shard group, then reduces what is left between the groups.
    """
    trained = (
        0.0 if configuration.lora_rank else trained_stage(shape, stage, configuration).parameters / stage.parameters
    )
    at_once = framework_of(configuration).gathers_at_once and not sharded_parameters(configuration)
    found: list[Quantity] = [0.0, 0.0, 0.0]
    for place, ring in enumerate(_rings(shape, stage, configuration)):
        messages = _messages(ring.parameters, ring.layers, configuration)
        gathers = np.minimum(messages, 1) if at_once else messages
        outside = stage.outside if place == 0 else 0
        parameters = outside * configuration.compute_bytes + (ring.parameters - outside) * configuration.base_bytes
        gradients = trained * ring.parameters * gradient_bytes(configuration)
        gather_s = network.gather_s(parameters, ring.shards, ring.stride, gathers)
        scatter_s = network.gather_s(gradients, ring.shards, ring.stride, messages)
        between = ring.copies // ring.shards, ring.stride * ring.shards
        scatter_s = scatter_s + network.reduce_s(gradients / ring.shards, *between, messages)
        whole_s = network.reduce_s(gradients, ring.copies, ring.stride, messages)
        found = [known + more for known, more in zip(found, (gather_s, scatter_s, whole_s), strict=True)]
    return found[0], found[1], found[2]
