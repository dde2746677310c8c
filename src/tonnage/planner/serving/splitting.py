"""Which splits of a model over GPUs vLLM accepts, and where to cut its layers into pipeline stages.

The rules are from vLLM's source (0.27): heads divide over ranks, or ranks over KV heads; ranks divide the width of
every MLP and the padded vocabulary; a replica takes whole hosts or equal parts of one. Layers are cut differently from
vLLM's equal split if that gives a larger KV cache: the first stage holds the embedding, the last the head and the
sampler. The groups of quantized checkpoints (some are padded so that they split) are not checked.
"""

from collections.abc import Iterator
from dataclasses import replace

from tonnage.budget import largest
from tonnage.budget.serving.memory import (
    ServingBudget,
    ServingConfiguration,
    check,
    divides,
    serving_budget,
    stage_budget,
)
from tonnage.budget.serving.weights import VOCAB_PADDING, stage_at
from tonnage.errors import BadLayout
from tonnage.hardware import Cluster, Gpu
from tonnage.models.shape import ModelShape
from tonnage.planner import divisors

# Architectures that vLLM serves without pipeline stages.
_NO_STAGES = ("mamba2", "whisper")
# Minimum growth of the KV cache for an unequal split: equal stages are what people expect.
_WORTH_CUTTING = 1.01


def splits(shape: ModelShape, cluster: Cluster, asked: ServingConfiguration, tp: int, pp: int) -> list[tuple[int, int]]:
    """Return tensor and pipeline degrees that can start; 0 is searched. Raises RequestError for impossible given ones."""
    given, gpus, per_host = (tp or 1) * (pp or 1), cluster.gpus, cluster.gpus_per_host
    if gpus % given:
        hint = f"Use a product that divides {gpus}: {', '.join(map(str, divisors(gpus)))}."
        raise BadLayout(f"--tp {tp or 1} × --pp {pp or 1} = {given} GPUs do not divide {gpus}.", hint=hint)
    check(shape, replace(asked, tp=tp or 1, pp=pp or 1, stage_layers=asked.stage_layers if pp else ()))
    for words in obstacles(shape, tp or 1, pp or 1):
        good = [str(each) for each in divisors(gpus) if accepts(shape, each, 1)]
        raise BadLayout(words, hint=f"On {gpus} GPUs, --tp can be {', '.join(good)} with --pp 1.")
    if tp and pp and not _fills(cluster, given):
        problem = f"--tp {tp} × --pp {pp} = {given} GPUs: {gpus // given} copies would share"
        hint = f"Use a product that divides {per_host}, or a multiple of it."
        raise BadLayout(f"{problem} hosts of {per_host} GPUs unevenly.", hint=hint)
    found = [
        (each_tp, each_pp)
        for each_tp in ([tp] if tp else divisors(cluster.gpus_per_host))
        for each_pp in ([pp] if pp else divisors(cluster.gpus))
        if _fills(cluster, each_tp * each_pp) and accepts(shape, each_tp, each_pp)
    ]
    if not found:
        flags = " ".join(f"--{name} {number}" for name, number in (("tp", tp), ("pp", pp)) if number)
        problem = f"With {flags} no copy of {shape.name} fills hosts of {cluster.gpus_per_host} GPUs evenly."
        raise BadLayout(problem, hint="Leave --tp and --pp out, and the ways that can be are searched.")
    return found


