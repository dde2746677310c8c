"""Seconds of communication between GPUs: how much is sent, over which link, and how much compute hides.

| parallelism | what is sent                                                       | hidden behind                |
|-------------|--------------------------------------------------------------------|------------------------------|
| tensor      | a gather and a scatter of activations around attention and MLP     | nothing; some of it products |
| context     | keys and values around a ring                                      | the attention of that layer  |
| expert      | tokens to their experts and back                                   | nothing                      |
| pipeline    | activations to the next stage, gradients back                      | nothing                      |
| data        | gradients; parameters if they are sharded                          | the pass they belong to      |
| FSDP2 in a  | parameters for the first micro-batch; gradients after the last one | the first forward pass;      |
| pipeline    |                                                                    | nothing                      |

Tensor parallelism is the innermost dimension of ranks, then context, data and, outermost, the pipeline. The experts of a layer
are on neighbouring GPUs, so replicas of one expert are that many GPUs apart. Bandwidths are the vendors', times the share that
NCCL reaches; every step of a ring costs a hop, every message a start.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tonnage.budget.time.roofline import Calibration, calibration
from tonnage.budget.training.configuration import Configuration, Number, Quantity
from tonnage.budget.training.states import StageShare
from tonnage.hardware.cluster import Cluster
from tonnage.models.shape import AttentionKind

_LARGE_TENSORS = 3  # per layer: before attention, into and out of the MLP
_LEAST_MESSAGES = 1e-9  # for a stage chunk without layers


@dataclass(frozen=True, slots=True)
class ClusterLinks:
    """The links of a cluster as collectives use them."""

    cluster: Cluster
    shares: Calibration

    def gather_s(self, size_bytes: Quantity, ranks: Number, stride: Number = 1, messages: Quantity = 1) -> Quantity:
        """Return the seconds of ring all-gathers (or reduce-scatters) of `size_bytes` in total."""
        steps = np.asarray(ranks) - 1
        piece = size_bytes / ranks / np.maximum(messages, _LEAST_MESSAGES)
        # One step of the ring. Between hosts, NCCL sends small pieces by a low-latency protocol.
        hop_s, rate = self._hop_s(ranks, stride), self._ring_bytes_per_s(ranks, stride)
        large_s = hop_s + piece / rate
        small_s = hop_s - self.shares.network_small_saves_s + piece / self.shares.network_small_bytes_per_s
        beyond = np.asarray(ranks) * stride > self.cluster.gpus_per_host
        step_s = np.where(beyond, np.minimum(large_s, np.maximum(small_s, piece / rate)), large_s)
        return messages * steps * step_s + messages * self.shares.link_start_s * (steps > 0)

    def _ring_bytes_per_s(self, ranks: Number, stride: Number) -> Quantity:
        """Return a ring's bandwidth: the host's own link, or beyond it one network card per group member in the host."""
        cluster, span = self.cluster, np.asarray(ranks) * stride
        outside = np.minimum(cluster.peer_bytes_per_s, cluster.network_bytes_per_s * self._members(stride))
        near = cluster.link_bytes_per_s(np.minimum(span, cluster.gpus_per_host))
        return np.where(span > cluster.gpus_per_host, outside, near) * self.shares.link_ceiling

    def reduce_s(self, size_bytes: Quantity, ranks: Number, stride: Number = 1, messages: Quantity = 1) -> Quantity:
        """Return the seconds of all-reduces: a reduce-scatter and an all-gather, or a tree between hosts."""
        ring_s = 2 * self.gather_s(size_bytes, ranks, stride, messages)
        members = np.minimum(self._members(stride), ranks)
        hosts = np.maximum(np.ceil(np.asarray(ranks) / members), 1)
        network_hop_s = self.cluster.host.network_hop_s or self.shares.network_hop_s
        deep_s = 2 * (np.ceil(np.log2(hosts)) * network_hop_s + (members - 1) * self.shares.link_hop_s)
        rate = self._ring_bytes_per_s(ranks, stride) * self.cluster.host.network_tree_share
        sent_s = 2 * size_bytes * (np.asarray(ranks) - 1) / ranks / rate
        tree_s = sent_s + messages * (deep_s + self.shares.link_start_s)
        return np.where(hosts > 1, np.minimum(ring_s, tree_s), ring_s)

    def exchange_s(self, size_bytes: Quantity, ranks: Number, messages: Quantity = 1) -> Quantity:
        """Return the seconds of all-to-alls among neighbours, in which each rank sends `size_bytes` in total."""
        steps = np.asarray(ranks) - 1
        starts_s = messages * (self.shares.link_start_s + self._hop_s(ranks, 1)) * (steps > 0)
        return steps / ranks * size_bytes / self.pair_bytes_per_s(ranks) + starts_s

    def pair_bytes_per_s(self, span: Quantity) -> Quantity:
        """Return the point-to-point bandwidth within `span` neighbouring GPUs."""
        return self.cluster.link_bytes_per_s(np.asarray(span, dtype=np.int64)) * self.shares.link_ceiling

    def send_s(self, size_bytes: Quantity, span: Quantity, messages: Quantity = 1) -> Quantity:
        """Return the seconds of point-to-point sends within `span` neighbouring GPUs."""
        return size_bytes / self.pair_bytes_per_s(span) + messages * (self.shares.link_start_s + self._hop_s(span, 1))

    def _members(self, stride: Number) -> Any:
        """Return how many ranks of a group with this stride share a host."""
        return np.maximum(self.cluster.gpus_per_host // np.asarray(stride), 1)

    def _hop_s(self, ranks: Quantity, stride: Number) -> Quantity:
        """Return the latency of one hop. A ring advances in lockstep, so one hop that leaves the host slows all."""
        beyond = np.asarray(ranks) * stride > self.cluster.gpus_per_host
        return np.where(beyond, self.cluster.host.network_hop_s or self.shares.network_hop_s, self.shares.link_hop_s)


class Traffic(NamedTuple):
    """Seconds per micro-batch on one stage, and per step. Fields that can be hidden are named after what hides them."""

    plain_s: Quantity  # per micro-batch, tensor and expert parallelism and pipeline: not hidden
    products_s: Quantity  # per micro-batch, tensor parallelism: behind the products of the backward pass
    ring_s: Quantity  # per micro-batch, context parallelism: behind attention
    forward_s: Quantity  # per micro-batch, gathered parameters: behind the forward pass
    backward_s: Quantity  # per micro-batch, gathered parameters and scattered gradients: behind the backward pass
    last_backward_s: Quantity  # per step, gradients: behind the last backward pass
    first_forward_s: Quantity  # per step, parameters that are gathered once: behind the first forward pass
    step_s: Quantity  # per step, updated parameters and gradients of an embedding tied across stages: not hidden
    ends: Quantity  # share of a pass's traffic that nothing hides: the embedding's, at either end of it


def traffic(stage: StageShare, network: ClusterLinks) -> Traffic:
    """Return the traffic of one configuration or many."""
    shape, config = stage.shape, stage.configuration
    plain_s, products_s = _tensor_s(stage, network)
    stages_apart = config.tp * np.asarray(config.cp) * config.data
    in_pipeline = np.asarray(config.pp) > 1
    # Pipeline sends to the next stage and back, from each of its chunks.
    sent_bytes = 2 * (_activation_bytes(stage) / config.tp)
    next_s = network.send_s(sent_bytes, stages_apart + 1, config.traits.pipeline_messages)
    pipeline_s = next_s * config.chunks * in_pipeline
    # Tokens go to their experts and back, in every pass.
    mlps = [layer.feed_forward for stack in shape.stacks for layer in stack.layers]
    chosen = [mlp.experts_per_token for mlp in mlps if mlp is not None and mlp.experts]
    size = _activation_bytes(stage) / config.tp * sum(chosen) * stage.share
    exchanged_s = network.exchange_s(size, config.ep, len(chosen) * stage.share)
    plain_s = plain_s + 2 * _passes(config) * exchanged_s + pipeline_s
    # The first and last stages also reduce the gradients of an embedding tied to the head.
    tied_bytes = shape.embedding_parameters * config.gradient_bytes / config.tp
    tied_s = network.reduce_s(tied_bytes, 2, stages_apart) * in_pipeline * (shape.tied and not config.lora_rank)
    gather_s, scatter_s, reduce_s = _data_s(stage, network)
    zero, none = config.zero, 0.0 * gather_s
    ends = stage.embeds * shape.embedding_parameters / config.tp / stage.parameters
    ring_s = _ring_s(stage, network)
    if zero == 0:
        return Traffic(plain_s, products_s, ring_s, none, none, reduce_s, none, tied_s, ends)
    if not config.shards_parameters:
        each_s, last_s = (scatter_s, none) if zero == 2 else (none, scatter_s)
        return Traffic(plain_s, products_s, ring_s, none, each_s, last_s, none, gather_s + tied_s, ends)
    again_s, once = gather_s * (zero == 3), config.reduces_once
    # In a pipeline, a forward pass reuses what the backward pass before it has gathered.
    first_s, after_s, each = once * gather_s, once * scatter_s, 1 - once
    return Traffic(
        plain_s, products_s, ring_s, each * gather_s, again_s + each * scatter_s, none, first_s, after_s + tied_s, ends
    )


def _activation_bytes(stage: StageShare) -> Quantity:
    """Return the bytes of one micro-batch between two layers, summed over tensor-parallel ranks."""
    return stage.configuration.tokens * stage.shape.hidden * stage.configuration.compute_bytes


def _passes(config: Configuration) -> int:
    """Return 2, for forward and backward, or 3 with full recomputation."""
    return 3 if config.checkpoint == "full" else 2


def _tensor_s(stage: StageShare, network: ClusterLinks) -> tuple[Quantity, Quantity]:
    """Return exposed seconds, and those hidden behind products of the backward pass.

    A layer has two pairs of collectives per pass (an all-reduce counts as a pair), and one pair is outside. Frameworks
    with their own code scatter an input's gradient while computing the weight's, and gather the input again. Selective
    checkpointing of operators saves what was scattered, and gathers again.
    """
    config, layers = stage.configuration, stage.layers
    once_s = network.gather_s(_activation_bytes(stage), config.tp)
    everything = 4 * layers * _passes(config) + 4
    if config.checkpoint == "selective" and config.traits.selective == "operators":
        everything = everything + 2 * layers * config.sequence_parallel
    if config.traits.parallel == "torch":
        return once_s * everything, 0.0 * once_s
    hidden = 2 if config.sequence_parallel else 4
    return once_s * (everything - hidden * layers), once_s * 4 * layers


def _ring_s(stage: StageShare, network: ClusterLinks) -> Quantity:
    """Return the seconds of ring attention: keys and values go around once forward, and with their gradients backward."""
    config = stage.configuration
    widths = [
        layer.attention.kv_heads * (layer.attention.head_dim + layer.attention.value_head_dim)
        for stack in stage.shape.stacks
        for layer in stack.layers
        if layer.attention is not None and layer.attention.kind is not AttentionKind.RECURRENT
    ]
    per_rank = config.tokens * sum(widths) * stage.share * config.compute_bytes / config.tp
    once_s = network.gather_s(per_rank * config.cp, config.cp, config.tp, len(widths) * stage.share)
    return once_s * (_passes(config) + 1)


def _data_s(stage: StageShare, network: ClusterLinks) -> tuple[Quantity, Quantity, Quantity]:
    """Return the seconds to gather parameters, to reduce-scatter gradients and to all-reduce them.

    Hybrid sharding reduce-scatters within a shard group, then all-reduces between groups.
    """
    config, bucket = stage.configuration, stage.configuration.traits.bucket_bytes
    trained = 0.0 if config.lora_rank else stage.trained.parameters / stage.parameters
    # Rings of GPUs: their parameters, layers, shards, copies and distance. Experts under expert parallelism have fewer
    # replicas, further apart.
    ranks, everyone = config.shards, config.data * np.asarray(config.cp)
    spread = np.asarray(config.ep) > 1
    rings: list[tuple[Any, ...]] = [(stage.parameters, stage.layers, ranks, everyone, config.tp)]
    if np.any(spread):
        apart = config.ep * config.expert_tp
        copies = np.maximum(config.tp * everyone // apart, 1)
        experts = stage.experts * spread
        mixtures = sum(layer.expert_parameters > 0 for stack in stage.shape.stacks for layer in stack.layers)
        rings = [
            (stage.parameters - experts, *rings[0][1:]),
            (experts, mixtures * stage.share * spread, config.expert_shards, copies, apart),
        ]
    found: list[Quantity] = [0.0, 0.0, 0.0]
    for place, (held, layers, shards, copies, stride) in enumerate(rings):
        # Messages: one per layer if parameters are sharded, else gradient buckets or large tensors.
        messages = layers
        if bucket and not config.shards_parameters:
            messages = np.clip(held * config.made_bytes / bucket, 1, _LARGE_TENSORS * layers + 1)
            messages = messages * (np.asarray(held) > 0)
        at_once = config.traits.gathers_at_once and not config.shards_parameters
        gathers = np.minimum(messages, 1) if at_once else messages
        outside = stage.outside if place == 0 else 0
        parameters = outside * config.compute_bytes + (held - outside) * config.base_bytes
        gradients = trained * held * config.gradient_bytes
        gather_s = network.gather_s(parameters, shards, stride, gathers)
        scatter_s = network.gather_s(gradients, shards, stride, messages)
        scatter_s = scatter_s + network.reduce_s(gradients / shards, copies // shards, stride * shards, messages)
        whole_s = network.reduce_s(gradients, copies, stride, messages)
        found = [known + more for known, more in zip(found, (gather_s, scatter_s, whole_s), strict=True)]
    return found[0], found[1], found[2]


def collective_seconds(cluster: Cluster) -> Callable[[str, int, int, int], float]:
    """Return a function of operation, total bytes, ranks and stride that gives the seconds of a collective."""
    network = ClusterLinks(cluster, calibration())

    def seconds(operation: str, size_bytes: int, ranks: int, apart: int) -> float:
        match operation:
            case "send" | "recv":
                return float(network.send_s(size_bytes, apart + 1))
            case "all_to_all" | "all_to_all_single":
                return float(network.exchange_s(size_bytes, ranks))
            case "all_reduce" | "barrier":
                return float(network.reduce_s(size_bytes, ranks, apart))
        # Gathers and scatters; a broadcast goes around the ring as a gather does.
        return float(network.gather_s(size_bytes, ranks, apart))

    return seconds
