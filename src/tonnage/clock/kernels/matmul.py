"""The time of matrix products: tiles over the SMs in waves, as cuBLAS would choose them.

A tile of the result belongs to one SM, which streams two panels of the factors through its tensor cores. The slowest of
tensor cores, L2 bandwidth and, over all SMs, memory bandwidth sets the pace. The fastest of several tiles and split-K
factors is taken. Rows not aligned to 16 bytes rule out the best kernels and have their own figures. A launch has the
shape (batch, m, n, k); its variant gives the transposed factors in BLAS notation ("tn": both are read along k) and the
row alignment. Throttling is not modelled here.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache, partial
from math import ceil, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tonnage.clock.kernels.figures import (
    arithmetic,
    careful,
    distinct,
    figures,
    l2_bytes_per_s,
    on_card,
    peak,
    share_of_peak,
)
from tonnage.clock.launch import Launch, Settings
from tonnage.clock.operators import OperatorCall
from tonnage.hardware.gpu import Gpu

_PANEL_BYTES = 128  # of each row, streamed at a time
_SUM_BYTES = 4  # per element while split-K parts are summed
_ALIGNED_BYTES = 16
_LARGE_TILE, _MANY_WAVES = 128 * 256, 4  # from this many on, split-K is not used


def _factors(call: OperatorCall, settings: Settings, *, at: int) -> Launch | None:
    precision = arithmetic(call, at, settings.tf32_matmul)
    left, right = call.shapes[at], call.shapes[at + 1]
    if precision is None or not prod(left) or not prod(right) or left[-1] != right[-2]:
        return None
    batch, (m, k), n = prod(left[:-2]), left[-2:], right[-1]
    out_bytes: int = figures()["out_bytes"].get(precision, call.element_bytes(at))
    return Launch(
        kind="matmul", name=call.name, shape=(batch, m, n, k), precision=precision,
        moved_bytes=call.tensor_bytes(at) + call.tensor_bytes(at + 1) + float(batch * m * n * out_bytes),
        operations=2.0 * batch * m * n * k, variant=_variant(call, at, n * out_bytes),
    )  # fmt: skip


def _variant(call: OperatorCall, at: int, out_row_bytes: int) -> str:
    """Return the transposed factors, and the byte alignment of all rows."""
    letters, aligned = "", [out_row_bytes]
    for place in (at + 1, at):  # BLAS is column-major, so the right factor comes first
        shape = call.shapes[place]
        strides = call.strides[place] if place < len(call.strides) and call.strides[place] else (shape[-1], 1)
        across, along = strides[-2:]
        transposed = along != 1 and across == 1
        letters += "nt"[transposed]
        row = along if transposed else across
        aligned.append(max(row, 1) * call.element_bytes(place))
    widest = next(size for size in (_ALIGNED_BYTES, 8, 4, 2, 1) if not any(row % size for row in aligned))
    return f"{letters}-{widest}"


def _grouped(call: OperatorCall, settings: Settings) -> Launch | None:
    """Read a grouped product: row groups, or inner-dimension groups if both factors are matrices, of equal size."""
    (rows, inner), right = call.shapes[:2]
    precision, groups = arithmetic(call, 0, settings.tf32_matmul), call.shapes[2][0]
    shape = groups, rows, right[1], ceil(inner / groups)
    if len(right) == 3:
        shape = groups, ceil(rows / groups), right[2], inner
    if precision is None or not prod(shape):
        return None
    out_bytes = float(prod(shape[:3]) * call.element_bytes(0))
    return Launch(
        kind="matmul", name=call.name, shape=shape, precision=precision, operations=2.0 * prod(shape),
        moved_bytes=call.tensor_bytes(0) + call.tensor_bytes(1) + out_bytes, variant="tn-16",
        kernels=groups if goes_one_by_one(call) else 1,
    )  # fmt: skip


def goes_one_by_one(call: OperatorCall) -> bool:
    """Say whether groups are multiplied one by one: except for BF16, PyTorch reads their ends back and loops."""
    return call.name == "_grouped_mm" and call.types[0] != "c10::BFloat16"


OPERATORS = careful(
    {
        **dict.fromkeys(("mm", "bmm", "_scaled_mm", "_int_mm"), partial(_factors, at=0)),
        **dict.fromkeys(("addmm", "addmm_", "_addmm_activation", "baddbmm", "baddbmm_"), partial(_factors, at=1)),
        "_grouped_mm": _grouped,
    }
)


def seconds(launch: Launch, gpu: Gpu) -> Any:
    """Return the seconds of the kernel, and of the one that sums split-K parts."""
    if not any(isinstance(extent, np.ndarray) for extent in launch.shape):
        # Several kernels are products one after another.
        one = replace(launch, shape=(1, *launch.shape[1:]), kernels=1) if launch.kernels > 1 else launch
        return float(max(launch.kernels, 1) * _remembered(one, gpu))
    # Each distinct shape once, and those with many tiles, which have fewer options, separately.
    first, places = distinct(launch.shape)
    shapes = np.stack(np.broadcast_arrays(*launch.shape))[:, first].astype(np.float64)
    found = np.empty(len(first))
    many = _has_many_tiles(shapes, gpu)
    for chosen in (many, ~many):
        if chosen.any():
            each = tuple(column[chosen, None] for column in shapes)
            found[chosen] = modelled(replace(launch, shape=each), gpu)
    return found[places]


@lru_cache(maxsize=1 << 16)
def _remembered(launch: Launch, gpu: Gpu) -> float:
    return float(modelled(launch, gpu))


def modelled(launch: Launch, gpu: Gpu) -> Any:
    """Compute the same without the cache; of array shapes, either all have many tiles or none."""
    launch = on_card(launch, gpu)
    family = figures()["matmul"][family_of(launch)]
    if launch.name.startswith("addmm") and "biased_tiles" in family:
        family = family | {"tiles": family["biased_tiles"]}
    element_bytes: int = figures()["element_bytes"][launch.precision]
    out_bytes: int = figures()["out_bytes"].get(launch.precision, element_bytes)
    slower = family.get(launch.variant.split("-")[0], 1.0)
    whole_s = tiled(family, launch.shape, gpu, launch.precision, element_bytes, out_bytes, slower)
    if "streams" in family and not isinstance(launch.shape[1], np.ndarray) and 1 in launch.shape[1:3]:
        moved = _moved(launch.shape, element_bytes, out_bytes)
        return float(min(whole_s, family["start_s"] + moved / (gpu.bandwidth_bytes_per_s * family["dram"])))
    return whole_s


def family_of(launch: Launch) -> str:
    """Return the name of the fitted figures: by precision, and by alignment for misaligned rows."""
    aligned = int(launch.variant.split("-")[1])
    families = figures()["matmul"]
    name: str = figures()["family"][launch.precision]
    while aligned < _ALIGNED_BYTES:
        if f"{name}-{aligned}" in families:
            return f"{name}-{aligned}"
        aligned *= 2
    return name


def tiled(
    family: Mapping[str, Any], shape: tuple[Any, ...], gpu: Gpu, precision: str, element_bytes: int, out_bytes: int,
    slower: float = 1.0,
) -> Any:  # fmt: skip
    """Return the seconds of the family's fastest tile."""
    batch, m, n, k = shape
    tile_m, tile_n, parts = _candidates(family["tiles"], bool(np.all(_has_many_tiles(shape, gpu))))
    l2_rate = l2_bytes_per_s(gpu)
    # One tile on one SM.
    inner_bytes = np.ceil(np.ceil(k / parts) * element_bytes / _PANEL_BYTES) * _PANEL_BYTES
    rate = peak(gpu, precision) / gpu.sm_count * share_of_peak(gpu, precision, family["mac"] / slower)
    arithmetic_s = 2 * tile_m * tile_n * (inner_bytes / element_bytes) / rate
    loads_s = (tile_m + tile_n) * inner_bytes / (l2_rate * family["load"])
    stored = tile_m * tile_n * np.where(parts > 1, _SUM_BYTES, out_bytes)
    inner_s = _limit(arithmetic_s, slower * loads_s)
    store_s = stored / (l2_rate * family["store"])
    # All of them, in waves. A persistent kernel stores a tile while it computes the next one.
    waves = np.ceil(batch * np.ceil(m / tile_m) * np.ceil(n / tile_n) * parts / gpu.sm_count)
    if figures()["tiles"][family["tiles"]]["persistent"]:
        tiles_s = waves * (_limit(inner_s, store_s) + family["tile_s"]) + np.minimum(inner_s, store_s)
    else:
        tiles_s = waves * (inner_s + store_s + family["tile_s"])
    # What does not fit the cache comes from memory.
    moved = _moved(shape, element_bytes, out_bytes)
    # Bytes that the previous kernel left in the cache.
    kept = moved / (1 + (moved / (gpu.l2_bytes * family["cache"])) ** 4)
    memory_s = (moved - kept) / (gpu.bandwidth_bytes_per_s * family["dram"])
    whole_s = family["start_s"] + _limit(tiles_s, np.asarray(memory_s))
    # A separate kernel sums the parts.
    summed = batch * m * n * (_SUM_BYTES * parts + out_bytes)
    joined_s = family["join_s"] + summed / (gpu.bandwidth_bytes_per_s * family["join"])
    return np.min(np.where(parts > 1, whole_s + joined_s, whole_s), axis=-1)


def _has_many_tiles(shape: Any, gpu: Gpu) -> Any:
    batch, m, n, _ = shape
    return batch * m * n > _MANY_WAVES * gpu.sm_count * _LARGE_TILE


def _moved(shape: tuple[Any, ...], element_bytes: int, out_bytes: int) -> Any:
    batch, m, n, k = shape
    return batch * ((m + n) * k * element_bytes + m * n * out_bytes)


def _limit(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a smooth maximum: the 8-norm, by squares and roots for speed."""
    high = np.maximum(one, other)
    square = (np.minimum(one, other) / high) ** 2
    fourth = square * square
    whole: NDArray[np.float64] = high * np.sqrt(np.sqrt(np.sqrt(1 + fourth * fourth)))
    return whole


@cache
def _candidates(name: str, whole: bool) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return rows, columns and split-K factors of the candidates; no split-K with many tiles."""
    table = figures()["tiles"][name]
    found = [(m, n, parts) for m, n in table["shapes"] for parts in ([1] if whole else table["parts"])]
    rows, columns, parts = (np.array(column, dtype=np.float64) for column in zip(*found, strict=True))
    return rows, columns, parts
