"""The logits and what the loss makes of them: for a small model with a large vocabulary, most of its memory."""

from typing import Literal

import numpy as np

from tonnage.budget.activations import FP32
from tonnage.budget.configuration import Configuration, Quantity
from tonnage.budget.frameworks import framework_of
from tonnage.budget.objective_logits import objective_bytes
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
        size = objective_bytes(configuration, moment) if shape.logits else 0
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
