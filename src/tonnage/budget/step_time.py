"""The time of one training step, part by part: what the GPU computes, what it waits for, what an empty pipeline costs.

The parts sum to the step. Traffic that runs behind arithmetic counts only for what sticks out; `hidden_s` is the rest. The
slowest pipeline stage sets the pace, and 1F1B leaves it idle for `pp - 1` micro-batches. Data loading, clipping, logging and
checkpoints to disk are not known here.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tonnage.budget.collectives import Network, Traffic, traffic
from tonnage.budget.configuration import NUMBERS, Configuration, Quantity
from tonnage.budget.frameworks import gradient_bytes
from tonnage.budget.layer_time import LayerClock, Pass, Work, layer_pass
from tonnage.budget.moments import recomputed_blocks
from tonnage.budget.offload_time import Crossing, crossing
from tonnage.budget.optimizer_time import optimizer_s
from tonnage.budget.roofline import Calibration, Roofline, calibration
from tonnage.budget.sharding import Stage, sharded, stages
from tonnage.budget.states import lora_parameters
from tonnage.hardware.cluster import Cluster
from tonnage.models.shape import Layer, ModelShape, Stack

PARTS = ("forward", "backward", "recompute", "optimizer", "collectives", "offload", "bubble")


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step, and the tokens that it trains on."""

    parts: dict[str, Quantity]
    hidden_s: Quantity  # traffic that runs behind arithmetic
    tokens: Quantity

    @property
    def total_s(self) -> Quantity:
        """Of the whole step."""
        return sum(self.parts.values(), start=0.0)

    @property
    def tokens_per_s(self) -> Quantity:
        """Of all GPUs together."""
        return self.tokens / self.total_s


def step_time(
    shape: ModelShape, configuration: Configuration, cluster: Cluster, shares: Calibration | None = None
) -> StepTime:
    """Predict it, for one configuration or for each of many."""
    return StepClock(shape, cluster, shares).step(configuration)


class StepClock:
    """A model on a cluster. It keeps the arithmetic of layers between configurations that differ only in the rest."""

    def __init__(self, shape: ModelShape, cluster: Cluster, shares: Calibration | None = None) -> None:
        self._shape, self._cluster = shape, cluster
        self.shares = shares or calibration()
        self._network = Network(cluster, self.shares)
        self._census = [(stack, _census(stack)) for stack in shape.stacks]
        self._kept: dict[tuple[object, ...], tuple[Configuration, list[tuple[Work, int]]]] = {}
        self._sent: dict[tuple[object, ...], tuple[Configuration, Traffic]] = {}

    def step(self, configuration: Configuration) -> StepTime:
        """One configuration, or each of many."""
        shape, shares = self._shape, self.shares
        stage = next(stages(shape, configuration))
        line = Roofline(self._cluster.gpu, configuration.precision, configuration.compute_bytes, shares)
        layers = self._layers(configuration, line)
        head = LayerClock(shape, configuration, line).head_pass()
        busy = _stage_pass(_all_layers(layers, configuration, shares), head, stage, configuration)
        attention_s = (
            sum(count * (work.attention_s + work.attention_backward_s) for work, count in layers) * stage.share
        )
        sent = self._traffic(stage, configuration)
        moved = crossing(shape, stage, configuration, self._cluster, shares)
        parts = _micro_batches(busy, configuration) | {"optimizer": _optimizer_s(shape, stage, configuration, line)}
        exposed, hidden_s = _exposed(busy, sent, moved, attention_s, configuration)
        parts |= exposed
        parts["bubble"] = (configuration.pp - 1) * (_total(busy) + sent.plain_s)
        tokens = configuration.global_batch * configuration.seq
        return StepTime({name: parts[name] for name in PARTS}, hidden_s, tokens)

    def _layers(self, configuration: Configuration, line: Roofline) -> list[tuple[Work, int]]:
        """The work of each kind of layer, and how many there are."""
        key = (*_identity(configuration), configuration.attention, configuration.compile, configuration.lora_rank)
        if key not in self._kept:
            # The configuration is kept too: while it is, no other array can have the identity of one of its own.
            self._kept[key] = configuration, list(self._work(configuration, line))
        return self._kept[key][1]

    def _traffic(self, stage: Stage, configuration: Configuration) -> Traffic:
        recomputed = configuration.checkpoint == "full"
        key = (*_identity(configuration), configuration.zero, recomputed, configuration.lora_rank)
        if key not in self._sent:
            self._sent[key] = configuration, traffic(self._shape, stage, configuration, self._network)
        return self._sent[key][1]

    def _work(self, configuration: Configuration, line: Roofline) -> Iterator[tuple[Work, int]]:
        for stack, census in self._census:
            seen = replace(configuration, seq=stack.tokens) if stack.tokens else configuration
            clock = LayerClock(self._shape, seen, line)
            for layer, count in census:
                yield clock.work(layer, stack.hidden), count


