"""The memory of one training step on one GPU: every moment of every stage, and the worst of them as a ledger."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tonnage.budget.configuration import Configuration, Quantity
from tonnage.budget.moments import StepMoment, moments
from tonnage.budget.offload import HostBytes, host_memory, offloads, stays
from tonnage.budget.overheads import context, fragmentation, nccl, other_streams, workspace
from tonnage.budget.sharding import StageParameters, stages
from tonnage.budget.states import States, states
from tonnage.budget.terms import Term, total
from tonnage.hardware import Gpu
from tonnage.ledger import Category, Ledger
from tonnage.models.shape import ModelShape

_OUTSIDE_ALLOCATOR = (Category.CONTEXT, Category.FRAGMENTATION)


@dataclass(frozen=True, slots=True)
class TrainingBudget:
    """What one GPU needs at the worst moment of the worst pipeline stage; `terms` sum to `total_bytes`."""

    terms: tuple[Term, ...]
    moments: tuple[str, ...]  # their names
    moment: NDArray[np.intp]  # index of the peak, per configuration
    host_bytes: Quantity
    pinned_bytes: Quantity

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
    shape: ModelShape, configuration: Configuration, gpu: Gpu, *, stage: Literal["worst", "first", "last"] = "worst"
) -> TrainingBudget:
    """Predict the memory of one configuration or of each of many, optionally of one end of a pipeline only."""
    ends = [end for end in stages(shape, configuration) if end.name in ("stage", f"{stage} stage") or stage == "worst"]
    seen = _seen(shape, ends, configuration)
    host = _host(seen, states(shape, ends[0], configuration), configuration)
    if offloads(configuration):
        here = (
            [term if stays(term, configuration) else replace(term, size_bytes=0.0) for term in moment.terms]
            for moment in seen
        )
        seen = [replace(moment, terms=tuple(terms)) for moment, terms in zip(seen, here, strict=True)]
    chosen, peak = _worst(seen)
    terms = (*chosen, workspace(gpu, configuration.framework), context(gpu), nccl(configuration))
    names = tuple(moment.name for moment in seen)
    return TrainingBudget(tuple(map(_plain, terms)), names, peak, host.host_bytes, host.pinned_bytes)


def needed_bytes(shape: ModelShape, configuration: Configuration, gpu: Gpu) -> tuple[Quantity, Quantity]:
    """Return `total_bytes` and `host_bytes` without building terms, as a search needs them."""
    ends = list(stages(shape, configuration))
    seen = _seen(shape, ends, configuration)
    if offloads(configuration):
        held = [total(term for term in moment.terms if stays(term, configuration)) for moment in seen]
    else:
        held = [total(moment.terms) for moment in seen]
    beside = (workspace(gpu, configuration.framework), context(gpu), nccl(configuration))
    host = _host(seen, states(shape, ends[0], configuration), configuration)
    return functools.reduce(np.maximum, held) + total(beside), host.host_bytes


def _seen(shape: ModelShape, ends: Sequence[StageParameters], configuration: Configuration) -> list[StepMoment]:
    """Return the moments of every stage, with the allocator's fragmentation."""
    seen = []
    for end in ends:
        found = list(moments(shape, end, configuration))
        streams = other_streams(shape, end, configuration, [moment.terms for moment in found])
        wasted = (fragmentation(shape, end, configuration), *streams)
        seen += [StepMoment(f"{moment.name}, {end.name}", (*moment.terms, *wasted)) for moment in found]
    return seen


def _host(seen: Sequence[StepMoment], kept: States, configuration: Configuration) -> HostBytes:
    if not offloads(configuration):
        return HostBytes(0.0, 0.0)
    found = [host_memory(moment.terms, kept, configuration) for moment in seen]
    host = np.max(np.stack(np.broadcast_arrays(*(item.host_bytes for item in found))), axis=0)
    pinned = np.max(np.stack(np.broadcast_arrays(*(item.pinned_bytes for item in found))), axis=0)
    return HostBytes(host[()], pinned[()])


def _worst(seen: list[StepMoment]) -> tuple[list[Term], NDArray[np.intp]]:
    """Return, for each configuration, the terms of its worst moment."""
    sums = np.stack(np.broadcast_arrays(*(np.asarray(total(moment.terms), dtype=float) for moment in seen)))
    peak = np.argmax(sums, axis=0)
    merged: dict[tuple[Category, str], Term] = {}
    for number, moment in enumerate(seen):
        here = peak == number
        if not np.any(here):
            continue
        for term in moment.terms:
            key = (term.category, term.name)
            known = merged.get(key)
            size = np.where(here, term.size_bytes, known.size_bytes if known else 0.0)
            merged[key] = replace(term, size_bytes=size)
    return list(merged.values()), peak


def _plain(term: Term) -> Term:
    size = np.asarray(term.size_bytes, dtype=float)
    return replace(term, size_bytes=float(size) if size.ndim == 0 else size)


def _at(value: object, index: int) -> object:
    return value[index] if isinstance(value, np.ndarray) and value.ndim else value
