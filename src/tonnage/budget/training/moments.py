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

from tonnage.budget.terms import Term, model_term, product_term, total
from tonnage.budget.training.activations import FP32, SavedPerToken, final_norm
from tonnage.budget.training.adapters import largest_matrix
from tonnage.budget.training.configuration import MAX_LIVE_PARAMETERS, Configuration, Number, Quantity
from tonnage.budget.training.frozen import frozen_pass, frozen_weights
from tonnage.budget.training.loss import LossMoment, head_weights, loss_term, similarities
from tonnage.budget.training.nanotron import nanotron_terms
from tonnage.budget.training.states import StageShare
from tonnage.ledger import Category
from tonnage.models.shape import LayerStack

# Highest ZeRO stage at which gradients are reduced in DDP's buckets: `ZeroRedundancyOptimizer` leaves them to DDP.
_REPLICATED = {"torch": 1, "nanotron": 0}
# DeepSpeed's default `reduce_bucket_size`, in elements.
_REDUCE_BUCKET = 500_000_000


@dataclass(frozen=True, slots=True)
class StepMoment:
    """A point of the step on one pipeline stage, and the memory alive at it."""

    name: str
    terms: tuple[Term, ...]


def moments(stage: StageShare) -> Iterator[StepMoment]:
    """Yield the moments of one stage in the order of the step."""
    shape, config = stage.shape, stage.configuration
    # What is alive at many of them.
    own, head, casts, held = nanotron_terms(stage), _head_gradient(stage), _casts(stage), _held_logits(stage)
    buffers = (*_buckets(stage), *own.buffers, *_stage_buffers(stage))
    states_and_buffers = (*stage.kept, *frozen_weights(shape, config), *buffers)
    always = (*states_and_buffers, *own.held)
    in_blocks = _kept(stage)
    kept, share = _with_final_norm(stage, in_blocks), _live_share(stage, stage.in_flight)
    # Gradients of earlier micro-batches, alive in a forward pass with the most micro-batches in flight.
    live = (*_all_gradients(stage, share), *_rest_of_embedding(stage, share))
    passing = (*always, *live, *kept)
    gathered, ended = _gathered(stage), _gathered(stage, "ending")
    # Forward pass and loss. A fused loss computes the head's gradient alongside its logits, a loss compiled with the
    # head alongside the logits' gradient.
    early = head if config.loss == "fused" else []
    ending: LossMoment = "forward" if config.objective.plain else "head"
    yield StepMoment("forward", (*passing, *gathered, *_casts(stage, forward=True), *_logits(stage, ending), *early))
    if not config.objective.plain:
        yield from _objective_moments(stage, always, (*passing, *gathered, *casts))
    elif config.compiled_whole:
        early = head
    back, summed = (*passing, *casts, *held), _summed_chunks(stage)
    yield StepMoment("loss", (*back, *_gathered(stage, "loss"), *_logits(stage, "loss"), *early, *summed))
    yield StepMoment("head", (*back, *gathered, *_logits(stage, "head"), *head, *summed))
    # Backward pass through the blocks.
    through = (*always, *live, *in_blocks, *casts, *held, *gathered, *([] if config.step_in_backward else head))
    unreduced = _unreduced(stage, ending=False, kept=in_blocks)
    yield StepMoment("backward", (*through, *_inside_block(stage), *unreduced))
    waiting = (*always, *_waiting(stage, kept), *held)
    inside = _inside_block(stage, last_kept=True)
    first = (*inside, *_unreduced(stage, ending=True))
    yield StepMoment("first block", (*waiting, *ended, *_grown_gradients(stage), *first, *own.made))
    if config.framework == "fsdp2":
        # One block reduces its gradients while the next one is gathered.
        shared = stage.layers * stage.in_flight
        one = [replace(t, name=f"{t.name} in the first block", size_bytes=t.size_bytes / shared) for t in in_blocks]
        yield StepMoment("second block", (*waiting, *one, *gathered, *_grown_gradients(stage, to_come=1), *first))
    if np.any(np.asarray(config.pp) > 1):
        # The last micro-batch: none is in flight, and all gradients exist.
        added = (*_all_gradients(stage, _live_share(stage, 1)), *inside)
        yield StepMoment("last micro-batch", (*always, *held, *ended, *added))
    # Its end, and the update.
    gradients, rest = _all_gradients(stage), _rest_of_embedding(stage)
    end = (*waiting, *ended, *gradients, *own.made_at_end)
    yield StepMoment("embedding", (*end, *_embedding(stage), *rest))
    if np.any(config.reduces_once):
        yield StepMoment("reduce", (*always, *ended, *gradients, *_reduced(stage)))
    update = (*own.gathering, *_optimizer(stage))
    yield StepMoment("optimizer", (*states_and_buffers, stage.gradients, *rest, *update))


