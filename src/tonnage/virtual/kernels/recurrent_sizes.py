"""Sizes of the buffers of cuDNN's recurrent networks, in bytes: weights, workspace, reserve space, dropout state.

The formulas were derived from measurements (`data/cudnn-recurrent.toml`); cuDNN does not publish them. Projections
and inputs more than twice as wide as the hidden state were hardly measured.
"""

import math
import tomllib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parent.parent / "data" / "cudnn-recurrent.toml"
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
KINDS = ("RNN", "RNN", "LSTM", "GRU")  # by cuDNN's mode
ALIGNMENT_BYTES = 32
STATE_BYTES_PER_THREAD = 24


@cache
def _figures() -> dict[str, Any]:
    return tomllib.loads(_DATA.read_text())


@dataclass(frozen=True)
class RecurrentNetwork:
    """A recurrent network on one batch of sequences."""

    kind: str
    input: int
    hidden: int
    layers: int
    directions: int
    steps: int
    batch: int
    element_bytes: int
    dtype: str
    training: bool
    dropout: bool
    projected: int = 0
    rows: int = 0  # of a packed batch: elements of all sequences together

    @property
    def output(self) -> int:
        return self.projected or self.hidden

    @cached_property
    def weight_elements(self) -> int:
        """All matrices and both biases, which have space reserved even if there are none."""
        return self.matrix_elements + 2 * GATES[self.kind] * self.hidden * self.layers * self.directions

    @cached_property
    def matrix_elements(self) -> int:
        gates = GATES[self.kind] * self.hidden
        wide = [self.input] + [self.output * self.directions] * (self.layers - 1)
        return self.directions * sum(gates * (width + self.output) + self.projected * self.hidden for width in wide)

    @property
    def is_fused(self) -> bool:
        if self.dtype == "bfloat16":
            return False
        small = GATES[self.kind] * self.hidden <= _figures()["fused_up_to_gate_outputs"]
        return (small and self.hidden <= _figures()["fused_up_to_hidden"]) or self._is_persistent

    @property
    def _is_persistent(self) -> bool:
        simple = (
            self.dtype == "float16" and self.kind != "GRU" and self.layers == self.directions == 1 and not self.rows
        )
        sizes = self.hidden <= 1024 and self.hidden % 128 == 0 and self.input % 128 == 0
        if not simple or not sizes or self.batch % 8 or self.batch > 128:
            return False
        return self.kind == "LSTM" or self.batch < 96 or self.hidden < 896

    @property
    def _chunk(self) -> int:
        """Steps that several layers process at a time."""
        return 8 * (self.layers + 1)

    def workspace_bytes(self) -> int:
        """Return the maximum of the forward and, in training, the backward pass."""
        figures = _figures()
        fixed = figures["bytes_per_layer_and_direction"] * self.layers * self.directions + figures["fixed_bytes"]
        if self.rows:
            per_row, per_layer = figures["packed"][self.kind]
            units = self.directions * (self.rows / self.batch * per_row + per_layer * self.layers)
        else:
            table = figures["fused" if self.is_fused else "plain"][str(self.directions)][self.kind]
            units = max(self._forward(table), self._backward(table) if self.training else 0)
            fixed += _aligned(8 * self.batch)
        state_bytes = self.batch * self.hidden * self.element_bytes
        return fixed + self.matrix_elements * self.element_bytes + round(units * state_bytes)

    def _forward(self, table: dict[str, list[int]]) -> float:
        per_step, per_layer = table["forward"]
        per_step += self.dropout and self.layers > 1 and self.directions == 1
        return self.steps * (per_step + self.input / self.hidden) + per_layer * self.layers

    def _backward(self, table: dict[str, list[int]]) -> float:
        per_step, per_layer = table["backward"]
        ratio = self.input / self.hidden
        wider = max(1, ratio) * (1 if self.directions == 1 else 4)
        if self.directions == 1 and not self.is_fused:
            steps = self.steps if self.layers == 1 else min(self.steps, self._chunk)
            return self.steps * (per_step + 2 * ratio) + steps * wider + per_layer * self.layers
        more = self.directions if self.layers > 1 else 0
        return self.steps * (per_step + 2 * ratio + wider + more) + per_layer * self.layers

    def reserve_bytes(self) -> int:
        """Return what the backward pass needs: gates and states, outputs between layers, dropout masks as bits."""
        rows = self.rows or self.steps * self.batch
        unit = rows * self.hidden * self.directions
        per_layer = _figures()["reserve_per_layer"][self.kind]
        gates = GATES[self.kind] if self.kind == "LSTM" else per_layer
        parts = [gates, per_layer - gates] * self.layers + [1] * (self.layers - 1)
        total = sum(_aligned(count * unit * self.element_bytes) for count in parts) + 256
        if self.dropout:
            total += (self.layers - 1) * _aligned(unit * self.directions // 8)
        return total


def _aligned(size: int) -> int:
    return math.ceil(size / ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def dropout_state_bytes(sm_count: int, threads_per_sm: int) -> int:
    """Return the size of one random state for each thread that can be resident on the card."""
    return sm_count * threads_per_sm * STATE_BYTES_PER_THREAD
