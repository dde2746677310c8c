"""The logits and the loss's copies of them: for a small model with a large vocabulary, most of its memory.

Objectives other than next-token cross-entropy are computed on whole logits, as TRL 1.8 and PyTorch do it: accelerate
upcasts the logits of mixed precision to FP32 (DeepSpeed does not); in 16 bits the log-probabilities of a whole row are
saved beside them, in FP32 only their sums.
"""

from typing import Literal

import numpy as np

from tonnage.budget.terms import Term, product_term
from tonnage.budget.training.activations import FP32
from tonnage.budget.training.configuration import Configuration, Quantity
from tonnage.budget.training.styles import caps_logits
from tonnage.ledger import Category
from tonnage.models.shape import ModelShape

# A chunked loss computes the logits of an eighth of the tokens at a time, as torchtune and torchtitan do by default.
LOSS_CHUNKS = 8

# PyTorch's loss on logits split by tensor parallelism is written in Python: FP32 copies beside the logits in the
# forward pass (the logits, these minus their maximum, the exponentials), and in total in the backward pass.
_SPLIT_FORWARD_BYTES, _SPLIT_BACKWARD_BYTES = 3 * FP32, 4 * FP32

LossMoment = Literal["forward", "kept", "frozen", "loss", "head"]


def loss_term(shape: ModelShape, config: Configuration, moment: LossMoment) -> Term:
    """Return logits and copies of their size, on a GPU that holds the head."""
    tokens = config.tokens * config.logit_share
    size: Quantity = 0
    if shape.logits:
        plain = config.objective.plain or moment == "head"
        size = (_next_token_bytes if plain else _objective_bytes)(config, moment)
        size = size + config.compute_bytes * caps_logits(shape)
    if config.loss == "fused" and shape.logits:
        # The logits of a chunk of tokens, overwritten by their gradients, and the gradient of the head's input.
        some = fused_tokens(shape, tokens) if moment != "head" else 0.0
        size, vocab = config.compute_bytes, shape.vocab / config.tp
        numbers = {"bytes": size, "vocabulary": vocab, "some": some, "hidden": shape.hidden, "tokens": tokens}
        formula = "bytes × (vocabulary × some + hidden × tokens)"
        total = size * (vocab * some + shape.hidden * tokens)
        return Term(Category.ACTIVATIONS, "logits and loss", total, formula, numbers, "model")
    chunks = LOSS_CHUNKS if config.loss == "chunked" else 1
    total = size * shape.vocab / config.tp * tokens / chunks
    numbers = {"bytes": size, "vocabulary": shape.vocab, "tokens": tokens, "tp": config.tp, "chunks": chunks}
    formula = "bytes × vocabulary ÷ tp × tokens ÷ chunks"
    return Term(Category.ACTIVATIONS, "logits and loss", total, formula, numbers, "model")


def fused_tokens(shape: ModelShape, tokens: Quantity) -> Quantity:
    """Return how many tokens Liger's kernel processes at once: their logits are about as large as the head's input."""
    share = tokens / -(-shape.vocab // shape.hidden)
    return np.minimum(np.exp2(np.ceil(np.log2(np.maximum(share, 1)))), tokens)[()]


def head_weights(shape: ModelShape) -> int:
    """Return the weights of the output projection."""
    if not shape.logits:
        return 0
    return shape.head_parameters or min(shape.vocab * shape.hidden, shape.embedding_parameters)


def _next_token_bytes(config: Configuration, moment: LossMoment) -> Quantity:
    compute_bytes, framework = config.compute_bytes, config.traits
    if moment == "head":
        return compute_bytes  # the gradient of the logits
    compiled = config.compile and config.compile_loss
    wide_bytes = FP32 * config.wide_logits
    if moment == "forward":
        # The logits and their copies; FP32 logits are not copied.
        if compiled:
            return compute_bytes
        beside = _or_split(config, framework.loss_forward_bytes, _SPLIT_FORWARD_BYTES)
        copied = beside + compute_bytes + wide_bytes
        return copied if compute_bytes < FP32 else copied - FP32
    if compiled:
        # A transformers model returns its logits beside its loss, so their unused gradient is filled with zeros.
        return (3 if config.compiled_whole else 2) * compute_bytes
    # Eager: the log-probabilities, the gradient of the picked ones and that of the logits, all FP32, beside FP32
    # logits.
    whole = framework.loss_backward_bytes or FP32 + compute_bytes
    return _or_split(config, whole, _SPLIT_BACKWARD_BYTES) + wide_bytes


def _or_split(config: Configuration, whole: int, split: int) -> Quantity:
    """Return `split` if PyTorch itself splits the logits by tensor parallelism, else `whole`."""
    if config.traits.parallel != "torch":
        return whole
    return np.where(np.asarray(config.tp) > 1, split, whole)[()]


def _objective_bytes(config: Configuration, moment: LossMoment) -> Quantity:
    """Return bytes per logit for other objectives at each moment of the loss."""
    if config.objective.scores == "divergence":
        # Logits of student and teacher, the log-probabilities of both in FP32, and three temporaries, one of which is
        # saved.
        logits = config.compute_bytes
        if moment in ("kept", "frozen"):
            return (2 if moment == "frozen" else 1) * logits
        return 3 * FP32 if moment == "loss" else 2 * logits + 5 * FP32
    # Bytes per logit as the model passes it to the loss.
    upcast = config.mixed and config.framework != "deepspeed"
    wide = FP32 if upcast else config.compute_bytes
    kept = wide + (wide if wide < FP32 else 0)
    if moment in ("kept", "frozen"):
        return kept + (config.compute_bytes if moment == "frozen" else 0)
    odds = config.objective.scores == "odds"
    if moment == "loss":
        # In FP32 the backward pass reads the logits, in 16 bits the log-probabilities; beside them gradients, first by
        # row, then whole.
        return (3 if wide == FP32 else 2) * wide + odds * wide / 2
    # One sequence after another.
    row = wide / np.asarray(config.micro_batch)
    cast = config.compute_bytes + wide if config.compute_bytes < wide else 0
    if odds:
        # Half of the sequences are copied for their cross-entropy, whose log-probabilities are saved.
        return max(2 * wide, cast, kept + wide / 2)
    read = bool(config.objective.frozen_passes)
    end = kept + config.objective.copies * wide + read * wide
    return np.maximum(max(end, cast, read * (kept + cast)), kept + read * wide + row)


def similarities(config: Configuration) -> list[Term]:
    """Return the similarities of first texts with all others, gathered over ranks; GradCache compares a whole step."""
    objective = config.objective
    if objective.name != "contrastive":
        return []
    pairs = config.samples * (config.accumulate // objective.sequences if objective.grad_cache else 1)
    texts = pairs * config.data * (objective.sequences - 1)
    # The products, those divided by the temperature, and the log-probabilities.
    size = 2 * config.compute_bytes + FP32
    return [product_term(Category.ACTIVATIONS, "similarities", bytes=size, pairs=pairs, texts=texts)]