def _objective_moments(stage: StageShare, always: tuple[Term, ...], passed: tuple[Term, ...]) -> Iterator[StepMoment]:
    """Yield the moments between forward pass and loss: a frozen model's pass, its logits, and the scores."""
    objective = stage.configuration.objective
    if objective.frozen_passes:
        read, block = frozen_pass(stage.shape, stage.configuration)
        read = [*passed, *read]
        yield StepMoment(f"pass of the {objective.frozen_name}", (*read, block, *_logits(stage, "kept")))
        yield StepMoment(f"logits of the {objective.frozen_name}", (*read, *_logits(stage, "frozen")))
    # GradCache compares vectors of the whole batch before any of its chunks saves activations.
    here = always if objective.grad_cache else passed
    yield StepMoment("scores", (*here, *_logits(stage, "forward"), *similarities(stage.configuration)))


def _buckets(stage: StageShare) -> list[Term]:
    """Return the buffers in which a data-parallel framework reduces gradients."""
    config = stage.configuration
    if config.zero <= _REPLICATED.get(config.framework, -1):
        made = stage.gradients.size_bytes * config.made_bytes / config.gradient_bytes
        size = made * (np.asarray(config.data * config.cp) > 1)
        return [model_term(Category.GRADIENTS, "DDP buckets", size, "as large as the gradients, where there are ranks")]
    if config.framework == "deepspeed" and config.zero:
        # ZeRO 3 copies a bucket's gradients once more, ordered by rank, to reduce-scatter them.
        buckets = 1 + (np.asarray(config.data * config.cp) > 1) * (config.zero == 3)
        held = buckets * 2.0 * np.minimum(stage.trained.parameters, _REDUCE_BUCKET)
        words = "buckets × 2 B × elements"
        return [model_term(Category.GRADIENTS, "reduce bucket", held, words, buckets=buckets, elements=_REDUCE_BUCKET)]
    return []


def _live_share(stage: StageShare, before: Quantity) -> Quantity:
    """Return 1 if gradients exist after the first `before` micro-batches, or in buffers that are never freed, else 0."""
    config = stage.configuration
    if config.keep_gradients or config.traits.keeps_gradients:
        return 1.0
    return (np.asarray(config.accumulate) > before).astype(float)[()]


def _all_gradients(stage: StageShare, share: Quantity = 1.0) -> list[Term]:
    """Return `share` of all gradients, unsharded if a pipeline reduces them only at its end.

    With no more micro-batches than stages, an interleaved stage reduces one chunk before the next one begins.
    """
    config, gradients = stage.configuration, stage.gradients
    held = config.reduces_once
    here = replace(gradients, size_bytes=gradients.size_bytes * share * (1 - held))
    if not np.any(held):
        return [here]
    alone = np.where(np.asarray(config.accumulate) > config.pp, 1, 1 / config.chunks)
    parts = stage.trained.parameters / stage.trained.states_kept
    whole = gradients.size_bytes * share * held * (alone * parts + 1 - alone)
    numbers = {**gradients.numbers, "parameters": whole / config.gradient_bytes}
    return [here, replace(gradients, name="gradients until the last micro-batch", size_bytes=whole, numbers=numbers)]


