"""The points of a training step at which memory can peak, each as a list of the terms alive then.

| moment    | alive beside the states                                                                 |
|-----------|-----------------------------------------------------------------------------------------|
| forward   | saved activations, autocast's copies of weights, logits and their loss                   |
| pass of …, logits of … | the same, and what a frozen model takes (`frozen`), before the loss          |
| scores    | saved activations, logits of all models and the tensors the objective makes of them      |
| loss      | saved activations, the log-probabilities and two gradients of their size                 |
| head      | saved activations, the gradients of the logits and of the head                           |
| backward  | saved activations, the head's gradient, gradients inside the last block (recomputed)     |
| first block | all gradients, activations of the first block and of micro-batches still in flight     |
| embedding | all gradients, and the embedding's beside the head's if they are tied                    |
| reduce    | unreduced gradients that a pipeline held back, and the buffers they are reduced in       |
| optimizer | all gradients, the optimizer's temporaries                                               |

The peak is the highest of them, on the worst pipeline stage. This module does not compare them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tonnage.budget.activations import FP32, BlockActivations, SavedPerToken, block_of, final_norm
from tonnage.budget.adapters import largest_matrix
from tonnage.budget.configuration import Configuration, Number, Quantity
from tonnage.budget.frameworks import (
    MAX_LIVE_PARAMETERS,
    framework_of,
    gradient_bytes,
    made_bytes,
    reduces_once,
    state_bytes,
)
from tonnage.budget.frozen import frozen_block, frozen_copies, frozen_gathered, frozen_weights
from tonnage.budget.loss import LossMoment, head_weights, loss_term, similarities
from tonnage.budget.nanotron import flat_copies, gather_buffers, made_gradients, scattered, trains_with_nanotron
from tonnage.budget.sharding import StageParameters, block_parameters, sharded, trained_stage
from tonnage.budget.states import States, sharded_parameters, states
from tonnage.budget.styles import compiled_whole
from tonnage.budget.terms import Term, model_term, total
from tonnage.ledger import Category
from tonnage.models.shape import LayerStack, ModelShape

# Highest ZeRO stage at which gradients are reduced in DDP's buckets: `ZeroRedundancyOptimizer` leaves them to DDP.
_REPLICATED = {"torch": 1, "nanotron": 0}
# DeepSpeed's default `reduce_bucket_size`, in elements.
_REDUCE_BUCKET = 500_000_000


@dataclass(frozen=True, slots=True)
class StepMoment:
    """A point of the step on one pipeline stage, and the memory alive at it."""

    name: str
    terms: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Scene:
    """The inputs from which the moments of one stage are computed."""

    shape: ModelShape
    stage: StageParameters
    configuration: Configuration
    states: States
    trained: StageParameters  # its trainable part
    blocks: tuple[tuple[LayerStack, BlockActivations, Sequence[int]], ...]  # each kind, with the indices of its layers

    @property
    def tokens(self) -> Quantity:
        """Tokens of one micro-batch on one GPU."""
        return self.configuration.tokens


def moments(shape: ModelShape, stage: StageParameters, configuration: Configuration) -> Iterator[StepMoment]:
    """Yield the moments of one stage in the order of the step."""
    trained = trained_stage(shape, stage, configuration)
    blocks = tuple(
        (stack, block_of(shape, layer, stack.hidden, configuration), places)
        for stack in shape.stacks
        for layer, places in stack.kinds()
    )
    scene = Scene(shape, stage, configuration, states(shape, stage, configuration), trained, blocks)
    buffers = (*_buckets(scene), *gather_buffers(shape, configuration, scene.tokens), *_stage_buffers(scene))
    states_and_buffers = (*scene.states.kept, *frozen_weights(shape, configuration), *buffers)
    always = (
        *states_and_buffers,
        *flat_copies(stage, configuration, in_use=False),
        *scattered(shape, stage, configuration, scene.tokens),
    )
    in_blocks = _kept(scene)
    kept = _with_final_norm(scene, in_blocks)
    passing = (*always, *_live_gradients(scene), *kept)
    gathered = _gathered(scene)
    # A fused loss computes the head's gradient alongside its logits, a loss compiled with the head alongside the
    # logits' gradient.
    early = _head_gradient(scene) if configuration.fused_loss else []
    ending: LossMoment = "forward" if configuration.objective.plain else "head"
    yield StepMoment("forward", (*passing, *gathered, *_casts(scene, forward=True), *_logits(scene, ending), *early))
    if not configuration.objective.plain:
        yield from _objective_moments(scene, always, (*passing, *gathered, *_casts(scene)))
    elif compiled_whole(configuration):
        early = _head_gradient(scene)
    back = (*passing, *_casts(scene), *_held_logits(scene))
    summed = _summed_chunks(scene)
    yield StepMoment("loss", (*back, *_gathered(scene, "loss"), *_logits(scene, "loss"), *early, *summed))
    back = (*back, *gathered)
    yield StepMoment("head", (*back, *_logits(scene, "head"), *_head_gradient(scene), *summed))
    kept_head = [] if configuration.step_in_backward else _head_gradient(scene)
    through = (*always, *_live_gradients(scene), *in_blocks, *_casts(scene), *_held_logits(scene), *gathered)
    unreduced = _unreduced(scene, ending=False, kept=in_blocks)
    yield StepMoment("backward", (*through, *kept_head, *_inside_block(scene), *unreduced))
    waiting = (*always, *_waiting(scene, kept), *_held_logits(scene))
    made = made_gradients(shape, stage, configuration, ended=False)
    inside, ended = _inside_block(scene, last_kept=True), _gathered(scene, "ending")
    first = (*inside, *_unreduced(scene, ending=True))
    yield StepMoment("first block", (*waiting, *ended, *_grown_gradients(scene), *first, *made))
    if configuration.framework == "fsdp2":
        # One block reduces its gradients while the next one is gathered.
        one = [
            replace(term, name=f"{term.name} in the first block", size_bytes=term.size_bytes / _blocks(scene))
            for term in in_blocks
        ]
        yield StepMoment("second block", (*waiting, *one, *gathered, *_grown_gradients(scene, to_come=1), *first))
    if np.any(np.asarray(configuration.pp) > 1):
        # The last micro-batch: none is in flight, and all gradients exist.
        added = (*_all_gradients(scene, _accumulates(configuration)), *inside)
        yield StepMoment("last micro-batch", (*always, *_held_logits(scene), *ended, *added))
    made = made_gradients(shape, stage, configuration, ended=True)
    rest = _rest_of_embedding(scene)
    waiting = (*waiting, *ended)
    yield StepMoment("embedding", (*waiting, *_all_gradients(scene), *made, *_embedding(scene), *rest))
    if np.any(reduces_once(configuration)):
        yield StepMoment("reduce", (*always, *ended, *_all_gradients(scene), *_reduced(scene)))
    flat = flat_copies(stage, configuration, in_use=True)
    yield StepMoment("optimizer", (*states_and_buffers, scene.states.gradients, *rest, *flat, *_optimizer(scene)))


def _objective_moments(scene: Scene, always: tuple[Term, ...], passed: tuple[Term, ...]) -> Iterator[StepMoment]:
    """Yield the moments between forward pass and loss: a frozen model's pass, its logits, and the scores."""
    shape, configuration = scene.shape, scene.configuration
    name = configuration.objective.frozen_name
    if configuration.objective.frozen_passes:
        read = (*passed, *frozen_copies(shape, configuration), *frozen_gathered(shape, configuration))
        block = frozen_block(shape, configuration, scene.tokens)
        yield StepMoment(f"pass of the {name}", (*read, block, *_logits(scene, "kept")))
        yield StepMoment(f"logits of the {name}", (*read, *_logits(scene, "frozen")))
    # GradCache compares vectors of the whole batch before any of its chunks saves activations.
    here = always if configuration.objective.grad_cache else passed
    yield StepMoment("scores", (*here, *_logits(scene, "forward"), *similarities(configuration)))


