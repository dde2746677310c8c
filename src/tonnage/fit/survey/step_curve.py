"""Predict the peak of one step as a function of its size, from parts measured alone at a few small sizes.

Each part (what a block saves and needs temporarily, the rest of the model) is a polynomial of the size: linear in
rows, quadratic in tokens where something grows with their square. The peak is the maximum over the composed step.
Techniques that are applied are measured as they are. It does not know budgets.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tonnage.fit.choose.assembly import with_coarse_states
from tonnage.fit.choose.choosing import MemoryContext, peak_of
from tonnage.fit.choose.placement import (
    HOST_GRADIENTS,
    HOST_STATES,
    PLAIN,
    STEP_IN_BACKWARD,
    GradientPlace,
    ResidentState,
    memory_context,
)
from tonnage.fit.modules import without_cache
from tonnage.fit.stepping.batches import batch_rows, take_rows
from tonnage.fit.survey.measuring import bytes_of, measure_block, measure_outside
from tonnage.fit.survey.meter import GpuMeter
from tonnage.fit.survey.profile import BlockProfile, OutsideProfile, mixed
from tonnage.fit.survey.resident_state import find_resident_state
from tonnage.fit.survey.survey import KEEP, SizeProfile, Survey
from tonnage.fit.technique import Technique
from tonnage.fit.techniques.activation_offload import ActivationOffload
from tonnage.fit.techniques.host_states import HostStates
from tonnage.fit.training import Batch, Training

# Curvature below this share of a part is allocator rounding.
_BEND = 2e-3


class StepCurve(Survey):
    """The peak by size; `grow(size)` makes a batch, `degree` is the highest power that a part may grow with."""

    def __init__(
        self,
        training: Training,
        meter: GpuMeter,
        techniques: Sequence[Technique],
        grow: Callable[[int], Batch],
        *,
        degree: int,
    ) -> None:
        super().__init__(training, meter)
        self.grow, self.degree = grow, degree
        self._techniques = techniques
        self._host_states = next((technique for technique in techniques if isinstance(technique, HostStates)), None)
        self._batch_bytes: dict[int, int] = {}  # by size
        self._labels: dict[str, str] = {}  # block name to its kind and what techniques do to it, in execution order
        self._resident: ResidentState | None = None

    def measure(self, size: int) -> None:
        """Measure every part at this size, each alone: this takes far less memory than the step."""
        if size not in self.sizes:
            self.sizes[size] = self._measure(size)
        if self._resident is None:  # only now: libraries have allocated their workspaces
            # What is allocated now includes parameters and existing states; states still to come are added.
            held = find_resident_state(self.training, self.meter, {name: self.blocks[name] for name in self._labels}, 0)
            gc.collect()
            states = 0
            if not self.training.optimizer.state:
                coarse = "eight-bit-states" in self.training.applied
                states = (with_coarse_states(held, self.training) if coarse else held).states_bytes
                if self._host_states is not None:
                    states = min(self._host_states.gpu_bytes, held.states_bytes)
            parameters_bytes = self.meter.allocated_bytes + states
            self._resident = replace(held, parameters_bytes=parameters_bytes, besides_bytes=0, states_bytes=0)

    def _measure(self, rows: int) -> SizeProfile:
        """Measure without a KV cache, which would keep tensors of a block's earlier run.

        Real steps use the cache if the training has one.
        """
        batch = self.grow(rows)
        undo = without_cache(self.training.model)
        try:
            return self._measure_alone(rows, batch)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            if self.sizes or not self.blocks:
                raise
            self.blocks = {}  # blocks cannot run alone: treat the model as one piece
            return self._measure_alone(rows, batch)
        finally:
            undo()

    def _measure_alone(self, size: int, batch: Batch) -> SizeProfile:
        micro = take_rows(batch, slice(0, -(-batch_rows(batch) // self.training.micro_batches)))
        calls = self._capture(micro)
        kinds = list(calls.by_kind)  # in capture order, which is the same at every size
        self._labels = {name: f"{kinds.index(kind)}|{self._changes_to(name)}" for name, kind in calls.kinds.items()}
        outside = measure_outside(self.training, self.meter, self.blocks, calls, micro)
        self._batch_bytes[size] = bytes_of(batch)
        blocks: dict[str, dict[str, BlockProfile]] = {}
        for name, label in self._labels.items():
            if label not in blocks:
                _, call = calls.by_kind[calls.kinds[name]]
                blocks[label] = {KEEP: measure_block(self.training, self.meter, self.blocks[name], call)}
        return SizeProfile(size, self._labels, blocks, outside)

    def peak(self, size: int) -> int:
        """Return the bytes allocated at the peak of a step of this size, from the nearest measured sizes."""
        nearest = sorted(sorted(self.sizes, key=lambda seen: abs(seen - size))[: self.degree + 1])

        def mix(*values: float) -> int:
            least = int(values[-1]) if size > nearest[-1] else 0  # extrapolation must not continue a decrease
            return max(least, extrapolate(nearest, values, size))

        seen = [self.sizes[one] for one in nearest]
        labels = set(self._labels.values())
        blocks = {label: {KEEP: mixed(mix, *(one.blocks[label][KEEP] for one in seen))} for label in labels}
        outside = mixed(mix, *(one.outside for one in seen))
        modes = [ways[0] for ways in SizeProfile(size, self._labels, blocks, outside).modes(offload=False)]
        # One window of in-flight copies is shared by all offloaded blocks.
        window = max((t.window_bytes or 0 for t in self._techniques if isinstance(t, ActivationOffload)), default=0)
        waiting = window
        for index, label in enumerate(self._labels.values()):
            if ActivationOffload.name in label:
                resident_bytes = modes[index].resident_bytes
                under_way = min(waiting, resident_bytes)
                modes[index] = replace(modes[index], resident_bytes=max(0, resident_bytes - window) + under_way)
                waiting -= under_way
        return peak_of(modes, self._around(outside)) + mix(*(self._batch_bytes[one] for one in nearest))

    def step_bytes(self) -> int:
        """Return the bytes while the optimizer steps; independent of the size."""
        nothing = OutsideProfile(kept_bytes=0, peak_bytes=0, forward_s=0.0, backward_s=0.0)
        return self._around(nothing).fixed_bytes + self._around(nothing).step_peak_bytes

    def _changes_to(self, block: str) -> str:
        """Name what techniques do to this block in particular."""
        changes = []
        for technique in self._techniques:
            settings = technique.settings()
            if block in settings.get("modes", {}):
                changes.append(f"{technique.name}={settings['modes'][block]}")
            elif block in (settings.get("blocks") or ()):
                changes.append(f"{technique.name}={settings.get('what', '')}")
        return ",".join(changes)

    def _around(self, outside: OutsideProfile) -> MemoryContext:
        """Build the memory context. States are already allocated, so the placement only decides whether gradients stay."""
        assert self._resident is not None, "measure a size first"
        held, count = self._resident, self.training.micro_batches
        placement = STEP_IN_BACKWARD if "step-in-backward" in self.training.applied else PLAIN
        if self._host_states is not None:
            placement = HOST_GRADIENTS if self._host_states.how == "host" else HOST_STATES
        passes = placement.gradients(held, count) is GradientPlace.PASS
        frame = STEP_IN_BACKWARD if passes else PLAIN
        return memory_context(frame, held, outside, budget_bytes=0, micro_batches=count, backward_s=0.0)


def extrapolate(sizes: Sequence[int], values: Sequence[float], size: int) -> int:
    """Return the value at `size` of a curve through one to three points: linear, or quadratic if convex.

    Curvature below the allocator's rounding is ignored: at a hundred times the size its error would be ten thousand
    times as large. A concave curve (a chunk that is full) continues with its last slope.
    """
    assert len(sizes) == len(values) <= 3, "one value a size"
    if len(sizes) == 1:
        return int(values[0] * size / sizes[0])
    if len(sizes) == 2:
        slope = (values[1] - values[0]) / (sizes[1] - sizes[0])
        return max(0, round(values[1] + slope * (size - sizes[1])))
    whole_slope = (values[2] - values[0]) / (sizes[2] - sizes[0])
    rise = values[0] + whole_slope * (sizes[1] - sizes[0]) - values[1]
    if rise > _BEND * abs(values[2]):
        bend = rise / ((sizes[1] - sizes[0]) * (sizes[2] - sizes[1]))
        straight = values[2] + whole_slope * (size - sizes[2])
        return max(0, round(straight + bend * (size - sizes[0]) * (size - sizes[2])))
    side = slice(1, 3) if size > sizes[1] else slice(0, 2)
    return extrapolate(sizes[side], values[side], size)
