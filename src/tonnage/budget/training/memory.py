"""The memory of one training step on one GPU: every moment of every stage, and the worst of them as a ledger.

What is offloaded counts on the host, per GPU.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tonnage.budget import table
from tonnage.budget.terms import Term, total
from tonnage.budget.training.configuration import Configuration, Place, Quantity
from tonnage.budget.training.moments import StepMoment, moments
from tonnage.budget.training.overheads import context, fragmentation, nccl, other_streams, workspace
from tonnage.budget.training.states import StageShare, stages
from tonnage.hardware import Gpu
from tonnage.ledger import Category, Ledger
from tonnage.models.shape import ModelShape

# DeepSpeed's defaults for NVMe offload: this many buffers of this many FP32 elements stay in pinned host memory.
NVME_BUFFERS = 5
NVME_BUFFER_BYTES = 4 * 100_000_000
# Kinds of training with their own error range of a predicted peak, learned from published runs.
Kind = Literal["whole", "split", "adapters"]
_OUTSIDE_ALLOCATOR = (Category.CONTEXT, Category.FRAGMENTATION)


@dataclass(frozen=True, slots=True)
class TrainingBudget:
    """What one GPU needs at the worst moment of the worst pipeline stage; `terms` sum to `total_bytes`."""

    terms: tuple[Term, ...]
    moments: tuple[str, ...]  # their names
    moment: NDArray[np.intp]  # index of the peak, per configuration
    host_bytes: Quantity
    pinned_bytes: Quantity
    drive_bytes: Quantity = 0.0

    @property
    def total_bytes(self) -> Quantity:
        """Total that must fit on the card, including CUDA context and fragmentation."""
        return total(self.terms)

    @property
    def peak_allocated_bytes(self) -> Quantity:
        """Peak as `torch.cuda.max_memory_allocated` reports it."""
        return total(term for term in self.terms if term.category not in _OUTSIDE_ALLOCATOR)

    @property
    def peak_reserved_bytes(self) -> Quantity:
        """Peak as `torch.cuda.max_memory_reserved` reports it."""
        return total(term for term in self.terms if term.category is not Category.CONTEXT)

    def terms_at(self, index: int) -> tuple[Term, ...]:
        """Return the non-zero terms of one of many configurations, as plain numbers."""
        found = []
        for term in self.terms:
            size = float(_at(term.size_bytes, index))  # type: ignore[arg-type]
            if size:
                numbers = {name: _at(value, index) for name, value in term.numbers.items()}
                found.append(replace(term, size_bytes=size, numbers=numbers))
        return tuple(found)

    def ledger_at(self, index: int) -> Ledger:
        """Return the ledger of one of many configurations."""
        return Ledger.of((term.category, round(float(term.size_bytes))) for term in self.terms_at(index))

    def moment_at(self, index: int) -> str:
        """Return the moment of the peak of one of many configurations."""
        return self.moments[int(np.ravel(self.moment)[index if self.moment.size > 1 else 0])]


def training_budget(
    shape: ModelShape, config: Configuration, gpu: Gpu, *, stage: Literal["worst", "first", "last"] = "worst"
) -> TrainingBudget:
    """Predict the memory of one configuration or of each of many, optionally of one end of a pipeline only."""
    ends = [end for end in stages(shape, config) if end.name in ("stage", f"{stage} stage") or stage == "worst"]
    seen = _seen(ends)
    host = _host(seen, ends[0])
    if config.offloads:
        here = ([t if stays(t, config) else replace(t, size_bytes=0.0) for t in moment.terms] for moment in seen)
        seen = [replace(moment, terms=tuple(terms)) for moment, terms in zip(seen, here, strict=True)]
    # Of each configuration, the terms of its worst moment.
    sums = np.stack(np.broadcast_arrays(*(np.asarray(total(moment.terms), dtype=float) for moment in seen)))
    peak = np.argmax(sums, axis=0)
    merged: dict[tuple[Category, str], Term] = {}
    for number, moment in enumerate(seen):
        if np.any(at_peak := peak == number):
            for term in moment.terms:
                known = merged.get((term.category, term.name))
                size = np.where(at_peak, term.size_bytes, known.size_bytes if known else 0.0)
                merged[term.category, term.name] = replace(term, size_bytes=size)
    terms = (*merged.values(), workspace(gpu, config.framework), context(gpu), nccl(config))
    # Sizes of a single configuration are plain numbers.
    sizes = ((term, np.asarray(term.size_bytes, dtype=float)) for term in terms)
    plain = tuple(replace(term, size_bytes=size if size.ndim else float(size)) for term, size in sizes)
    names = tuple(moment.name for moment in seen)
    return TrainingBudget(plain, names, peak, host.host_bytes, host.pinned_bytes, host.drive_bytes)


class Needs(NamedTuple):
    """What one GPU's rank needs: bytes on the card, on the host and on the host's drives."""

    total_bytes: Quantity
    host_bytes: Quantity
    drive_bytes: Quantity


def needed_bytes(shape: ModelShape, config: Configuration, gpu: Gpu) -> Needs:
    """Return the sizes of a budget without building terms, as a search needs them."""
    ends = list(stages(shape, config))
    seen, all_stay = _seen(ends), not config.offloads
    held = [total(term for term in moment.terms if all_stay or stays(term, config)) for moment in seen]
    beside = (workspace(gpu, config.framework), context(gpu), nccl(config))
    host = _host(seen, ends[0])
    return Needs(functools.reduce(np.maximum, held) + total(beside), host.host_bytes, host.drive_bytes)


def _seen(ends: Sequence[StageShare]) -> list[StepMoment]:
    """Return the moments of these stages, with the allocator's fragmentation."""
    seen = []
    for stage in ends:
        found = list(moments(stage))
        wasted = (fragmentation(stage), *other_streams(stage, [moment.terms for moment in found]))
        seen += [StepMoment(f"{moment.name}, {stage.name}", (*moment.terms, *wasted)) for moment in found]
    return seen