def _grown_gradients(stage: StageShare, to_come: int = 0) -> list[Term]:
    """Return the gradients alive in a block's backward pass, with `to_come` blocks still to run.

    Missing are the embedding's, which come last unless tied to the head, and those of the block except its last matrix.
    FSDP2 reduces the head's gradient with the embedding's, and a block's when the block is done.
    """
    shape, config = stage.shape, stage.configuration
    if shape.tied or config.lora_rank or not shape.trains_table:
        return _all_gradients(stage)
    there, block = _live_share(stage, stage.in_flight), stage.largest_trained_block
    missing = stage.embeds * shape.embedding_parameters / config.tp
    if config.framework == "fsdp2":
        missing = missing + (1 + to_come) * block + stage.heads * head_weights(shape) / config.tp
    elif config.framework == "torch":
        missing = missing + block - largest_matrix(shape) / config.tp
    share = 1 - (1 - there) * np.minimum(missing / stage.trained.parameters, 1.0)
    return [*_all_gradients(stage, share), *_rest_of_embedding(stage, there)]


def _rest_of_embedding(stage: StageShare, share: Quantity = 1.0) -> list[Term]:
    """Return the rows of the embedding's gradient that belong to other ranks.

    DTensor computes the gradient of a row-sharded embedding for all rows, and a rank's shard is a view of it. FSDP2
    copies the shard when it reduces; a tied head adds its own gradient, which makes a new tensor.
    """
    config, shape = stage.configuration, stage.shape
    if config.framework != "torch" or config.lora_rank or not shape.trains_table:
        return []
    alone = 1.0 if not shape.tied else (np.asarray(config.pp) > 1).astype(float)[()]
    rows = shape.vocab * (1 - 1 / np.asarray(config.tp))[()] * stage.embeds * alone * share
    numbers = {"bytes": config.made_bytes, "rows": rows, "hidden": shape.hidden}
    return [product_term(Category.GRADIENTS, "other rows of the embedding's gradient", **numbers)]


# -- saved activations


def _kept(stage: StageShare) -> list[Term]:
    """Return the activations of all blocks of the stage, for every micro-batch in flight."""
    config, projector = stage.configuration, stage.shape.projector
    parts: dict[str, Quantity] = {"norms": 0.0, "attention": 0.0, "MLP": 0.0, "block inputs": 0.0}
    for stack, block, places in stage.blocks:
        recomputed = recomputed_blocks(config.checkpoint, places)
        whole, entry = len(places) - recomputed, block.selective if config.checkpoint == "selective" else block.entry
        counts = ((block.norms, whole), (block.attention, whole), (block.feed_forward, whole), (entry, recomputed))
        for name, (kept, count) in zip(parts, counts, strict=True):
            parts[name] = parts[name] + _bytes(stage, stack, kept) * count * stage.share * stage.in_flight
    terms = [_kept_term(stage, name, size) for name, size in parts.items() if np.any(size)]
    # Inputs of the projector's matrices and activations, and the indices of its tokens in the text.
    if projector is None or not projector.tokens or not stage.shape.trains_projector or config.lora_rank:
        return terms
    read = sum(inputs for inputs, _ in projector.matrices)
    between = sum(outputs for _, outputs in projector.matrices[:-1])
    tokens = config.micro_batch * projector.tokens / config.cp
    size = config.compute_bytes * (read + between) * tokens + config.tokens * stage.shape.hidden
    numbers = {"bytes": config.compute_bytes, "read": read, "between": between, "tokens": tokens}
    formula = "bytes × (read + between) × tokens + mask"
    return [*terms, model_term(Category.ACTIVATIONS, "kept by the projector", size, formula, **numbers)]


def _with_final_norm(stage: StageShare, kept: list[Term]) -> list[Term]:
    """Add what the norm before the head saves. Without logits it is freed before the blocks peak."""
    if not stage.configuration.objective.has_logits:
        return kept
    last = final_norm(stage.shape, stage.configuration).per_token(stage.configuration, stage.configuration.seq)
    norms = [term for term in kept if term.name == "kept by norms"]
    size = last * stage.configuration.tokens * stage.heads + sum(term.size_bytes for term in norms)
    rest = [term for term in kept if term.name != "kept by norms"]
    return [_kept_term(stage, "norms", size), *rest] if np.any(size) else kept