def _identity(configuration: Configuration) -> tuple[object, ...]:
    """Of the numbers, which may be arrays, and of what decides how wide a number is."""
    numbers = (id(getattr(configuration, name)) for name in NUMBERS)
    return (*numbers, configuration.precision, configuration.framework, configuration.sequence_parallel)


def _census(stack: Stack) -> list[tuple[Layer, int]]:
    return list(Counter(stack.layers).items())


def _all_layers(layers: list[tuple[Work, int]], configuration: Configuration, shares: Calibration) -> Pass:
    forward_s: Quantity = 0.0
    backward_s: Quantity = 0.0
    recompute_s: Quantity = 0.0
    for work, count in layers:
        one = layer_pass(work, configuration, shares)
        forward_s = forward_s + count * one.forward_s
        backward_s = backward_s + count * one.backward_s
        recompute_s = recompute_s + recomputed_blocks(configuration.checkpoint, count) * one.recompute_s
    return Pass(forward_s, backward_s, recompute_s)


def _stage_pass(layers: Pass, head: Pass, stage: Stage, configuration: Configuration) -> Pass:
    """One micro-batch on the slowest stage: one with the most layers, or the last with the head."""
    full, last = stage.share, 1 - stage.share * (configuration.pp - 1)
    slower_last = _total(layers) * last + _total(head) > _total(layers) * full
    share = np.where(slower_last, np.maximum(last, 0.0), full)
    return Pass(
        share * layers.forward_s + slower_last * head.forward_s,
        share * layers.backward_s + slower_last * head.backward_s,
        share * layers.recompute_s + slower_last * head.recompute_s,
    )


def _total(one: Pass) -> Quantity:
    return one.forward_s + one.backward_s + one.recompute_s


def _micro_batches(busy: Pass, configuration: Configuration) -> dict[str, Quantity]:
    count = configuration.accumulate
    return {
        "forward": count * busy.forward_s,
        "backward": count * busy.backward_s,
        "recompute": count * busy.recompute_s,
    }


def _optimizer_s(shape: ModelShape, stage: Stage, configuration: Configuration, line: Roofline) -> Quantity:
    """The update, and the sums of gradients over micro-batches."""
    if configuration.lora_rank:
        trained = lora_parameters(shape, configuration.lora_rank, configuration.lora_targets)
        count = trained * stage.share / configuration.tp
    else:
        count = sharded(stage, configuration, 1)
    held = count if configuration.lora_rank else sharded(stage, configuration, 2)
    summed_bytes = 3 * held * gradient_bytes(configuration) * (configuration.accumulate - 1)
    on_gpu = configuration.optimizer_place == "gpu"
    update_s = optimizer_s(shape, configuration, line, count) if on_gpu else 0.0 * count
    return update_s + line.memory_s(summed_bytes)


def _exposed(
    busy: Pass, sent: Traffic, moved: Crossing, attention_s: Quantity, configuration: Configuration
) -> tuple[dict[str, Quantity], Quantity]:
    """Collectives first, then offload in what time is left to hide behind."""
    count = configuration.accumulate
    forward_s, backward_s = busy.forward_s, busy.backward_s + busy.recompute_s
    # The first exchange of a ring has nothing to hide behind.
    ring_s = np.maximum(sent.ring_s - attention_s, sent.ring_s / configuration.cp)
    passes = [(sent.forward_s, moved.forward_s, forward_s), (sent.backward_s, moved.backward_s, backward_s)]
    collectives_s = count * (sent.plain_s + ring_s) + sent.step_s
    offload_s = moved.step_s
    for sent_s, moved_s, behind_s in passes:
        collectives_s = collectives_s + count * np.maximum(sent_s - behind_s, 0.0)
        offload_s = offload_s + count * np.maximum(moved_s - np.maximum(behind_s - sent_s, 0.0), 0.0)
    collectives_s = collectives_s + np.maximum(sent.last_backward_s - backward_s, 0.0)
    offload_s = offload_s + np.maximum(moved.last_backward_s - backward_s, 0.0)
    everything_s = count * (sum(sent_s + moved_s for sent_s, moved_s, _ in passes) + sent.plain_s + sent.ring_s)
    everything_s = everything_s + sent.last_backward_s + moved.last_backward_s + sent.step_s + moved.step_s
    return {"collectives": collectives_s, "offload": offload_s}, everything_s - collectives_s - offload_s
