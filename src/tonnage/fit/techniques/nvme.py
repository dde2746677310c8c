"""Activations, weights or optimizer states in a file on disk, if neither GPU nor host has room."""

import os
import shutil
import sys
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tonnage.fit.moving.disk import DiskProblem, DiskSpace, Extent, Loaded
from tonnage.fit.moving.host import CopyInFlight, Packing
from tonnage.fit.stepping.parameter_step import Group, OneByOneStepper, State, Step, parameter_steps, why_not_one_by_one
from tonnage.fit.technique import NotApplicable, Technique
from tonnage.fit.techniques.activation_offload import ActivationOffload
from tonnage.fit.techniques.weight_streaming import WeightStreaming
from tonnage.fit.training import Training
from tonnage.fit.virtual import on_virtual_gpu
from tonnage.techniques import techniques
from tonnage.units import GIB, MIB

_ON_DISK = "disk"  # the only state key of a parameter here


@dataclass(eq=False)
class _StatesOnDisk:
    """One parameter's states: tensors in an extent, counters and the like here."""

    extent: Extent
    packing: Packing
    others: State


class DiskStep(Step):
    """Steps a parameter with states that are read from disk and written back.

    While one parameter is stepped, the states of its successor in the previous step are prefetched.
    """

    converts = True

    def __init__(self, inner: Step, space: DiskSpace, device: torch.device) -> None:
        self._inner = inner
        self.space = space
        self._device = device
        self._coming: dict[_StatesOnDisk, tuple[Tensor, Loaded]] = {}
        self._leaving: list[tuple[Tensor, CopyInFlight]] = []
        self._next: dict[_StatesOnDisk, _StatesOnDisk] = {}
        self._first: _StatesOnDisk | None = None
        self._last: _StatesOnDisk | None = None

    @torch.no_grad()
    def __call__(self, parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        kept: _StatesOnDisk | None = state.get(_ON_DISK)
        if kept is None:
            made: State = {}
            self._inner(parameter, gradient, made, group)
            if made:
                state[_ON_DISK] = self._keep(made)
            return
        buffer = self._load(kept)
        here = {**kept.others, **kept.packing.views(buffer)}
        self._inner(parameter, gradient, here, group)
        self._store(kept, here, buffer)

    def plain_state(self, parameter: Tensor, state: State) -> State:
        if not state:
            return {}
        kept: _StatesOnDisk = state[_ON_DISK]
        tensors = kept.packing.views(self.space.read_all(kept.extent))
        if self._inner.converts:
            tensors = {name: tensor.to(self._device) for name, tensor in tensors.items()}
        plain = self._inner.plain_state(parameter, {**kept.others, **tensors})
        return {name: v.cpu() if isinstance(v, Tensor) and v.dim() else v for name, v in plain.items()}

    def own_state(self, parameter: Tensor, plain: State, group: Group) -> State:
        self._coming.clear()  # reads in flight hold their buffers until they finish
        self._next.clear()
        self._first = self._last = None
        made = self._inner.own_state(parameter, plain, group)
        return {_ON_DISK: self._keep(made)} if made else {}

    def _keep(self, made: State) -> _StatesOnDisk:
        # Dense, whatever the values' layouts.
        tensors = {name: value for name, value in made.items() if isinstance(value, Tensor) and value.dim()}
        dense = ((name, v.dtype, v.size(), torch.empty_like(v, device="meta").stride()) for name, v in tensors.items())
        packing = Packing.of(dense)
        kept = _StatesOnDisk(self.space.take(packing.byte_count), packing, others={})
        weakref.finalize(kept, self.space.give, kept.extent).atexit = False
        self._store(kept, made, torch.empty(packing.byte_count, dtype=torch.uint8, device=self._device))
        return kept

    def _load(self, kept: _StatesOnDisk) -> Tensor:
        buffer, loaded = self._coming.pop(kept) if kept in self._coming else self._start_loading(kept)
        loaded.wait()
        # Prefetch nothing after the last parameter: the first one's states would stay on the GPU during the next
        # forward.
        self._first = self._first or kept
        if self._last is not None and kept is not self._first:
            self._next[self._last] = kept
        self._last = kept
        following = self._next.get(kept)
        if following is not None and following not in self._coming:
            self._coming[following] = self._start_loading(following)
        return buffer

    def _start_loading(self, kept: _StatesOnDisk) -> tuple[Tensor, Loaded]:
        buffer = torch.empty(kept.extent.byte_count, dtype=torch.uint8, device=self._device)
        return buffer, self.space.load(kept.extent, buffer)

    def _store(self, kept: _StatesOnDisk, state: State, buffer: Tensor) -> None:
        kept.others = kept.packing.store(state, buffer)
        self._leaving.append((buffer, self.space.store(buffer, kept.extent)))
        self.finish(in_flight=1)

    def finish(self, *, in_flight: int = 0) -> None:
        """Release the oldest buffers until this many are in flight; the current stream waits for their copies."""
        while len(self._leaving) > in_flight:
            _, copied = self._leaving.pop(0)
            copied.wait()


class Nvme(Technique, name="nvme"):
    directory: str
    what: Literal["weights", "activations", "states"]
    blocks: tuple[str, ...] = ()  # for weights and activations
    staging_bytes: int = GIB  # pinned, for copies to and from the disk
    window_bytes: int | None = None  # for activations: most bytes on the GPU
    minimum_bytes: int = MIB  # for activations: smaller storages stay
    slots: int = 2  # for weights: blocks on the GPU at a time
    disk_bytes_per_s: float = 2e9  # unused; kept because saved plans name it

    def __post_init__(self) -> None:
        known = ("weights", "activations", "states")
        if self.what not in known:
            raise NotApplicable(
                f"The disk was asked to keep {self.what!r}.", hint=f"It keeps one of {', '.join(known)}."
            )
        vars(self).update(techniques()["nvme"]["settings"][self.what])

    def why_not(self, training: Training) -> str | None:
        directory = Path(self.directory)
        if not directory.is_dir():
            return f"there is no directory {directory}"
        if not os.access(directory, os.W_OK):
            return f"the directory {directory} cannot be written to"
        if self.what == "states":
            return why_not_one_by_one(training.optimizer)
        return self._on_host().why_not(training)

    def _on_host(self) -> ActivationOffload | WeightStreaming:
        """Return the technique that keeps the same on the host."""
        if self.what == "weights":
            return WeightStreaming(blocks=self.blocks, slots=self.slots)
        return ActivationOffload(blocks=self.blocks, minimum_bytes=self.minimum_bytes, window_bytes=self.window_bytes)

    def place(self, training: Training, stack: ExitStack) -> None:
        try:
            space = DiskSpace(Path(self.directory), training.device, staging_bytes=self.staging_bytes)
            stack.callback(space.close)
            if self.what == "states":
                steps = parameter_steps(training.optimizer)
                step = DiskStep(steps.function, space, training.device)
                stack.callback(steps.replace(step, finish=step.finish))
                stack.callback(training.replace_stepper(OneByOneStepper(training.stepper)))
                return
            technique = self._on_host()
            if isinstance(technique, ActivationOffload):
                technique.place_in(space, training, stack)
            else:
                virtual = on_virtual_gpu(training.device)
                free_bytes = sys.maxsize if virtual else shutil.disk_usage(self.directory).free
                technique.place_in(space, training, stack, free_bytes=free_bytes, where=self.directory)
        except DiskProblem as error:
            raise NotApplicable(str(error), hint=error.hint) from error