def _kept_term(stage: StageShare, name: str, size: Quantity) -> Term:
    passes = stage.configuration.tokens * stage.in_flight
    numbers = {"bytes": size / passes, "tokens": stage.configuration.tokens, "micro-batches": stage.in_flight}
    formula = "bytes of a token in all blocks of the stage × tokens × micro-batches in flight"
    return Term(Category.ACTIVATIONS, f"kept by {name}", size, formula, numbers, "model")


def _waiting(stage: StageShare, kept: list[Term]) -> list[Term]:
    """Return the saved activations without those of the micro-batch (or stage chunk) in its backward pass."""
    others = stage.in_flight - 1 / stage.configuration.chunks
    share, changed = others / stage.in_flight, {"micro-batches": others}
    some = kept if np.any(others) else []
    return [replace(t, size_bytes=t.size_bytes * share, numbers={**t.numbers, **changed}) for t in some]


def recomputed_blocks(checkpoint: str, places: Sequence[int]) -> int:
    """Count the recomputed blocks among these layer indices; `every-K` recomputes the first of each K."""
    if not checkpoint.startswith("every-"):
        return 0 if checkpoint == "none" else len(places)
    every = int(checkpoint.removeprefix("every-"))
    return sum(place % every == 0 for place in places)


def _bytes(stage: StageShare, stack: LayerStack, kept: SavedPerToken) -> Quantity:
    """Return the bytes for one micro-batch on one GPU."""
    config = stage.configuration
    keys: Number = stack.tokens or config.seq
    tokens = config.micro_batch * stack.sequences * keys / config.cp
    return kept.per_token(config, keys) * tokens


def _inside_block(stage: StageShare, *, last_kept: bool = False) -> list[Term]:
    """Return the activations of the block in its backward pass not already counted as saved, and gradients inside it."""
    config = stage.configuration
    moved = config.activation_place != "gpu"
    present: Quantity = 0.0
    gradients: Quantity = 0.0
    for stack, block, _ in stage.blocks:
        here = _bytes(stage, stack, block.kept)
        if config.checkpoint == "selective":
            among_kept = 0.0 if last_kept else _bytes(stage, stack, block.selective)
            here = np.maximum(here + _bytes(stage, stack, block.selective_only) - among_kept, 0.0)
        elif config.checkpoint != "none":
            # A recomputed block includes its input.
            here = here + (_bytes(stage, stack, block.entry) if last_kept or moved else 0.0)
        elif moved:
            # PyTorch fetches tensor by tensor; others have one block in use and one being fetched.
            by_tensor = config.traits.parallel == "torch"
            here = _bytes(stage, stack, block.fetched) if by_tensor else 2 * here
        elif not last_kept:
            here = 0.0
        present = np.maximum(present, here)
        gradients = np.maximum(gradients, _bytes(stage, stack, block.backward))
    texts = config.objective.texts
    formula, tokens = "bytes of a token × tokens", config.tokens / texts
    return [
        model_term(Category.ACTIVATIONS, name, size, formula, bytes=size / tokens, tokens=tokens)
        for name, size in (("one block", present / texts), ("gradients inside a block", gradients / texts))
    ]


# -- weights in another dtype


def _casts(stage: StageShare, *, forward: bool = False) -> list[Term]:
    """Return autocast's 16-bit copies of matrices: cached in the forward pass, then held by the autograd graph."""
    config = stage.configuration
    if config.quantized_base:
        numbers = {"bytes": config.compute_bytes, "weights": largest_matrix(stage.shape) / config.tp}
        return [product_term(Category.WORKSPACE, "a matrix of the base made wide", **numbers)]
    if not config.autocast:
        return []
    head = head_weights(stage.shape) * stage.shape.trains_head * stage.heads / config.tp
    count = head + stage.trained.dense * (forward or config.checkpoint == "none")
    return [model_term(Category.WORKSPACE, "autocast copies of weights", 2 * count, "2 B × weights", weights=count)]


