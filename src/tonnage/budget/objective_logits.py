"""Bytes for one number of the logits, where something else than the cross-entropy of next tokens is made of them.

As TRL 1.8 and PyTorch do it, whole: accelerate hands the logits of mixed precision on in FP32 (DeepSpeed does not); in 16 bits
the log-probabilities of a whole row are kept beside them, in FP32 only their sums. This module does not know how many there are.
"""

from typing import Literal

import numpy as np

from tonnage.budget.activations import FP32
from tonnage.budget.configuration import Configuration, Quantity
from tonnage.budget.terms import Term
from tonnage.ledger import Category

ObjectiveMoment = Literal["forward", "kept", "frozen", "loss"]


def objective_bytes(configuration: Configuration, moment: ObjectiveMoment) -> Quantity:
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
