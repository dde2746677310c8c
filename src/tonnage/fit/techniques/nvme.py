"""Activations, weights or optimizer states in a file on disk, if neither GPU nor host has room.

These are the techniques for host memory with a file as the final destination.
"""

import os
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from tonnage.fit.moving.disk import DiskProblem, DiskSpace
from tonnage.fit.moving.disk_homes import DiskHome, DiskKeeper, DiskStep
from tonnage.fit.moving.streaming import place_all
from tonnage.fit.stepping.one_by_one import OneByOneStepper
from tonnage.fit.stepping.parameter_step import parameter_steps, why_not_one_by_one
from tonnage.fit.technique import NotApplicable, Technique
from tonnage.fit.techniques.activation_offload import ActivationOffload
from tonnage.fit.techniques.weight_streaming import CONFLICTS as streaming_conflicts
from tonnage.fit.techniques.weight_streaming import WeightStreaming, check_room, stream_weights, streamed_parameters
from tonnage.fit.training import Training
from tonnage.fit.virtual import on_virtual_gpu
from tonnage.units import GIB, MIB

_ORDER = {"weights": 35, "activations": 50, "states": 80}
_CONFLICTS = {
    "weights": {
        "weight-streaming": "both would move the weights of blocks: one to the disk, one to the host",
        **streaming_conflicts,
    },
    "activations": {"activation-offload": "both would move activations: one to the disk, one to the host"},
    "states": {"host-states": "both would move optimizer states: one to the disk, one to the host"},
}


@dataclass(frozen=True, kw_only=True)
class Nvme(Technique):
    name: ClassVar[str] = "nvme"
    title: ClassVar[str] = "on the disk"
    order: ClassVar[int] = 80
    refusal: ClassVar[str] = "The disk cannot keep {technique.what}: {reason}."
    hint: ClassVar[str] = "Name another directory, or leave it out."

    directory: str
    what: Literal["weights", "activations", "states"]
    blocks: tuple[str, ...] = ()  # for weights and activations
    staging_bytes: int = GIB  # pinned, for copies to and from the disk
    window_bytes: int | None = None  # for activations: most bytes on the GPU
    minimum_bytes: int = MIB  # for activations: smaller storages stay
    slots: int = 2  # for weights: blocks on the GPU at a time
    disk_bytes_per_s: float = 2e9  # unused; kept because saved plans name it

    def __post_init__(self) -> None:
        if self.what not in _ORDER:
            raise NotApplicable(
                f"The disk was asked to keep {self.what!r}.", hint=f"It keeps one of {', '.join(_ORDER)}."
            )
        object.__setattr__(self, "order", _ORDER[self.what])
        object.__setattr__(self, "conflicts", _CONFLICTS[self.what])

    def why_not(self, training: Training) -> str | None:
        directory = Path(self.directory)
        if not directory.is_dir():
            return f"there is no directory {directory}"
        if not os.access(directory, os.W_OK):
            return f"the directory {directory} cannot be written to"
        if self.what == "states":
            return why_not_one_by_one(training.optimizer)
        return self._on_the_host().why_not(training)

    def _on_the_host(self) -> ActivationOffload | WeightStreaming:
        """Return the technique that this one extends."""
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
            technique = self._on_the_host()
            if isinstance(technique, ActivationOffload):
                technique.place_with(DiskKeeper(space), training, stack)
                return
            if not on_virtual_gpu(training.device):
                owned = streamed_parameters(training.model, self.blocks)
                needed_bytes = sum(place_all(parameters)[1] for parameters in owned.values())
                check_room(needed_bytes, free_disk_bytes(Path(self.directory)), where=self.directory)
            homes = partial(DiskHome, space)
            stream_weights(training, self.blocks, homes, slots=self.slots, stack=stack)
        except DiskProblem as error:
            raise NotApplicable(str(error), hint=error.hint) from error


def free_disk_bytes(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