def _gathered(stage: StageShare, moment: Literal["pass", "loss", "ending"] = "pass") -> list[Term]:
    """Return parameters gathered from their shards: the current block, the next one, and those outside blocks.

    During the loss no block is in use, but the buffer of the last gather still exists. A pipeline schedule takes the
    loss after its stage is done and has none; a backward pass without resharding ends with all parameters gathered.
    """
    config = stage.configuration
    if not config.shards_parameters:
        return []
    if config.zero < 3:
        count = stage.parameters
    elif config.framework == "deepspeed":
        count = np.minimum(stage.parameters, MAX_LIVE_PARAMETERS)
    else:
        blocks = 2 if moment == "pass" else 1
        count = np.minimum(stage.outside + blocks * stage.largest_block, stage.parameters)
        if moment != "pass":
            count = np.where(config.reduces_once, stage.parameters * (moment == "ending"), count)[()]
    outside = np.minimum(stage.outside, count)
    size = config.compute_bytes * outside + config.base_bytes * (count - outside)
    numbers = {"bytes": size / np.maximum(count, 1), "parameters": count}
    return [model_term(Category.PARAMETERS, "gathered parameters", size, "bytes × parameters", **numbers)]


def _unreduced(stage: StageShare, *, ending: bool, kept: Sequence[Term] = ()) -> list[Term]:
    """Return a block's unreduced gradients and the buffers they are reduced in, if gradients are sharded.

    They exist once the block is done and its activations are freed.
    """
    config = stage.configuration
    if config.framework != "fsdp2" or config.zero == 0 or config.lora_rank:
        return []
    held = config.reduces_once
    made, reduced = config.made_bytes, config.gradient_bytes
    # The head's gradient is reduced together with the embedding's. Those that a pipeline holds back are accumulated at
    # once.
    head = head_weights(stage.shape) * stage.heads / config.tp * (ending and stage.shape.trains_head)
    block = stage.largest_trained_block * (1 - held)
    one_kept = total(kept) / (stage.layers * stage.in_flight)
    size = made * head + np.maximum(reduced * block - one_kept, 0.0)[()]
    numbers = {"made": made, "head": head, "reduced": reduced, "block": block, "kept": one_kept}
    formula = "made bytes × head + reduced bytes × block - what a block kept"
    return [model_term(Category.GRADIENTS, "gradients not yet reduced", size, formula, **numbers)]


def _reduced(stage: StageShare) -> list[Term]:
    """Return the buffer that reduces the largest of FSDP2's parameter groups after gradients were held back."""
    if (config := stage.configuration).lora_rank:
        return []
    count = np.maximum(stage.trained.outside, stage.largest_trained_block)
    size = config.reduces_once * config.gradient_bytes * count
    numbers = {"bytes": config.gradient_bytes, "parameters": count}
    return [model_term(Category.GRADIENTS, "gradients on their way", size, "bytes × parameters", **numbers)]


# -- embedding and head


def _logits(stage: StageShare, moment: LossMoment) -> list[Term]:
    term = loss_term(stage.shape, stage.configuration, moment)
    return [replace(term, size_bytes=term.size_bytes * stage.heads)]


def _head_gradient(stage: StageShare) -> list[Term]:
    """Return the head's gradient, the first to exist: unsharded, and under autocast in 16 bits with its cast."""
    config, weights = stage.configuration, head_weights(stage.shape)
    if config.lora_rank or not stage.shape.trains_head:
        return []
    size = config.made_bytes + config.compute_bytes * config.autocast
    whole, numbers = size * weights / config.tp * stage.heads, {"bytes": size, "weights": weights, "tp": config.tp}
    return [model_term(Category.GRADIENTS, "the head's gradient", whole, "bytes × weights ÷ tp", **numbers)]


def _summed_chunks(stage: StageShare) -> list[Term]:
    """Return what a chunked loss accumulates: the gradients of the head and of its input."""
    config, hidden = stage.configuration, stage.shape.hidden
    if config.loss != "chunked":
        return []
    numbers = {"bytes": config.compute_bytes, "hidden": hidden, "tokens": config.tokens}
    read, formula = config.compute_bytes * hidden * config.tokens * stage.heads, " × ".join(numbers)
    term = model_term(Category.ACTIVATIONS, "gradient of what the head reads", read, formula, **numbers)
    return [term, *(replace(head, name="the head's gradient so far") for head in _head_gradient(stage))]


