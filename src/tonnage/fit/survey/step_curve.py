"""Predict the peak of one step as a function of its size, from parts measured alone at a few small sizes.

Each part (what a block saves and needs temporarily, the rest of the model) is a polynomial of the size: linear in
rows, quadratic in tokens where something grows with their square. The peak is the maximum over the composed step.
Techniques that are applied are measured as they are. It does not know budgets.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from tonnage.fit.choose.assembly import with_coarse_states
from tonnage.fit.choose.choosing import MemoryContext, Mode, peak_of
from tonnage.fit.choose.placement import (
    HOST_GRADIENTS,
    HOST_STATES,
    PLAIN,
    STEP_IN_BACKWARD,
    GradientPlace,
    ResidentState,
    memory_context,
)
from tonnage.fit.modules import find_blocks, without_cache
from tonnage.fit.stepping.batches import batch_rows, take_rows
from tonnage.fit.survey.measuring import (
    Required,
    bytes_of,
    capture_calls,
    measure_block,
    measure_outside,
    required_gradients,
)
from tonnage.fit.survey.meter import GpuMeter
from tonnage.fit.survey.profile import OutsideProfile
from tonnage.fit.survey.resident_state import find_resident_state
from tonnage.fit.technique import Technique
from tonnage.fit.techniques.activation_offload import ActivationOffload
from tonnage.fit.techniques.host_states import HostStates
from tonnage.fit.training import Batch, Training

Parts = dict[str, tuple[int, ...]]  # by block label, "outside" and "batch": bytes at one size
# Curvature below this share of a part is allocator rounding.
_BEND = 2e-3


class StepCurve:
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
        self.training, self.grow, self.degree = training, grow, degree
        self.meter = meter
        self.blocks = find_blocks(training.model)
        self._techniques = techniques
        self._host_states = next((technique for technique in techniques if isinstance(technique, HostStates)), None)
        self._required: dict[str, Required] | None = None
        self._labels: dict[str, str] = {}  # block name to label, in execution order
        self._seen: dict[int, Parts] = {}
        self._resident: ResidentState | None = None

    @property
    def sizes(self) -> list[int]:
        return sorted(self._seen)

    def measure(self, size: int) -> None:
        """Measure every part at this size, each alone: this takes far less memory than the step."""
        if size not in self._seen:
            self._seen[size] = self._parts(self.grow(size))
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

    def _parts(self, batch: Batch) -> Parts:
        """Measure without a KV cache, which would keep tensors of a block's earlier run.

        Real steps use the cache if the training has one.
        """
        undo = without_cache(self.training.model)
        try:
            return self._parts_alone(batch)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            if self._seen or not self.blocks:
                raise
            self.blocks = {}  # blocks cannot run alone: treat the model as one piece
            return self._parts_alone(batch)
        finally:
            undo()

    def _parts_alone(self, batch: Batch) -> Parts:
        micro = take_rows(batch, slice(0, -(-batch_rows(batch) // self.training.micro_batches)))
        if self._required is None:
            self._required = required_gradients(self.training, self.blocks, micro)
        calls = capture_calls(self.training, self.blocks, micro, self._required)
        kinds = list(calls.by_kind)  # in capture order, which is the same at every size
        self._labels = {name: f"{kinds.index(kind)}|{self._ways(name)}" for name, kind in calls.kinds.items()}
        outside = measure_outside(self.training, self.meter, self.blocks, calls, micro)
        parts: Parts = {
            "outside": (outside.kept_bytes, outside.peak_bytes, outside.stem_peak_bytes, *outside.between_peak_bytes),
            "batch": (bytes_of(batch),),
        }
        for name, label in self._labels.items():
            if label not in parts:
                _, call = calls.by_kind[calls.kinds[name]]
                block = measure_block(self.training, self.meter, name, self.blocks[name], call)
                parts[label] = (block.kept_bytes, block.forward_peak_bytes, block.backward_peak_bytes)
        return parts

    def peak(self, size: int) -> int:
        """Return the bytes allocated at the peak of a step of this size."""
        modes = [_mode(label, self._at(label, size)) for label in self._labels.values()]
        kept, peak, stem, *between = self._at("outside", size)
        outside = OutsideProfile(
            kept_bytes=kept,
            peak_bytes=peak,
            stem_peak_bytes=stem,
            between_peak_bytes=tuple(between),
            forward_s=0.0,
            backward_s=0.0,
        )
        return peak_of(self._offloaded(modes), self._around(outside)) + self._at("batch", size)[0]

    def step_bytes(self) -> int:
        """Return the bytes while the optimizer steps; independent of the size."""
        nothing = OutsideProfile(kept_bytes=0, peak_bytes=0, forward_s=0.0, backward_s=0.0)
        return self._around(nothing).fixed_bytes + self._around(nothing).step_peak_bytes

    def _offloaded(self, modes: list[Mode]) -> list[Mode]:
        """Share one window of in-flight copies among all offloaded blocks, instead of one per block."""
        window = max((t.window_bytes or 0 for t in self._techniques if isinstance(t, ActivationOffload)), default=0)
        left, waiting = [], window
        for mode in modes:
            if ActivationOffload.name in mode.name:
                under_way = min(waiting, mode.resident_bytes)
                beyond = max(0, mode.resident_bytes - window)
                left.append(replace(mode, resident_bytes=beyond + under_way))
                waiting -= under_way
            else:
                left.append(mode)
        return left

    def _at(self, label: str, size: int) -> tuple[int, ...]:
        """Return the bytes of a part at a size, from the nearest measured sizes."""
        sizes = sorted(sorted(self._seen, key=lambda seen: abs(seen - size))[: self.degree + 1])
        seen = np.array([self._seen[one][label] for one in sizes], dtype=float)
        least = seen[-1] if size > sizes[-1] else np.zeros_like(seen[-1])  # extrapolation must not continue a decrease
        return tuple(max(int(low), extrapolate(sizes, column, size)) for low, column in zip(least, seen.T, strict=True))

    def _ways(self, block: str) -> str:
        """Name what techniques do to this block in particular."""
        ways = []
        for technique in self._techniques:
            settings = technique.settings()
            if block in settings.get("modes", {}):
                ways.append(f"{technique.name}={settings['modes'][block]}")
            elif block in (settings.get("blocks") or ()):
                ways.append(f"{technique.name}={settings.get('what', '')}")
        return ",".join(ways)

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


def _mode(label: str, sizes: tuple[int, ...]) -> Mode:
    kept, forward, backward = sizes
    return Mode(
        name=label,
        resident_bytes=kept,
        forward_peak_bytes=forward,
        backward_peak_bytes=backward,
        forward_s=0.0,
        backward_s=0.0,
    )


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
