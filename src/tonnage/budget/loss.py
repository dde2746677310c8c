"""The logits and what the loss makes of them: for a small model with a large vocabulary, most of its memory.

Where something else than the cross-entropy of next tokens is made of them, it is done whole, as TRL 1.8 and PyTorch do it:
accelerate hands the logits of mixed precision on in FP32 (DeepSpeed does not); in 16 bits the log-probabilities of a whole row
are kept beside them, in FP32 only their sums.
"""

from typing import Literal

import numpy as np

from tonnage.budget.activations import FP32
from tonnage.budget.configuration import Configuration, Quantity
from tonnage.budget.frameworks import framework_of
from tonnage.budget.styles import caps_logits, compiled_whole
from tonnage.budget.terms import Term
from tonnage.ledger import Category
from tonnage.models.shape import ModelShape

# A chunked loss makes the logits of an eighth of the tokens at a time, as torchtune and torchtitan do by default.
LOSS_CHUNKS = 8

# PyTorch's loss of logits that tensor parallelism splits is written in Python: FP32 copies beside the logits in its forward
# pass (the logits, these less their maximum, the exponentials), and in all in its backward pass.
_SPLIT_FORWARD_BYTES, _SPLIT_BACKWARD_BYTES = 3 * FP32, 4 * FP32

LossMoment = Literal["forward", "kept", "frozen", "loss", "head"]


def loss_term(shape: ModelShape, configuration: Configuration, tokens: Quantity, moment: LossMoment) -> Term:
    """Scores over the vocabulary and copies of their size, on a GPU that holds the head."""
    tokens = tokens * configuration.logit_share
    if configuration.objective.plain or moment == "head":
        size = _next_token_bytes(configuration, moment) if shape.logits else 0
    else:
        size = _objective_bytes(configuration, moment) if shape.logits else 0
    if caps_logits(shape) and shape.logits:
        size = size + configuration.compute_bytes
    if configuration.fused_loss and shape.logits:
        # The logits of some tokens, over which their gradients are written; and the gradient of what the head reads.
        some = fused_tokens(shape, tokens) if moment != "head" else 0.0
        size, vocab = configuration.compute_bytes, shape.vocab / configuration.tp
        numbers = {"bytes": size, "vocabulary": vocab, "some": some, "hidden": shape.hidden, "tokens": tokens}
        formula = "bytes × (vocabulary × some + hidden × tokens)"
        total = size * (vocab * some + shape.hidden * tokens)
        return Term(Category.ACTIVATIONS, "logits and loss", total, formula, numbers, "model")
    chunks = LOSS_CHUNKS if configuration.loss == "chunked" else 1
    total = size * shape.vocab / configuration.tp * tokens / chunks
    numbers = {"bytes": size, "vocabulary": shape.vocab, "tokens": tokens, "tp": configuration.tp, "chunks": chunks}
    formula = "bytes × vocabulary ÷ tp × tokens ÷ chunks"
    return Term(Category.ACTIVATIONS, "logits and loss", total, formula, numbers, "model")


def fused_tokens(shape: ModelShape, tokens: Quantity) -> Quantity:
    """Whose logits Liger's kernel makes at once: so many that they are about as large as what the head reads."""
    share = tokens / -(-shape.vocab // shape.hidden)
    return np.minimum(np.exp2(np.ceil(np.log2(np.maximum(share, 1)))), tokens)[()]


def head_weights(shape: ModelShape) -> int:
    """Of the matrix that makes the logits."""
    if not shape.logits:
        return 0
    return shape.head_parameters or min(shape.vocab * shape.hidden, shape.embedding_parameters)


def _next_token_bytes(configuration: Configuration, moment: LossMoment) -> Quantity:
    """Of one number of the logits, for the cross-entropy of next tokens."""
    compute_bytes, framework = configuration.compute_bytes, framework_of(configuration)
    if moment == "head":
        return compute_bytes  # the gradient of the logits
    compiled = configuration.compile and configuration.compile_loss
    wide_bytes = FP32 * configuration.wide_logits
    if moment == "forward":
        # The logits and what is made of them; logits that are FP32 already are not copied.
        if compiled:
            return compute_bytes
        beside = _or_split(configuration, framework.loss_forward_bytes, _SPLIT_FORWARD_BYTES)
        copied = beside + compute_bytes + wide_bytes
        return copied if compute_bytes < FP32 else copied - FP32
    if compiled:
        # A model of transformers gives its logits beside its loss: zeros stand for the gradient that nobody takes of them.
        return (3 if compiled_whole(configuration) else 2) * compute_bytes
    # Eager: the log-probabilities, the gradient of the picked ones and that of the logits, each FP32; beside wide logits.
    whole = framework.loss_backward_bytes or FP32 + compute_bytes
    return _or_split(configuration, whole, _SPLIT_BACKWARD_BYTES) + wide_bytes


def _or_split(configuration: Configuration, whole: int, split: int) -> Quantity:
    """By whether the logits are split, where PyTorch itself splits them."""
    if framework_of(configuration).parallel != "torch":
        return whole
    return np.where(np.asarray(configuration.tp) > 1, split, whole)[()]


def _objective_bytes(configuration: Configuration, moment: LossMoment) -> Quantity:
    """At the height of the loss's forward pass; while a frozen model runs, and as it makes its own; and in the backward pass."""
    if configuration.objective.scores == "divergence":
        # Logits of student and teacher, the log-probabilities of both in FP32; three temporaries, of which one is kept.
        logits = configuration.compute_bytes
        if moment in ("kept", "frozen"):
            return (2 if moment == "frozen" else 1) * logits
        return 3 * FP32 if moment == "loss" else 2 * logits + 5 * FP32
    # Bytes of a number as the model gives it to the loss.
    upcast = configuration.mixed and configuration.framework != "deepspeed"
    wide = FP32 if upcast else configuration.compute_bytes
    kept = wide + (wide if wide < FP32 else 0)
    if moment in ("kept", "frozen"):
        return kept + (configuration.compute_bytes if moment == "frozen" else 0)
    odds = configuration.objective.scores == "odds"
    if moment == "loss":
        # In FP32 the logits are read again, in 16 bits the log-probabilities; beside them gradients, row by row and then whole.
        return (3 if wide == FP32 else 2) * wide + odds * wide / 2
    # One sequence after the other.
    row = wide / np.asarray(configuration.micro_batch)
    cast = configuration.compute_bytes + wide if configuration.compute_bytes < wide else 0
    if odds:
        # Half of the sequences are copied for their cross-entropy, whose log-probabilities stay.
        return max(2 * wide, cast, kept + wide / 2)
    read = bool(configuration.objective.frozen_passes)
    end = kept + configuration.objective.copies * wide + read * wide
    return np.maximum(max(end, cast, read * (kept + cast)), kept + read * wide + row)


def similarities(configuration: Configuration) -> list[Term]:
    """Of every pair's first text with the others of all pairs, which ranks gather; GradCache compares a whole step's."""
    objective = configuration.objective
    if objective.name != "contrastive":
        return []
    pairs = configuration.samples * (configuration.accumulate // objective.sequences if objective.grad_cache else 1)
    texts = pairs * configuration.data * (objective.sequences - 1)
    # The products, those over a temperature, and the log-probabilities.
    size = 2 * configuration.compute_bytes + FP32
    numbers = {"bytes": size, "pairs": pairs, "texts": texts}
    return [Term(Category.ACTIVATIONS, "similarities", size * pairs * texts, "bytes × pairs × texts", numbers, "model")]