def _buckets(scene: Scene) -> list[Term]:
    """Return the buffers in which a data-parallel framework reduces gradients."""
    configuration = scene.configuration
    if configuration.framework in ("torch", "nanotron") and configuration.zero <= _REPLICATED[configuration.framework]:
        made = scene.states.gradients.size_bytes * made_bytes(configuration) / gradient_bytes(configuration)
        size = made * (np.asarray(configuration.data * configuration.cp) > 1)
        return [model_term(Category.GRADIENTS, "DDP buckets", size, "as large as the gradients, where there are ranks")]
    if configuration.framework == "deepspeed" and configuration.zero:
        # ZeRO 3 copies a bucket's gradients once more, ordered by rank, to reduce-scatter them.
        buckets = 1 + (np.asarray(configuration.data * configuration.cp) > 1) * (configuration.zero == 3)
        held = buckets * 2.0 * np.minimum(scene.trained.parameters, _REDUCE_BUCKET)
        words = "buckets × 2 B × elements"
        return [model_term(Category.GRADIENTS, "reduce bucket", held, words, buckets=buckets, elements=_REDUCE_BUCKET)]
    return []


def _live_gradients(scene: Scene) -> list[Term]:
    """Return gradients alive in a forward pass with the most micro-batches in flight, left by earlier micro-batches."""
    share = _live_share(scene)
    return [*_all_gradients(scene, share), *_rest_of_embedding(scene, share)]


