"""Where gradients and optimizer states live, and what that costs in memory and time. No torch.

| placement        | gradients              | states                 | micro-batches | clipping |
|------------------|------------------------|------------------------|---------------|----------|
| plain            | all, on the GPU        | on the GPU             | any           | yes      |
| step-in-backward | one at a time          | on the GPU             | one           | no       |
| host-states      | all; one at a time     | split, GPU and host    | any; one      | yes; no  |
| host-gradients   | one at a time, to host | split, GPU and host    | any           | yes      |
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from tonnage.fit.choose.choosing import PIECE_BYTES, MemoryContext
from tonnage.fit.survey.profile import OutsideProfile


class GradientPlace(Enum):
    STAY = "stay"  # all are allocated from the first micro-batch on
    GROW = "grow"  # they accumulate during backward and are freed after the step
    PASS = "pass"  # each is freed as soon as it is complete


@dataclass(frozen=True, kw_only=True)
class ResidentState:
    """What a training holds apart from activations, and the speed of its optimizer and host link."""

    parameters_bytes: int  # and buffers
    besides_bytes: int = 0  # what else is on the card: the sample, library workspaces
    gradients_bytes: int
    states_bytes: int
    outside_gradients_bytes: int  # of parameters outside all blocks
    block_gradients_bytes: tuple[int, ...]
    parameter_gradients_bytes: tuple[int, ...]  # per parameter, in the optimizer's order
    step_temporary_bytes: int  # temporaries of the optimizer's step, besides states and gradients
    optimizer_s: float
    clips: bool
    steps_one_by_one: bool
    host_bytes: int
    link_bytes_per_s: float
    bandwidth_bytes_per_s: float  # of the GPU's memory
    host_step_s: float  # of the optimizer's step over all parameters on the CPU
    stepped_apart: int = 0  # parameters stepped separately in backward; small ones are stepped together
    launch_s: float = 0.0  # host time of one such step
    moved_launch_s: float = 0.0  # the same with states that are moved from and to host memory

    @property
    def held_bytes(self) -> int:
        """Bytes on the card throughout, wherever gradients and states are."""
        return self.parameters_bytes + self.besides_bytes


@dataclass(frozen=True, kw_only=True)
class Placement:
    name: str
    splits_states: bool = False

    @property
    def technique(self) -> str:
        return "host-states" if self.splits_states else self.name

    def suits(self, resident: ResidentState, micro_batches: int) -> bool:
        if self == PLAIN:
            return True
        if not resident.steps_one_by_one:
            return False
        if self == STEP_IN_BACKWARD:
            return micro_batches == 1 and not resident.clips
        return resident.host_bytes > 0 and resident.states_bytes > 0

    def gradients(self, resident: ResidentState, micro_batches: int) -> GradientPlace:
        if self in (STEP_IN_BACKWARD, HOST_GRADIENTS):
            return GradientPlace.PASS
        if micro_batches > 1:
            return GradientPlace.STAY
        return GradientPlace.PASS if self == HOST_STATES and not resident.clips else GradientPlace.GROW

    def memory_context(
        self,
        resident: ResidentState,
        outside: OutsideProfile,
        budget_bytes: int,
        micro_batches: int,
        *,
        backward_s: float,
        extra_bytes: int = 0,
    ) -> MemoryContext:
        """Return the memory context for the choice of modes. Transfers overlap with `backward_s`."""
        gradients = self.gradients(resident, micro_batches)
        grows, stays = gradients is GradientPlace.GROW, gradients is GradientPlace.STAY
        waits = self == HOST_STATES and gradients is GradientPlace.PASS
        movable = self.movable_bytes(resident, micro_batches)
        # If all states are on the host: both link directions at once, or the host's own step, whichever is longer.
        states_s = resident.states_bytes / resident.link_bytes_per_s
        if self == HOST_GRADIENTS:
            link_s = max(resident.gradients_bytes, resident.parameters_bytes) / resident.link_bytes_per_s
            states_s = max(resident.host_step_s, link_s)
        # States per parameter, in the order in which they are placed on the GPU.
        per_gradient = resident.states_bytes / max(1, resident.gradients_bytes)
        states_of_each = [round(gradient_bytes * per_gradient) for gradient_bytes in resident.parameter_gradients_bytes]
        # Gradients in transit to the host, for the stem and each block: a new one, and some before it.
        passing: list[int] = []
        if self == HOST_GRADIENTS:
            largest, blocks = max(resident.parameter_gradients_bytes, default=0), resident.block_gradients_bytes
            earlier = accumulate(reversed(blocks), initial=resident.outside_gradients_bytes)
            leaving = [min(PIECE_BYTES, made) for made in earlier][::-1]
            passing = [n + left for n, left in zip([largest, *(min(largest, b) for b in blocks)], leaving, strict=True)]
        return MemoryContext(
            budget_bytes=budget_bytes,
            fixed_bytes=resident.held_bytes
            + extra_bytes
            + (resident.gradients_bytes if stays else 0)
            + (0 if self.splits_states else resident.states_bytes),
            outside=outside,
            gradient_bytes=resident.block_gradients_bytes if grows or waits else (),
            outside_gradient_bytes=resident.outside_gradients_bytes if grows or waits else 0,
            waiting_bytes=WINDOW_BYTES if waits else None,
            passing_bytes=passing,
            gradients_per_state=resident.gradients_bytes / max(1, resident.states_bytes),
            step_peak_bytes=(resident.gradients_bytes if grows else 0)
            + (resident.step_temporary_bytes if self == PLAIN else 0),
            movable_states_bytes=movable,
            states_s_per_byte=states_s / max(1, movable),
            states_window_s=0.0 if resident.clips else backward_s,
            parameter_states_bytes=states_of_each if self == HOST_STATES else (),
            host_bytes=resident.host_bytes,
            link_bytes_per_s=resident.link_bytes_per_s,
            micro_batches=micro_batches,
        )

    def movable_bytes(self, resident: ResidentState, micro_batches: int) -> int:
        """Return what may be on the host instead: states, and accumulated gradients that go with them."""
        if not self.splits_states:
            return 0
        summed = self == HOST_GRADIENTS and micro_batches > 1
        return resident.states_bytes + (resident.gradients_bytes if summed else 0)

    def states_on_gpu(self, resident: ResidentState, micro_batches: int, unmoved_bytes: int) -> int:
        """Return the bytes of states among what stays on the GPU."""
        movable = self.movable_bytes(resident, micro_batches)
        return unmoved_bytes * resident.states_bytes // movable if movable else resident.states_bytes

    def launches_s(self, resident: ResidentState) -> float:
        """Return the host time to launch separate steps in backward, in pieces if some states are in host memory."""
        each_s = resident.moved_launch_s if self.splits_states else resident.launch_s
        return 0.0 if self == PLAIN else resident.stepped_apart * each_s

    def step_overhead_s(self, resident: ResidentState, micro_batches: int, backward_s: float) -> float:
        """Return the time beyond forward, backward and exposed transfers: accumulation and the step itself."""
        added_s = 3 * resident.gradients_bytes / resident.bandwidth_bytes_per_s
        if self == HOST_GRADIENTS:
            # Each micro-batch's gradients are accumulated on the host during its backward; those on the GPU cost the same.
            on_host_s = max(resident.gradients_bytes / resident.link_bytes_per_s, resident.host_step_s * 3 / 5)
            added_s = max(added_s, on_host_s - backward_s)
        return (micro_batches - 1) * added_s + resident.optimizer_s


PLAIN = Placement(name="plain")
STEP_IN_BACKWARD = Placement(name="step-in-backward")
HOST_STATES = Placement(name="host-states", splits_states=True)
HOST_GRADIENTS = Placement(name="host-gradients", splits_states=True)
PLACEMENTS = (PLAIN, STEP_IN_BACKWARD, HOST_STATES, HOST_GRADIENTS)
# Limit of gradients that wait for their states.
WINDOW_BYTES = 512 << 20


def suitable(resident: ResidentState, micro_batches: int, allowed: frozenset[str]) -> Iterator[Placement]:
    return (p for p in PLACEMENTS if p.suits(resident, micro_batches) and (p == PLAIN or p.technique in allowed))