def _embedding(stage: StageShare) -> list[Term]:
    """Return a tied embedding's own gradient and the sum of both, beside the head's."""
    config, shape = stage.configuration, stage.shape
    if config.lora_rank or not shape.tied or not shape.trains_table:
        return []
    # In nanotron the head's gradient is already counted; on a stage without the head, so is the embedding's own.
    own = config.framework == "nanotron"
    copies = stage.heads if own else (1 if config.autocast else 2) + _live_share(stage, 1)
    weights = head_weights(shape)
    size = copies * config.made_bytes * weights / config.tp * stage.embeds
    numbers = {"copies": copies, "bytes": config.made_bytes, "weights": weights, "tp": config.tp}
    formula = "copies × bytes × weights ÷ tp"
    return [model_term(Category.GRADIENTS, "the embedding's gradient", size, formula, **numbers)]


# -- pipeline parallelism


def _in_torch_pipeline(config: Configuration) -> Quantity:
    """Return 1 if PyTorch's pipeline schedules run the stages, else 0."""
    return (np.asarray(config.pp) > 1) * float(config.traits.parallel == "torch")


def _stage_buffers(stage: StageShare) -> list[Term]:
    """Return the receive buffers and outputs that PyTorch's pipeline stages hold.

    Every micro-batch has a buffer: for gradients on the first stage, for inputs on the last. Outputs live until their
    backward pass. Chunks of an interleaved stage are stages of their own, and their sends are held too, as that
    schedule waits for them at the end of the step.
    """
    config = stage.configuration
    pipeline = _in_torch_pipeline(config)
    if not np.any(pipeline):
        return []
    size = FP32 if config.autocast else config.compute_bytes
    tokens = config.tokens / (config.tp if config.sequence_parallel else 1)
    chunks = config.chunks
    alone = config.accumulate + stage.in_flight * (1 - stage.heads)
    buffers = np.where(np.asarray(chunks) > 1, config.accumulate * 2 * (2 * chunks - 1), alone)[()]
    whole = pipeline * buffers * size * stage.shape.hidden * tokens
    numbers = {"buffers": buffers, "bytes": size, "hidden": stage.shape.hidden, "tokens": tokens}
    formula = "buffers × bytes × hidden × tokens"
    return [model_term(Category.ACTIVATIONS, "buffers of the stage", whole, formula, **numbers)]


def _held_logits(stage: StageShare) -> list[Term]:
    """Return the logits of PyTorch's last stage, which live until their micro-batch's backward pass is done."""
    config, vocab = stage.configuration, stage.shape.vocab if stage.shape.logits else 0
    pipeline = _in_torch_pipeline(config)
    if not np.any(pipeline) or config.loss != "full":
        return []
    size = pipeline * stage.heads * config.compute_bytes * vocab / config.tp * config.tokens
    numbers = {"bytes": config.compute_bytes, "vocabulary": vocab, "tokens": config.tokens}
    formula = " × ".join(numbers)
    return [model_term(Category.ACTIVATIONS, "logits that the schedule holds", size, formula, **numbers)]


# -- optimizer


def _optimizer(stage: StageShare) -> list[Term]:
    config = stage.configuration
    if config.optimizer in ("sgd", "momentum", "adamw-8bit"):
        return []
    if config.optimizer_kernel == "foreach" and config.framework in ("torch", "fsdp2"):
        numbers = {"bytes": config.state_bytes, "parameters": stage.gradients.size_bytes / config.gradient_bytes}
        return [product_term(Category.WORKSPACE, "foreach temporaries", **numbers)]
    if config.bf16_gradients and not config.bf16_moments:
        return [product_term(Category.GRADIENTS, "FP32 copies of gradients", bytes=FP32, parameters=stage.states_kept)]
    return []