def _live_share(scene: Scene) -> Quantity:
    """Return 1 if gradients of earlier micro-batches exist while the most micro-batches are in flight, else 0."""
    more = np.asarray(scene.configuration.accumulate) > scene.stage.in_flight
    return 1.0 if _always_there(scene.configuration) else more.astype(float)[()]


def _all_gradients(scene: Scene, share: Quantity = 1.0) -> list[Term]:
    """Return `share` of all gradients, unsharded if a pipeline reduces them only at its end.

    With no more micro-batches than stages, an interleaved stage reduces one chunk before the next one begins.
    """
    configuration, gradients = scene.configuration, scene.states.gradients
    held = reduces_once(configuration)
    here = replace(gradients, size_bytes=gradients.size_bytes * share * (1 - held))
    if not np.any(held):
        return [here]
    alone = np.where(np.asarray(configuration.accumulate) > configuration.pp, 1, 1 / configuration.chunks)
    parts = scene.trained.parameters / sharded(scene.trained, configuration, 1)
    whole = gradients.size_bytes * share * held * (alone * parts + 1 - alone)
    numbers = {**gradients.numbers, "parameters": whole / gradient_bytes(configuration)}
    return [here, replace(gradients, name="gradients until the last micro-batch", size_bytes=whole, numbers=numbers)]


def _grown_gradients(scene: Scene, to_come: int = 0) -> list[Term]:
    """Return the gradients alive in a block's backward pass, with `to_come` blocks still to run.

    Missing are the embedding's, which come last unless tied to the head, and those of the block except its last matrix.
    FSDP2 reduces the head's gradient with the embedding's, and a block's when the block is done.
    """
    shape, configuration = scene.shape, scene.configuration
    if shape.tied or configuration.lora_rank or not shape.trains_table:
        return _all_gradients(scene)
    there, block = _live_share(scene), block_parameters(shape, configuration, trained=True)
    missing = scene.stage.embeds * shape.embedding_parameters / configuration.tp
    if configuration.framework == "fsdp2":
        missing = missing + (1 + to_come) * block + scene.stage.heads * head_weights(shape) / configuration.tp
    elif configuration.framework == "torch":
        missing = missing + block - largest_matrix(shape) / configuration.tp
    share = 1 - (1 - there) * np.minimum(missing / scene.trained.parameters, 1.0)
    return [*_all_gradients(scene, share), *_rest_of_embedding(scene, there)]


def _rest_of_embedding(scene: Scene, share: Quantity = 1.0) -> list[Term]:
    """Return the rows of the embedding's gradient that belong to other ranks.

    DTensor computes the gradient of a row-sharded embedding for all rows, and a rank's shard is a view of it. FSDP2
    copies the shard when it reduces; a tied head adds its own gradient, which makes a new tensor.
    """
    configuration, shape = scene.configuration, scene.shape
    if configuration.framework != "torch" or configuration.lora_rank or not shape.trains_table:
        return []
    alone = 1.0 if not shape.tied else (np.asarray(configuration.pp) > 1).astype(float)[()]
    rows = shape.vocab * (1 - 1 / np.asarray(configuration.tp))[()] * scene.stage.embeds * alone * share
    size = made_bytes(configuration) * rows * shape.hidden
    numbers = {"bytes": made_bytes(configuration), "rows": rows, "hidden": shape.hidden}
    return [
        model_term(
            Category.GRADIENTS, "other rows of the embedding's gradient", size, "bytes × rows × hidden", **numbers
        )
    ]