class HostBytes(NamedTuple):
    """Bytes on the host, how many of them must be pinned for transfers to overlap, and bytes on its drives."""

    host_bytes: Quantity
    pinned_bytes: Quantity
    drive_bytes: Quantity


def _host(seen: Sequence[StepMoment], stage: StageShare) -> HostBytes:
    """Return the most host memory of any moment."""
    if not stage.configuration.offloads:
        return HostBytes(0.0, 0.0, 0.0)
    kept = stage.kept_parameters, stage.gradients
    found = [host_memory(moment.terms, *kept, stage.configuration) for moment in seen]
    return HostBytes(*(np.max(np.stack(np.broadcast_arrays(*sizes)), axis=0)[()] for sizes in zip(*found, strict=True)))


def host_memory(terms: Sequence[Term], parameters: Sequence[Term], gradients: Term, config: Configuration) -> HostBytes:
    """Return the host memory of what is offloaded among `terms`, given the stage's kept parameters and all gradients.

    With the optimizer on the host, there are also pinned gradients to read and parameters to write. Parameters on the
    host are written in place, and frozen ones are not written.
    """
    host: Quantity = 0.0
    pinned: Quantity = 0.0
    drives: Quantity = 0.0
    for term in terms:
        place, size = _place(term, config), term.size_bytes
        if place == "gpu" or term.name == "gradients":
            continue
        if place == "nvme":
            drives = drives + size
            size = np.minimum(size, float(NVME_BUFFERS * NVME_BUFFER_BYTES))
        host = host + size
        # Parameters and activations are transferred in every pass, so they are pinned.
        pinned = pinned + (size if place == "nvme" or term.category is not Category.OPTIMIZER_STATES else 0.0)
    if config.optimizer_place == "gpu":
        return HostBytes(host, pinned, drives)
    exchanged = gradients.size_bytes
    if not config.master_bytes and config.parameter_place != "host":
        exchanged = exchanged + total(term for term in parameters if not term.name.startswith("frozen"))
    return HostBytes(host + exchanged, pinned + exchanged, drives)


def stays(term: Term, config: Configuration) -> bool:
    """Say whether the term stays on the GPU."""
    return _place(term, config) == "gpu"


def _place(term: Term, config: Configuration) -> Place:
    if term.category is Category.OPTIMIZER_STATES:
        # Paged states need room for one tensor's states at a time, which is negligible.
        return "host" if config.paged else config.optimizer_place
    if term.category is Category.PARAMETERS and not term.name.startswith("gathered parameters"):
        return config.parameter_place
    if term.category is Category.ACTIVATIONS and term.name.startswith("kept by"):
        return config.activation_place
    if term.name == "gradients" and config.framework in ("deepspeed", "fsdp2"):
        # Copied as soon as they are reduced; the host's copy is counted in `host_memory`.
        return "gpu" if config.optimizer_place == "gpu" else "host"
    return "gpu"


def _at(value: object, index: int) -> object:
    return value[index] if isinstance(value, np.ndarray) and value.ndim else value


def kind_of(config: Configuration) -> Kind:
    """Return the kind of one configuration with plain numbers."""
    if config.lora_rank:
        return "adapters"
    return "split" if max(config.tp, config.pp, config.cp) > 1 else "whole"


def peak_factors(config: Configuration) -> tuple[float, float]:
    """Return the low and high factors between which nine of ten runs lie."""
    low, high = table("ranges")[kind_of(config)]["peak"]
    return low, high
