"""Workspaces of closed libraries: cuFFT, cuSOLVER, cuSPARSE, and cuDNN's batch norm, attention and recurrent networks.

Sizes only, without tensors: the CPU build's kernels allocate them, and the CUDA build reports them to the real host
code. They follow measurements on an H200 with CUDA 13 and cuDNN 9.19. Convolutions are in `convolution_engines`.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import ceil, prod
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parents[1] / "data"
_MIB = 1 << 20

_COMMON_RADIX, _LARGEST_RADIX = 13, 127
_REAL_POINTS, _COMPLEX_POINTS = 1024, 16384
_FUSED_REAL_POINTS = frozenset(1 << k for k in range(17))


def fourier_bytes(batch: int, signal: Sequence[int], item_bytes: int, real: bool) -> int:
    """Return the workspace of a cuFFT plan: 0 if one kernel does it, a copy of the data if it takes several.

    `item_bytes` is the size of a complex element; `real` means that one side of the transform is real.
    """
    points, unit = prod(signal), item_bytes // (2 if real else 1)
    prime, length = max((_largest_prime(n), n) for n in signal)
    if prime > _LARGEST_RADIX:
        padded = points // prime * (1 << (2 * prime - 2).bit_length())
        return batch * (padded * unit + (points * unit if real else 0))
    largest = max(signal)
    is_small = largest <= (_REAL_POINTS if real else _COMPLEX_POINTS) or (real and largest in _FUSED_REAL_POINTS)
    needs_copy = not is_small or (prime > _COMMON_RADIX and prime != length)
    return batch * points * unit if needs_copy else 0


def _largest_prime(number: int) -> int:
    divisor = 2
    while divisor * divisor <= number:
        if number % divisor:
            divisor += 1
        else:
            number //= divisor
    return number


# cuSOLVER, by routine. Unless a docstring says otherwise, the size is within 1 % of all measured ones.


def potrf_bytes(n: int) -> int:
    """Return the workspace of Cholesky: 16 bytes for each tile of 64 by 64."""
    return 128 + -(-n * n // 8192) * 32 if n else 0


def getrf_bytes(n: int) -> int:
    """Return the workspace of LU, where `n` is the longer side; 15 % above the measured size at 1500."""
    return -(-n // 32) * 32 * 16 + 256 if n else 0


def sytrf_bytes(n: int, item: int) -> int:
    """Return the workspace of LDL: a panel of 64 columns, as LAPACK takes; not measured."""
    return 64 * n * item


def sytrs_bytes(n: int, item: int) -> int:
    """Return the workspace of solving with LDL: one column, as LAPACK's sytrs2 takes; not measured."""
    return n * item


def householder_bytes(columns: int, item: int) -> int:
    """Return the workspace of geqrf: 3 MiB, more from 256 columns on; twice that in double precision."""
    return (max(3 * _MIB, 2 * _MIB + 4096 * columns) * item) // 4 + 128


def orgqr_bytes(rows: int, columns: int, item: int) -> int:
    """Return the workspace of orgqr: a copy, or blocks of 128 columns; 8 % below the measured size at 100 by 100."""
    blocks = 128 * (rows + 2 * columns - 128)
    return (32768 + 256 + (blocks if columns >= 128 else _rounded(rows * columns))) * item


def ormqr_bytes(rows: int, columns: int, reflectors: int, item: int) -> int:
    """Return the workspace of ormqr for this many reflectors and a matrix of these rows and columns."""
    copies = _rounded(rows * reflectors) + _rounded(reflectors * reflectors)
    return (65536 + 256 + 256 * rows + copies + 512 * columns) * item