def _accumulates(configuration: Configuration) -> Quantity:
    """Return 1 if gradients add to those of earlier micro-batches or to buffers that are never freed, else 0."""
    return 1.0 if _always_there(configuration) else (np.asarray(configuration.accumulate) > 1).astype(float)[()]


def _always_there(configuration: Configuration) -> bool:
    return configuration.keep_gradients or framework_of(configuration).keeps_gradients


# -- saved activations


def _kept(scene: Scene) -> list[Term]:
    """Return the activations of all blocks of the stage, for every micro-batch in flight."""
    parts: dict[str, Quantity] = {"norms": 0.0, "attention": 0.0, "MLP": 0.0, "block inputs": 0.0}
    checkpoint = scene.configuration.checkpoint
    for stack, block, places in scene.blocks:
        recomputed = recomputed_blocks(checkpoint, places)
        whole = len(places) - recomputed
        entry = block.selective if checkpoint == "selective" else block.entry
        counts = ((block.norms, whole), (block.attention, whole), (block.feed_forward, whole), (entry, recomputed))
        for name, (kept, count) in zip(parts, counts, strict=True):
            size = _bytes(scene, stack, kept) * count
            parts[name] = parts[name] + size * scene.stage.share * scene.stage.in_flight
    terms = [_kept_term(scene, name, size) for name, size in parts.items() if np.any(size)]
    return [*terms, *_kept_by_projector(scene)]


def _with_final_norm(scene: Scene, kept: list[Term]) -> list[Term]:
    """Add what the norm before the head saves. Without logits it is freed before the blocks peak."""
    if not scene.configuration.objective.has_logits:
        return kept
    last = final_norm(scene.shape, scene.configuration).per_token(scene.configuration, scene.configuration.seq)
    norms = [term for term in kept if term.name == "kept by norms"]
    size = last * scene.tokens * scene.stage.heads + sum(term.size_bytes for term in norms)
    rest = [term for term in kept if term.name != "kept by norms"]
    return [_kept_term(scene, "norms", size), *rest] if np.any(size) else kept


def _kept_by_projector(scene: Scene) -> list[Term]:
    """Return the inputs of the projector's matrices and activations, and the indices of its tokens in the text."""
    projector, configuration = scene.shape.projector, scene.configuration
    if projector is None or not projector.tokens or not scene.shape.trains_projector or configuration.lora_rank:
        return []
    read = sum(inputs for inputs, _ in projector.matrices)
    between = sum(outputs for _, outputs in projector.matrices[:-1])
    tokens = configuration.micro_batch * projector.tokens / configuration.cp
    size = configuration.compute_bytes * (read + between) * tokens + scene.tokens * scene.shape.hidden
    numbers = {"bytes": configuration.compute_bytes, "read": read, "between": between, "tokens": tokens}
    formula = "bytes × (read + between) × tokens + mask"
    return [model_term(Category.ACTIVATIONS, "kept by the projector", size, formula, **numbers)]


def _kept_term(scene: Scene, name: str, size: Quantity) -> Term:
    passes = scene.tokens * scene.stage.in_flight
    numbers = {"bytes": size / passes, "tokens": scene.tokens, "micro-batches": scene.stage.in_flight}
    formula = "bytes of a token in all blocks of the stage × tokens × micro-batches in flight"
    return Term(Category.ACTIVATIONS, f"kept by {name}", size, formula, numbers, "model")


def _waiting(scene: Scene, kept: list[Term]) -> list[Term]:
    """Return the saved activations without those of the micro-batch (or stage chunk) in its backward pass."""
    others = scene.stage.in_flight - 1 / scene.configuration.chunks
    if not np.any(others):
        return []
    share = others / scene.stage.in_flight
    return [
        replace(term, size_bytes=term.size_bytes * share, numbers={**term.numbers, "micro-batches": others})
        for term in kept
    ]


