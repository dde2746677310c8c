"""The time of one training step by parts: compute, exposed communication and offload, and the pipeline bubble.

The parts sum to the step. Traffic that overlaps compute counts only where it is exposed; `hidden_s` is the rest. The
slowest pipeline stage sets the pace, and 1F1B leaves it idle for `pp - 1` micro-batches, divided by the interleaved
chunks of a stage. Data loading, logging and checkpointing to disk are not modelled.
"""

from dataclasses import dataclass, field, fields, replace
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tonnage.budget.terms import total
from tonnage.budget.time.collectives import ClusterLinks, Traffic, traffic
from tonnage.budget.time.launches import LayerLaunches
from tonnage.budget.time.layer import FIGURES, Busy, FieldByField, LayerWork, PassTime, layer_pass, work_of
from tonnage.budget.time.offload import Crossing, bytes_per_s, crossing
from tonnage.budget.time.optimizer import accumulated, gathered, sharding_copies, update
from tonnage.budget.time.roofline import Calibration, calibration
from tonnage.budget.training.activations import configuration_of
from tonnage.budget.training.configuration import NUMBERS, Configuration, Quantity
from tonnage.budget.training.frozen import frozen_weights
from tonnage.budget.training.memory import needed_bytes
from tonnage.budget.training.moments import recomputed_blocks
from tonnage.budget.training.objectives import NEXT_TOKEN
from tonnage.budget.training.states import StageShare, stages
from tonnage.clock.host import host_costs
from tonnage.clock.kernels.figures import distinct
from tonnage.clock.power import limit_of, slowdown_of
from tonnage.hardware.cluster import Cluster
from tonnage.ledger import Category
from tonnage.models.shape import ModelShape