def _rounded(elements: int) -> int:
    return -(-elements // 32) * 32


def syevd_bytes(n: int, item: int) -> int:
    """Return the workspace of a symmetric eigenproblem by divide and conquer."""
    return max(262144 + 3072 * n + 12 * n * n, 16 * n * n + 596 * n) * item // 4


def syevj_bytes(n: int, item: int) -> int:
    """Return the workspace of a symmetric eigenproblem by Jacobi rotations of blocks of 32."""
    blocks = -(-n // 32)
    return (n * n + n + 4 * blocks * blocks + 1025 * blocks + 1024) * item


def syev_batched_bytes(n: int, batch: int, item: int) -> int:
    """Return the workspace of many small symmetric eigenproblems: each has its own area."""
    return batch * syevd_bytes(n, item)


def geev_bytes(n: int, item: int) -> int:
    """Return the workspace of a general eigenproblem: 512 bytes more than `orgqr_bytes`, and as inexact."""
    return orgqr_bytes(n, n, item) + 512


def singular_bytes(rows: int, columns: int, item: int) -> int:
    """Return the workspace of an SVD; 7 % below the measured size at 3000 by 3."""
    if rows == columns:  # Jacobi rotations of blocks of 32
        blocks = -(-rows // 32)
        elements = 2 * rows * rows + rows + 4 * blocks * blocks + 2050 * blocks + 1024
        return _rounded(elements) * item if blocks > 1 else 3968
    # Householder reflections; a wide matrix is transposed first.
    scales, transposed = min(rows, columns) * item, rows * columns * item if rows < columns else 0
    return householder_bytes(min(rows, columns), item) + sum(-(-size // 128) * 128 for size in (scales, transposed))


# cuSPARSE and cuDNN


def sparse_product_bytes(algorithm: int) -> int | None:
    """Return the buffer of a sparse by dense product; None if unmeasured. Measured at one size only."""
    return {4: 43, 6: 727}.get(algorithm)


def batch_norm_bytes(elements: int, channels: int, item: int, backward: bool) -> int:
    """Return the workspace of a channels-last batch norm: partial sums of row tiles. Contiguous inputs need none."""
    columns = -(-channels // 64)
    rows = (96 if backward else 64 if item == 4 else 160) * min(channels, 64) // 64
    tiles = -(-elements // channels // max(rows, 1))
    counters = 0 if backward else 4 * columns * tiles + 16
    return 8 * channels * tiles + counters + 1056 + 4 * columns


@cache
def attention_data() -> dict[str, Any]:
    return tomllib.loads((_DATA / "attention.toml").read_text())


def cudnn_forward_bytes(heads: int, queries: int, keys: int, width: int, sm_count: int) -> int:
    """Return the forward workspace for the `heads` of the whole batch.

    If a single query is split over its keys, each split keeps its output, maximum and sum.
    """
    data = attention_data()["cudnn_workspace"]
    if queries > 1:
        return int(data["forward_bytes"])
    splits = 1
    while splits * data["decode_keys_per_split"] < keys and 2 * splits * heads <= data["decode_blocks"]:
        splits *= 2
    if splits == 1 or keys < data["decode_least_keys"] or heads >= 2 * sm_count:
        return 0
    return splits * heads * (width + 2) * 4 + int(data["decode_bytes"])


def cudnn_backward_bytes() -> int:
    """Return the plan's own workspace; the accumulators are allocated by cuDNN's frontend, which is part of PyTorch."""
    return int(attention_data()["cudnn_workspace"]["forward_bytes"])


# cuDNN's recurrent networks: weights, workspace, reserve space, dropout state. The formulas were derived from
# measurements (`data/cudnn-recurrent.toml`); cuDNN does not publish them. Projections and inputs more than twice as
# wide as the hidden state were hardly measured.

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
KINDS = ("RNN", "RNN", "LSTM", "GRU")  # by cuDNN's mode
ALIGNMENT_BYTES = 32
STATE_BYTES_PER_THREAD = 24


@cache
def _figures() -> dict[str, Any]:
    return tomllib.loads((_DATA / "cudnn-recurrent.toml").read_text())


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
        if small and self.hidden <= _figures()["fused_up_to_hidden"]:
            return True
        # A persistent kernel
        return (
            self.dtype == "float16"
            and self.layers == self.directions == 1
            and not self.rows
            and self.hidden <= 1024
            and self.hidden % 128 == self.input % 128 == self.batch % 8 == 0
            and self.batch <= 128
            and (self.kind == "LSTM" or (self.kind == "RNN" and (self.batch < 96 or self.hidden < 896)))
        )

    def workspace_bytes(self) -> int:
        """Return the maximum of the forward and, in training, the backward pass."""
        figures, layers, one_way = _figures(), self.layers, self.directions == 1
        fixed: int = figures["bytes_per_layer_and_direction"] * layers * self.directions + figures["fixed_bytes"]
        if self.rows:
            per_row, per_layer = figures["packed"][self.kind]
            units: float = self.directions * (self.rows / self.batch * per_row + per_layer * layers)
        else:
            fixed += _aligned(8 * self.batch)
            table = figures["fused" if self.is_fused else "plain"][str(self.directions)][self.kind]
            ratio = self.input / self.hidden
            per_step, per_layer = table["forward"]
            per_step += self.dropout and layers > 1 and one_way
            units = self.steps * (per_step + ratio) + per_layer * layers
            if self.training:
                per_step, per_layer = table["backward"]
                per_step += 2 * ratio
                wider = max(1, ratio) * (1 if one_way else 4)
                if one_way and not self.is_fused:
                    chunk = self.steps if layers == 1 else 8 * (layers + 1)  # several layers process so many at a time
                    backward = self.steps * per_step + min(self.steps, chunk) * wider
                else:
                    backward = self.steps * (per_step + wider + (self.directions if layers > 1 else 0))
                units = max(units, backward + per_layer * layers)
        state_bytes = self.batch * self.hidden * self.element_bytes
        return fixed + self.matrix_elements * self.element_bytes + round(units * state_bytes)

    def reserve_bytes(self) -> int:
        """Return what the backward pass needs: gates and states, outputs between layers, dropout masks as bits."""
        rows = self.rows or self.steps * self.batch
        unit = rows * self.hidden * self.directions
        per_layer = _figures()["reserve_per_layer"][self.kind]
        gates = GATES[self.kind] if self.kind == "LSTM" else per_layer
        parts = [gates, per_layer - gates] * self.layers + [1] * (self.layers - 1)
        masks = (self.layers - 1) * _aligned(unit * self.directions // 8) if self.dropout else 0
        return sum(_aligned(count * unit * self.element_bytes) for count in parts) + 256 + masks


def _aligned(size: int) -> int:
    return ceil(size / ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def dropout_state_bytes(sm_count: int, threads_per_sm: int) -> int:
    """Return the size of one random state for each thread that can be resident on the card."""
    return sm_count * threads_per_sm * STATE_BYTES_PER_THREAD