def recomputed_blocks(checkpoint: str, places: Sequence[int]) -> int:
    """Count the recomputed blocks among these layer indices; `every-K` recomputes the first of each K."""
    if not checkpoint.startswith("every-"):
        return 0 if checkpoint == "none" else len(places)
    every = int(checkpoint.removeprefix("every-"))
    return sum(place % every == 0 for place in places)


def _bytes(scene: Scene, stack: LayerStack, kept: SavedPerToken) -> Quantity:
    """Return the bytes for one micro-batch on one GPU."""
    configuration = scene.configuration
    keys: Number = stack.tokens or configuration.seq
    tokens = configuration.micro_batch * stack.sequences * keys / configuration.cp
    return kept.per_token(configuration, keys) * tokens


def _inside_block(scene: Scene, *, last_kept: bool = False) -> list[Term]:
    """Return the activations of the block in its backward pass, and the gradients inside it."""
    present: Quantity = 0.0
    gradients: Quantity = 0.0
    for stack, block, _ in scene.blocks:
        present = np.maximum(present, _present(scene, stack, block, last_kept))
        gradients = np.maximum(gradients, _bytes(scene, stack, block.backward))
    formula, tokens = "bytes of a token × tokens", scene.tokens / scene.configuration.objective.texts
    present, gradients = (size / scene.configuration.objective.texts for size in (present, gradients))
    return [
        model_term(Category.ACTIVATIONS, name, size, formula, bytes=size / tokens, tokens=tokens)
        for name, size in (("one block", present), ("gradients inside a block", gradients))
    ]


def _present(scene: Scene, stack: LayerStack, block: BlockActivations, last_kept: bool) -> Quantity:
    """Return the bytes of the running block not already counted as saved; if it is recomputed, including its input."""
    configuration, whole = scene.configuration, _bytes(scene, stack, block.kept)
    moved = configuration.activation_place != "gpu"
    if configuration.checkpoint == "selective":
        among_kept = 0.0 if last_kept else _bytes(scene, stack, block.selective)
        return np.maximum(whole + _bytes(scene, stack, block.selective_only) - among_kept, 0.0)
    if configuration.checkpoint != "none":
        return whole + (_bytes(scene, stack, block.entry) if last_kept or moved else 0.0)
    if last_kept and not moved:
        return whole
    # PyTorch fetches tensor by tensor; others have one block in use and one being fetched.
    if framework_of(configuration).parallel == "torch" and moved:
        return _bytes(scene, stack, block.fetched)
    return 2 * whole if moved else 0.0


# -- weights in another dtype


def _casts(scene: Scene, *, forward: bool = False) -> list[Term]:
    """Return autocast's 16-bit copies of matrices: cached in the forward pass, then held by the autograd graph."""
    configuration, stage = scene.configuration, scene.stage
    if configuration.quantized_base:
        largest = largest_matrix(scene.shape) / configuration.tp
        size = configuration.compute_bytes * largest
        numbers = {"bytes": configuration.compute_bytes, "weights": largest}
        return [model_term(Category.WORKSPACE, "a matrix of the base made wide", size, "bytes × weights", **numbers)]
    if not configuration.autocast:
        return []
    head = head_weights(scene.shape) * scene.shape.trains_head * stage.heads / configuration.tp
    saved = forward or configuration.checkpoint == "none"
    count = head + scene.trained.dense * (1 if saved else 0)
    return [model_term(Category.WORKSPACE, "autocast copies of weights", 2 * count, "2 B × weights", weights=count)]


def _gathered(scene: Scene, moment: Literal["pass", "loss", "ending"] = "pass") -> list[Term]:
    """Return parameters gathered from their shards: the current block, the next one, and those outside blocks.

    During the loss no block is in use, but the buffer of the last gather still exists. A pipeline schedule takes the
    loss after its stage is done and has none; a backward pass without resharding ends with all parameters gathered.
    """
    configuration, stage = scene.configuration, scene.stage
    if not sharded_parameters(configuration):
        return []
    if configuration.zero < 3:
        count = stage.parameters
    elif configuration.framework == "deepspeed":
        count = np.minimum(stage.parameters, MAX_LIVE_PARAMETERS)
    else:
        blocks = 2 if moment == "pass" else 1
        count = np.minimum(stage.outside + blocks * block_parameters(scene.shape, configuration), stage.parameters)
        if moment != "pass":
            count = np.where(reduces_once(configuration), stage.parameters * (moment == "ending"), count)[()]
    outside = np.minimum(stage.outside, count)
    size = configuration.compute_bytes * outside + configuration.base_bytes * (count - outside)
    numbers = {"bytes": size / np.maximum(count, 1), "parameters": count}
    return [model_term(Category.PARAMETERS, "gathered parameters", size, "bytes × parameters", **numbers)]


