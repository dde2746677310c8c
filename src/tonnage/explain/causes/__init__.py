"""The rules: each is a function that takes a case and returns a finding or None."""

from collections.abc import Callable

from tonnage.explain.case import Case
from tonnage.explain.causes.attention import attention_matrices
from tonnage.explain.causes.cache import unbounded_cache
from tonnage.explain.causes.capacity import capacity, own_limit
from tonnage.explain.causes.data import resident_data, waiting_batches
from tonnage.explain.causes.ddp import ddp_accumulation
from tonnage.explain.causes.evaluation import graph_in_evaluation, kept_predictions, training_in_evaluation
from tonnage.explain.causes.evidence import (
    compile_peak,
    graph_without_backward,
    kept_gradients,
    optimizer_temporaries,
    surprising_tensor,
    wide_logits,
)
from tonnage.explain.causes.fragmentation import fragmentation
from tonnage.explain.causes.generation import growing_generation
from tonnage.explain.causes.host import host_memory, pinned_host
from tonnage.explain.causes.leak import leak
from tonnage.explain.causes.lengths import varying_lengths
from tonnage.explain.causes.loading import checkpoint_held_twice
from tonnage.explain.causes.outside import another_process, outside_pytorch
from tonnage.explain.causes.saving import saving_on_gpu
from tonnage.explain.findings import Finding

__all__ = ["RULES"]

# Rules that may name a cause come first, then those that only add evidence.
RULES: tuple[Callable[[Case], Finding | None], ...] = (
    capacity,
    fragmentation,
    leak,
    unbounded_cache,
    outside_pytorch,
    another_process,
    pinned_host,
    kept_predictions,
    graph_in_evaluation,
    training_in_evaluation,
    growing_generation,
    saving_on_gpu,
    checkpoint_held_twice,
    waiting_batches,
    host_memory,
    own_limit,
    surprising_tensor,
    compile_peak,
    wide_logits,
    attention_matrices,
    optimizer_temporaries,
    kept_gradients,
    graph_without_backward,
    resident_data,
    varying_lengths,
    ddp_accumulation,
)
