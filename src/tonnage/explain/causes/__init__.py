"""The rules: each is a function that takes a case and returns a finding or None."""

from collections.abc import Callable

from tonnage.explain.case import Case
from tonnage.explain.causes import evidence
from tonnage.explain.causes.capacity import another_process, capacity, fragmentation, outside_pytorch, own_limit
from tonnage.explain.causes.growth import growing_generation, leak, unbounded_cache
from tonnage.explain.causes.host import host_memory, pinned_host
from tonnage.explain.causes.phases import (
    checkpoint_held_twice,
    graph_in_evaluation,
    kept_predictions,
    resident_data,
    saving_on_gpu,
    training_in_evaluation,
    waiting_batches,
)
from tonnage.explain.fixes import Finding

__all__ = ["RULES"]

# Rules that may name a cause come first, then those that only add evidence.
RULES: tuple[Callable[[Case], Finding | None], ...] = (
    *(capacity, fragmentation, leak, unbounded_cache, outside_pytorch, another_process, pinned_host),
    *(kept_predictions, graph_in_evaluation, training_in_evaluation, growing_generation),
    *(saving_on_gpu, checkpoint_held_twice, waiting_batches, host_memory, own_limit),
    *(evidence.surprising_tensor, evidence.compile_peak, evidence.wide_logits, evidence.attention_matrices),
    *(evidence.optimizer_temporaries, evidence.kept_gradients, evidence.graph_without_backward, resident_data),
    *(evidence.varying_lengths, evidence.ddp_accumulation),
)