def _unreduced(scene: Scene, *, ending: bool, kept: Sequence[Term] = ()) -> list[Term]:
    """Return a block's unreduced gradients and the buffers they are reduced in, if gradients are sharded.

    They exist once the block is done and its activations are freed.
    """
    configuration = scene.configuration
    if configuration.framework != "fsdp2" or configuration.zero == 0 or configuration.lora_rank:
        return []
    held = reduces_once(configuration)
    made, reduced = made_bytes(configuration), gradient_bytes(configuration)
    # The head's gradient is reduced together with the embedding's. Those that a pipeline holds back are accumulated at
    # once.
    head = head_weights(scene.shape) * scene.stage.heads / configuration.tp * (ending and scene.shape.trains_head)
    block = block_parameters(scene.shape, configuration, trained=True) * (1 - held)
    one_kept = total(kept) / _blocks(scene)
    size = made * head + np.maximum(reduced * block - one_kept, 0.0)[()]
    numbers = {"made": made, "head": head, "reduced": reduced, "block": block, "kept": one_kept}
    formula = "made bytes × head + reduced bytes × block - what a block kept"
    return [model_term(Category.GRADIENTS, "gradients not yet reduced", size, formula, **numbers)]


def _blocks(scene: Scene) -> Quantity:
    """Count the blocks of the stage, once per micro-batch in flight."""
    return sum(len(stack.layers) for stack in scene.shape.stacks) * scene.stage.share * scene.stage.in_flight


def _reduced(scene: Scene) -> list[Term]:
    """Return the buffer that reduces the largest of FSDP2's parameter groups after gradients were held back."""
    configuration = scene.configuration
    if configuration.lora_rank:
        return []
    count = np.maximum(scene.trained.outside, block_parameters(scene.shape, configuration, trained=True))
    size = reduces_once(configuration) * gradient_bytes(configuration) * count
    numbers = {"bytes": gradient_bytes(configuration), "parameters": count}
    return [model_term(Category.GRADIENTS, "gradients on their way", size, "bytes × parameters", **numbers)]


# -- embedding and head


def _logits(scene: Scene, moment: LossMoment) -> list[Term]:
    term = loss_term(scene.shape, scene.configuration, scene.tokens, moment)
    return [replace(term, size_bytes=term.size_bytes * scene.stage.heads)]


def _head_gradient(scene: Scene) -> list[Term]:
    """Return the head's gradient, the first to exist: unsharded, and under autocast in 16 bits with its cast."""
    configuration = scene.configuration
    if configuration.lora_rank or not scene.shape.trains_head:
        return []
    size = made_bytes(configuration) + (configuration.compute_bytes if configuration.autocast else 0)
    whole = size * head_weights(scene.shape) / configuration.tp * scene.stage.heads
    numbers = {"bytes": size, "weights": head_weights(scene.shape), "tp": configuration.tp}
    return [model_term(Category.GRADIENTS, "the head's gradient", whole, "bytes × weights ÷ tp", **numbers)]


def _summed_chunks(scene: Scene) -> list[Term]:
    """Return what a chunked loss accumulates: the gradients of the head and of its input."""
    configuration, stage = scene.configuration, scene.stage
    if configuration.loss != "chunked":
        return []
    read = configuration.compute_bytes * scene.shape.hidden * scene.tokens * stage.heads
    numbers = {"bytes": configuration.compute_bytes, "hidden": scene.shape.hidden, "tokens": scene.tokens}
    formula = "bytes × hidden × tokens"
    term = model_term(Category.ACTIVATIONS, "gradient of what the head reads", read, formula, **numbers)
    return [term, *(replace(head, name="the head's gradient so far") for head in _head_gradient(scene))]