# The numbers of a configuration that determine a layer's kernels.
_LAYER_NUMBERS = ("seq", "micro_batch", "tp", "cp", "ep")
_CHOICES = tuple(
    field.name
    for field in fields(Configuration)
    if field.name not in (*NUMBERS, "checkpoint", "loss", "activation_place")
)
_BACKWARD = 4  # index where the backward pass begins among the parts in `_paced`
_NOTHING_S = 1e-12
_NO_BACKWARD = {"backward": Busy(), "attention_backward": Busy(), "packing": Busy()}
# Share of the backward pass whose products can hide tensor-parallel traffic: half of those with two of three weights.
_BEHIND_PRODUCTS = 0.25
# A pass without gradients before the loss: a frozen model's, or another one of the trained model.
NO_GRAD = "no-grad forward"
PARTS = ("forward", "backward", "recompute", "optimizer", "collectives", "offload", "bubble", NO_GRAD)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step, and the tokens it trains on."""

    parts: dict[str, Quantity]
    hidden_s: Quantity  # traffic that overlaps compute
    tokens: Quantity
    busy: Busy = field(default_factory=Busy)  # busy seconds of GPU and host, before the power limit
    slower: Quantity = 1.0  # slowdown of arithmetic by the power limit

    @property
    def total_s(self) -> Quantity:
        """Seconds of the whole step."""
        return sum(self.parts.values(), start=0.0)

    @property
    def tokens_per_s(self) -> Quantity:
        """Tokens per second of all GPUs together."""
        return self.tokens / self.total_s


def step_time(shape: ModelShape, config: Configuration, cluster: Cluster) -> StepTime:
    """Predict the step time of one configuration, or of each of many."""
    return StepClock(shape, cluster).step(config)


class StepClock:
    """Predicts step times of a model on a cluster. It caches layer times across configurations that share them."""

    sample_tokens = 0.0  # mean length of samples, where they are shorter than the sequence

    def __init__(self, shape: ModelShape, cluster: Cluster, shares: Calibration | None = None) -> None:
        self._shape, self._cluster = shape, cluster
        self.shares = shares or calibration()
        self._network = ClusterLinks(cluster, self.shares)
        # How much slower than the median the slowest of these cards is: the expected maximum of normal deviates.
        deviates = NormalDist().inv_cdf((cluster.gpus - 0.375) / (cluster.gpus + 0.25))
        self._slowest = 1 + self.shares.card_spread * deviates
        self._census = [(stack, stack.kinds()) for stack in shape.stacks]
        # Layer indices of each kind; a stack without sequences does not run.
        self._places = [places if stack.sequences else [] for stack, census in self._census for _, places in census]
        self._known: dict[tuple[object, ...], _Known] = {}
        self._teacher: StepClock | None = None
        # Holds the configuration too: its arrays are keyed by id and must stay alive.
        self._kept: dict[tuple[object, ...], tuple[Configuration, _Around]] = {}

    def step(self, config: Configuration) -> StepTime:
        """Predict one configuration, or each of many."""
        shape, gpu = self._shape, self._cluster.gpu
        stage, sent, update, beside = self._around(config)
        passes, attention = self._passes(config)
        passes = _on_slowest_stage(passes, stage)
        layers = passes.layers + beside
        if config.step_in_backward:
            layers, update = layers + PassTime(backward=update), Busy()
        whole = _Passes(passes.embedding, layers, passes.head)
        passes = _Passes(*(PassTime(*(part.slowed(self._slowest) for part in one.values())) for one in whole.values()))
        update = update.slowed(self._slowest)
        frozen = self._no_grad(passes, sent, config)
        # The cached stage may recompute and offload other activations.
        moved = crossing(replace(stage, configuration=config), self._cluster, self.shares)
        if config.paged:
            # Paged optimizer states cross the host link for their update.
            size = total(term for term in stage.kept if term.category is Category.OPTIMIZER_STATES)
            needed = needed_bytes(shape, config, gpu).total_bytes
            away = np.clip(size + needed - gpu.memory_bytes, 0.0, size)
            link = self._cluster.host_link_bytes_per_s * self.shares.host_link_ceiling
            moved = moved._replace(step_s=moved.step_s + 2 * away / link)
        framework = config.traits
        # Decoders of transformers check for packed sequences in every forward pass, which synchronizes host and GPU.
        together = framework.written == "transformers" and not config.compile and shape.decoder.causal
        # The host also waits between the passes of a stage.
        waits = (np.asarray(config.pp) > 1) & (framework.pipeline_operators > 0)
        taken = self.shares.link_channels / gpu.sm_count

        def parts(slower: Quantity) -> tuple[dict[str, Quantity], Quantity]:
            """Return the seconds of every part and the hidden ones, with arithmetic slowed by this factor."""
            seconds = _paced(passes, update, slower, together=together, waits=waits)
            attention_s = attention.at(slower) * stage.share
            exposed, hidden_s = _exposed(seconds, sent, moved, attention_s, config, taken)
            # Transfers for the passes without gradients, as far as these do not hide them.
            count, once_s = config.accumulate, np.maximum(frozen.busy.at(slower), frozen.busy.host_s)
            for name, more_s in (("collectives", frozen.sent_s), ("offload", frozen.moved_s)):
                exposed[name] = exposed[name] + count * np.maximum(more_s - once_s, 0.0)
            update_s = seconds.pop("update")
            bubble_s = (config.pp - 1) / config.chunks * (sum(seconds.values(), start=0.0) + sent.plain_s)
            found = {name: count * part_s for name, part_s in seconds.items()} | {"optimizer": update_s}
            return {**found, **exposed, "bubble": bubble_s, NO_GRAD: count * once_s}, hidden_s

        # A GPU averages its power over about 0.1 s: the passes reach the limit, not the update after them.
        at_full_clock, _ = parts(1.0)
        passed = (sum((one.whole for one in passes.values()), Busy()) + frozen.busy) * config.accumulate
        passed_s = sum(at_full_clock.values()) - at_full_clock["optimizer"]
        slower = slowdown_of(passed.card_s, passed.at_peak_s, passed_s, limit_of(gpu))
        return StepTime(*parts(slower), config.global_batch * config.seq, passed + update, slower)

    def _no_grad(self, passes: "_Passes", sent: Traffic, config: Configuration) -> "_NoGrad":
        """Return a micro-batch's passes without gradients: a teacher's, a reference's, or the model's own."""
        objective = config.objective
        # GradCache computes all vectors first.
        own = objective.own + objective.grad_cache + (0 if objective.teacher else objective.frozen_passes)
        if not own and not objective.frozen_passes:
            return _NoGrad()
        busy = sum((one.forward for one in passes.values()), Busy()) * own
        sent_s: Quantity = own * sent.forward_s
        moved_s: Quantity = 0.0
        if objective.teacher is not None:
            read = replace(config, objective=NEXT_TOKEN, lora_rank=0, base=objective.teacher_base, checkpoint="none")
            read = replace(read, precision="bf16") if read.mixed else read
            self._teacher = self._teacher or StepClock(objective.teacher, self._cluster, self.shares)
            taught, sent_s = self._teacher.forward(read)
            busy = busy + taught.slowed(self._slowest)
        if config.parameter_place != "gpu":
            weights = total(frozen_weights(self._shape, config))
            moved_s = weights / bytes_per_s(config.parameter_place, self._cluster, self.shares)
        return _NoGrad(busy, sent_s, moved_s)

    def forward(self, config: Configuration) -> tuple[Busy, Quantity]:
        """Return one forward pass of a micro-batch, and the seconds to gather its parameters."""
        passes, _ = self._passes(config)
        return sum((one.forward for one in passes.values()), Busy()), self._around(config).sent.forward_s

    def _passes(self, config: Configuration) -> tuple["_Passes", Busy]:
        """Return one micro-batch through the whole model, and its attention alone. Results of layers are cached."""
        texts = config.objective.texts
        if texts > 1:
            # One after another, in smaller kernels.
            alone = replace(config, micro_batch=config.micro_batch // texts, objective=NEXT_TOKEN)
            passes, attention = self._passes(alone)
            return passes * (1.0 * texts), attention * (1.0 * texts)
        columns = [getattr(config, name) for name in _LAYER_NUMBERS]
        if not any(np.ndim(column) for column in columns):
            return self._model_passes(self._works(config, [tuple(map(int, columns))], -1), config)
        first, places = distinct(columns)
        rows = np.stack(np.broadcast_arrays(*columns), axis=-1)[first]
        works = self._works(config, [tuple(row) for row in rows.tolist()], None)
        passes, attention = self._model_passes(works, config)
        return passes.each(lambda value: value[places]), attention.each(lambda value: value[places])

    def _model_passes(self, works: list[LayerWork], config: Configuration) -> tuple["_Passes", Busy]:
        """Return one micro-batch through the whole model, and its attention alone. A chunked loss repeats its product."""
        *kinds, embedding, head = works
        product_again = head.products * (1.0 if config.loss == "chunked" else 0.0)
        layers, attention = PassTime(), Busy()
        for work, places in zip(kinds, self._places, strict=True):
            one, count = layer_pass(work, config), len(places)
            # Layers without a backward pass are not recomputed.
            again = recomputed_blocks(config.checkpoint, places) * (np.asarray(one.backward.card_s) > 0)
            layers = layers + PassTime(one.forward * count, one.backward * count, one.recompute * again)
            attention = attention + count * (work.attention + work.attention_backward)
        first = PassTime(embedding.forward, embedding.backward, embedding.forward * 0.0)
        return _Passes(first, layers, PassTime(head.forward, head.backward, product_again)), attention

    def _works(self, config: Configuration, rows: list[tuple[int, ...]], at: int | None) -> list[LayerWork]:
        """Return the work of each kind of layer, then of embedding and head, per row of the numbers they depend on."""
        kinds = ["precision", "sequence_parallel", "attention", "compile", "compile_loss"]
        kinds += ["lora_rank", "lora_targets", "base", "liger", "logit_share"]
        # FSDP2 and DeepSpeed run the same layers, except for FSDP2's hooks on compiled ones.
        same = config.framework == "deepspeed" and not config.compile
        key = "fsdp2" if same else config.framework, config.loss == "fused", *(getattr(config, kind) for kind in kinds)
        known = self._known.setdefault(key, _Known())
        missing = [row for row in dict.fromkeys(rows) if row not in known.places]
        if missing:
            numbers: dict[str, Any] = dict(zip(_LAYER_NUMBERS, np.array(missing).T, strict=True))
            known.add(missing, self._work(replace(config, **numbers)))
        found = np.array([known.places[row] for row in rows])
        return known.works(found if at is None else found[at])

    def _around(self, config: Configuration) -> "_Around":
        """Return everything around the layers, cached across configurations that differ only in recomputation and loss."""
        recomputed = config.checkpoint if config.checkpoint in ("full", "selective") else "none"
        # Numbers may be arrays, which are keyed by id.
        numbers = (id(getattr(config, name)) for name in NUMBERS)
        key = (*numbers, *(getattr(config, name) for name in _CHOICES), recomputed)
        if key not in self._kept:
            shape, gpu = self._shape, self._cluster.gpu
            stage = next(stages(shape, config))
            sent = traffic(stage, self._network)
            beside = sharding_copies(stage.parameters, config, gpu)
            if operators := config.traits.pipeline_operators:
                # The host receives and sends on a pipeline stage.
                once = Busy(host_s=operators * host_costs().forward.operator / 3 * (np.asarray(config.pp) > 1))
                beside = beside + PassTime(once * 2, once)
            # The optimizer's step, and the accumulation of gradients over micro-batches.
            count, parameters = stage.updated, stage.parameters
            sums = np.where(config.reduces_once, stage.trained.parameters, stage.trained.sharded(2))[()]
            held = count if config.lora_rank else sums
            if config.traits.fuses_sums and not config.lora_rank:
                held = held * stage.embeds * shape.embedding_parameters / config.tp / parameters
            # If gradients are accumulated in another dtype than computed, those of the first micro-batch are added too.
            first = 1 if config.gradient_bytes == config.made_bytes else 0
            updated = accumulated(shape, config, held, gpu) * (config.accumulate - first)
            if config.optimizer_place == "gpu":
                updated = updated + update(shape, config, count, gpu) + gathered(shape, config, parameters, gpu)
            self._kept[key] = config, _Around(stage, sent, updated, beside)
        return self._kept[key][1]

    def _work(self, config: Configuration) -> list[LayerWork]:
        gpu = self._cluster.gpu
        works = []
        read: Quantity = 0
        for stack, census in self._census:
            seen = config
            if stack.tokens:
                seen = replace(seen, seq=stack.tokens, micro_batch=seen.micro_batch * max(stack.sequences, 1))
            for layer, _ in census:
                how = configuration_of(layer, seen)
                launches = LayerLaunches(self._shape, how, gpu)
                work = work_of(launches.layer(layer, stack.hidden, read), how, gpu)
                works.append(replace(work, **_NO_BACKWARD) if layer.frozen == "still" else work)
            read = launches.tokens
        ends = seen if self._shape.trains_table else replace(seen, lora_rank=1, lora_targets=())
        embedding = work_of(LayerLaunches(self._shape, ends, gpu).embedding(), ends, gpu)
        ends = seen if self._shape.trains_head else replace(seen, lora_rank=1, lora_targets=())
        return [*works, embedding, self._head(ends)]

    def _head(self, config: Configuration) -> LayerWork:
        """Return the head's work, computed together for configurations whose logits take the same kernels."""
        gpu = self._cluster.gpu
        launches = LayerLaunches(self._shape, config, gpu)
        tokens, tp = np.broadcast_arrays(*np.atleast_1d(launches.tokens, config.tp))
        first, places = distinct((tokens, tp))
        tokens, tp = tokens[first], tp[first]
        forms = {degree: launches.head_form(degree) for degree in set(tp.tolist())}
        figures = np.empty((FIGURES, tp.size))
        for form in set(forms.values()):
            chosen = np.isin(tp, [degree for degree in forms if forms[degree] == form])
            some = replace(config, seq=tokens[chosen], tp=tp[chosen], micro_batch=1, cp=1, ep=1)
            found = work_of(replace(launches, configuration=some).head(), config, gpu)
            figures[:, chosen] = np.stack([np.broadcast_to(figure, chosen.sum()) for figure in found.figures()])
        return LayerWork.of(list(figures[:, places]))