def obstacles(shape: ModelShape, tp: int, pp: int) -> Iterator[str]:
    """Yield why vLLM would not start with this split. `budget.serving.memory` checks the heads."""
    if pp > 1 and shape.architecture in _NO_STAGES:
        yield f"vLLM cuts no model of {shape.architecture}'s kind into pipeline stages: --pp {pp} does not start."
    padded = -(-shape.vocab // VOCAB_PADDING) * VOCAB_PADDING
    if padded % tp:
        yield f"--tp {tp} does not divide the vocabulary of {shape.name}: {padded:,} words when padded to {VOCAB_PADDING}."
    # Every distinct MLP: dense, expert or shared.
    layers = {id(layer): layer for layer in shape.decoder.layers}.values()
    both = ((mlp.intermediate, mlp.shared_intermediate) for layer in layers if (mlp := layer.feed_forward) is not None)
    for width in sorted({width for pair in both for width in pair if width}):
        if width % tp:
            yield f"--tp {tp} does not divide an MLP of {shape.name} that is {width:,} wide."


def accepts(shape: ModelShape, tp: int, pp: int) -> bool:
    """Say whether vLLM would start with this split."""
    return pp <= len(shape.decoder.layers) and divides(shape, tp) and not any(obstacles(shape, tp, pp))


def _fills(cluster: Cluster, gpus: int) -> bool:
    """Say whether replicas of `gpus` GPUs fit within hosts, or on whole ones."""
    inside = cluster.gpus_per_host % gpus == 0 or gpus % cluster.gpus_per_host == 0
    return cluster.gpus % gpus == 0 and inside


def cut(shape: ModelShape, asked: ServingConfiguration, gpu: Gpu) -> ServingBudget:
    """Return the budget with stages cut for the largest KV cache, or with equal stages if that gains little.

    Models whose layers keep different tokens (windows, states) keep the equal split: blocks of their stages do not
    compare.
    """
    even = serving_budget(shape, asked, gpu)
    kinds = {(mixer.kind, mixer.window) for layer in shape.decoder.layers if (mixer := layer.attention) is not None}
    if asked.pp == 1 or asked.stage_layers or len(kinds) > 1:
        return even
    counts = _Cutter(shape, even.configuration, gpu).best(_room(even))
    found = serving_budget(shape, replace(asked, stage_layers=counts), gpu)
    gained = _room(found) > _WORTH_CUTTING * _room(even) if even.kv.blocks else _room(found) > _room(even)
    return found if gained else even


def _room(budget: ServingBudget) -> int:
    """Return the tokens of the KV cache, or minus the bytes used if it has room for none."""
    return budget.kv.tokens or -budget.total_bytes


class _Cutter:
    """Splits the layers so that the stage with the least room has as much as possible."""

    def __init__(self, shape: ModelShape, asked: ServingConfiguration, gpu: Gpu) -> None:
        self._shape, self._asked, self._gpu = shape, asked, gpu
        self._layers, self._pp = len(shape.decoder.layers), asked.pp
        self._rooms: dict[tuple[int, int], int] = {}

    def best(self, known: int) -> tuple[int, ...]:
        """Return the layers per stage; `known` is the room of an equal split."""
        least = largest(known, self._room(1, 1), lambda room: sum(self._filled(room)) >= self._layers)
        found = self._filled(least)
        return self._spread(found, least) if sum(found) == self._layers else ()

    def _room(self, start: int, count: int) -> int:
        if (start, count) not in self._rooms:
            stage = stage_at(self._shape, start, count)
            self._rooms[start, count] = _room(stage_budget(self._shape, stage, self._asked, self._gpu))
        return self._rooms[start, count]

    def _filled(self, least: int) -> list[int]:
        """Fill stages in turn while each keeps `least` room, leaving at least a layer for each later stage."""
        counts: list[int] = []
        for behind in range(self._pp - 1, -1, -1):
            start = sum(counts)
            counts.append(
                largest(0, self._layers - start - behind, lambda count: self._room(sum(counts), count) >= least)
            )
        return counts

    def _spread(self, counts: list[int], least: int) -> tuple[int, ...]:
        """Even out the counts, which favour the first stages, as far as that costs no room."""
        while True:
            giver, taker = counts.index(max(counts)), len(counts) - 1 - counts[::-1].index(min(counts))
            moved = [count - (n == giver) + (n == taker) for n, count in enumerate(counts)]
            rooms = (self._room(sum(moved[:n]), count) for n, count in enumerate(moved))
            if counts[giver] - counts[taker] < 2 or min(rooms) < least:
                return tuple(counts)
            counts = moved