def _embedding(scene: Scene) -> list[Term]:
    """Return a tied embedding's own gradient and the sum of both, beside the head's."""
    configuration, shape = scene.configuration, scene.shape
    if configuration.lora_rank or not shape.tied or not shape.trains_table:
        return []
    copies = (1 if configuration.autocast else 2) + _accumulates(configuration)
    if trains_with_nanotron(configuration):
        # The head's gradient is already counted; on a stage without the head, so is the embedding's own.
        copies = scene.stage.heads
    size = copies * made_bytes(configuration) * head_weights(shape) / configuration.tp * scene.stage.embeds
    weights = {"bytes": made_bytes(configuration), "weights": head_weights(shape), "tp": configuration.tp}
    numbers = {"copies": copies, **weights}
    return [
        model_term(Category.GRADIENTS, "the embedding's gradient", size, "copies × bytes × weights ÷ tp", **numbers)
    ]


# -- pipeline parallelism


def _in_torch_pipeline(configuration: Configuration) -> Quantity:
    """Return 1 if PyTorch's pipeline schedules run the stages, else 0."""
    return (np.asarray(configuration.pp) > 1) * float(framework_of(configuration).parallel == "torch")


def _stage_buffers(scene: Scene) -> list[Term]:
    """Return the receive buffers and outputs that PyTorch's pipeline stages hold.

    Every micro-batch has a buffer: for gradients on the first stage, for inputs on the last. Outputs live until their
    backward pass. Chunks of an interleaved stage are stages of their own, and their sends are held too, as that
    schedule waits for them at the end of the step.
    """
    configuration = scene.configuration
    pipeline = _in_torch_pipeline(configuration)
    if not np.any(pipeline):
        return []
    size = FP32 if configuration.autocast else configuration.compute_bytes
    tokens = scene.tokens / (configuration.tp if configuration.sequence_parallel else 1)
    chunks = configuration.chunks
    alone = configuration.accumulate + scene.stage.in_flight * (1 - scene.stage.heads)
    buffers = np.where(np.asarray(chunks) > 1, configuration.accumulate * 2 * (2 * chunks - 1), alone)[()]
    whole = pipeline * buffers * size * scene.shape.hidden * tokens
    numbers = {"buffers": buffers, "bytes": size, "hidden": scene.shape.hidden, "tokens": tokens}
    formula = "buffers × bytes × hidden × tokens"
    return [model_term(Category.ACTIVATIONS, "buffers of the stage", whole, formula, **numbers)]


def _held_logits(scene: Scene) -> list[Term]:
    """Return the logits of PyTorch's last stage, which live until their micro-batch's backward pass is done."""
    configuration, vocab = scene.configuration, scene.shape.vocab if scene.shape.logits else 0
    pipeline = _in_torch_pipeline(configuration)
    if not np.any(pipeline) or configuration.loss != "full":
        return []
    size = pipeline * scene.stage.heads * configuration.compute_bytes * vocab / configuration.tp * scene.tokens
    numbers = {"bytes": configuration.compute_bytes, "vocabulary": vocab, "tokens": scene.tokens}
    return [
        model_term(
            Category.ACTIVATIONS, "logits that the schedule holds", size, "bytes × vocabulary × tokens", **numbers
        )
    ]


# -- optimizer


def _optimizer(scene: Scene) -> list[Term]:
    configuration = scene.configuration
    trained = scene.states.gradients.size_bytes / gradient_bytes(configuration)
    if configuration.optimizer in ("sgd", "momentum", "adamw-8bit"):
        return []
    if configuration.optimizer_kernel == "foreach" and configuration.framework in ("torch", "fsdp2"):
        size = state_bytes(configuration) * trained
        numbers = {"bytes": state_bytes(configuration), "parameters": trained}
        return [model_term(Category.WORKSPACE, "foreach temporaries", size, "bytes × parameters", **numbers)]
    if configuration.bf16_gradients and not configuration.bf16_moments:
        count = sharded(scene.stage, configuration, 1)
        numbers = {"bytes": FP32, "parameters": count}
        return [
            model_term(Category.GRADIENTS, "FP32 copies of gradients", FP32 * count, "bytes × parameters", **numbers)
        ]
    return []