class _Around(NamedTuple):
    """Parts of a step outside its layers."""

    stage: StageShare
    sent: Traffic
    update: Busy
    beside: PassTime  # copies that sharding adds to each pass, and the host's pipeline sends and receives


class _NoGrad(NamedTuple):
    """Passes without gradients in one micro-batch, and the transfers they need."""

    busy: Busy = Busy()
    sent_s: Quantity = 0.0
    moved_s: Quantity = 0.0


class _Known:
    """A cache of works: one column of figures per row of numbers."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, ...], int] = {}
        self._figures: NDArray[np.float64] | None = None

    def add(self, rows: list[tuple[int, ...]], works: list[LayerWork]) -> None:
        figures = np.stack([np.broadcast_to(figure, len(rows)) for work in works for figure in work.figures()])
        self.places |= {row: len(self.places) + at for at, row in enumerate(rows)}
        self._figures = figures if self._figures is None else np.concatenate([self._figures, figures], axis=1)

    def works(self, places: Any) -> list[LayerWork]:
        """Return the cached works at these indices, or at one."""
        assert self._figures is not None
        figures = self._figures[:, places]
        return [LayerWork.of(list(figures[start : start + FIGURES])) for start in range(0, len(figures), FIGURES)]


@dataclass(frozen=True, slots=True)
class _Passes(FieldByField):
    """The passes of a micro-batch on the slowest stage."""

    embedding: PassTime
    layers: PassTime
    head: PassTime


def _on_slowest_stage(passes: _Passes, stage: StageShare) -> _Passes:
    """Return the passes of the stage with the most layers, or of the last one with the head, whichever is slower."""
    embedding, layers, head = passes.values()
    full, last = stage.share, 1 - stage.share * (stage.configuration.pp - 1)
    layers_s, ends_s = layers.whole.card_s, (embedding + head).whole.card_s
    slower_last = layers_s * last + ends_s > layers_s * full
    share = np.where(slower_last, np.maximum(last, 0.0), full)
    return _Passes(embedding * (1.0 * slower_last), layers * share, head * (1.0 * slower_last))


def _paced(passes: _Passes, update: Busy, slower: Quantity, *, together: bool, waits: Quantity) -> dict[str, Quantity]:
    """Return the seconds at the pace of GPU or host, whichever is behind.

    They start a micro-batch together, or the host keeps the lead of the one before; if it `waits`, they also start the
    backward pass together.
    """
    embedding, layers, head = passes.values()
    # Each block is recomputed right before its backward pass: the host launches one while the GPU runs the other.
    again = layers.recompute + layers.backward
    recomputed = layers.recompute.at(slower) / np.maximum(again.at(slower), _NOTHING_S)
    order = (
        ("forward", embedding.forward), ("forward", layers.forward), ("forward", head.forward), ("recompute", head.recompute),
        ("backward", head.backward), ("layers", again), ("backward", embedding.backward), ("update", update),
    )  # fmt: skip
    found: dict[str, Quantity] = dict.fromkeys(("forward", "backward", "recompute", "update", "layers"), 0.0)
    begins_s: Quantity = 0.0
    whole = sum((part for _, part in order), Busy())
    lead_s = 0.0 if together else np.maximum(whole.at(slower) - whole.host_s, 0.0) * np.logical_not(waits)
    launched_s: Quantity = -1.0 * lead_s
    for place, (name, part) in enumerate(order):
        if place == _BACKWARD:
            launched_s = np.where(waits, begins_s, launched_s)
        launched_s = launched_s + part.host_s
        ends_s = np.maximum(begins_s + part.at(slower), launched_s)
        found[name] = found[name] + (ends_s - begins_s)
        begins_s = ends_s
    layers_s = found.pop("layers")
    found["recompute"] = found["recompute"] + recomputed * layers_s
    found["backward"] = found["backward"] + (1 - recomputed) * layers_s
    return found


def _exposed(
    busy: dict[str, Quantity],
    sent: Traffic,
    moved: Crossing,
    attention_s: Quantity,
    config: Configuration,
    taken: float,
) -> tuple[dict[str, Quantity], Quantity]:
    """Return exposed and hidden seconds: collectives overlap first, then offload; they occupy `taken` of the SMs."""
    count = config.accumulate
    forward_s, backward_s = busy["forward"], busy["backward"] + busy["recompute"]
    # The first exchange of a ring has nothing to hide behind.
    ring_s = np.maximum(sent.ring_s - attention_s, sent.ring_s / config.cp)
    passes = [(sent.forward_s, moved.forward_s, forward_s), (sent.backward_s, moved.backward_s, backward_s)]
    products_s = np.maximum(sent.products_s - _BEHIND_PRODUCTS * backward_s, 0.0)
    collectives_s = count * (sent.plain_s + ring_s + products_s) + sent.step_s
    offload_s = moved.step_s
    for sent_s, moved_s, behind_s in passes:
        collectives_s = collectives_s + count * np.maximum(sent_s - behind_s, sent.ends * sent_s)
        offload_s = offload_s + count * np.maximum(moved_s - np.maximum(behind_s - sent_s, 0.0), 0.0)
    for once_s, behind_s in ((sent.first_forward_s, forward_s), (sent.last_backward_s, backward_s)):
        collectives_s = collectives_s + np.maximum(once_s - behind_s, sent.ends * once_s)
    offload_s = offload_s + np.maximum(moved.last_backward_s - backward_s, 0.0)
    sent_s = count * (sent.forward_s + sent.backward_s + sent.plain_s + sent.products_s + sent.ring_s)
    hidden_s = sent_s + sent.first_forward_s + sent.last_backward_s + sent.step_s - collectives_s
    moved_s = count * (moved.forward_s + moved.backward_s) + moved.last_backward_s + moved.step_s
    return {"collectives": collectives_s + taken * hidden_s, "offload": offload_s}, hidden_s + moved_s - offload_s
