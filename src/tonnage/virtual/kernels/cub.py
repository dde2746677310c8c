"""The temporary storage of CUB's device-wide algorithms, in bytes.

Each function names its algorithm. Sizes follow from the number of items, the bytes of each and the card; the items
per tile come from `data/cub.toml`. This module uses neither tensors nor PyTorch.
"""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from tonnage.hardware import Gpu
from tonnage.virtual.session import active

ALIGNMENT = 256
WARP = 32
SUBSCRIPTION_FACTOR = 5
SHARED_MEMORY_PER_BLOCK = 48 << 10
ONESWEEP_RADIX_BITS = 8
ONESWEEP_LARGEST_PORTION = (1 << 28) - 1
SINGLE_TILE_THREADS, SINGLE_TILE_ITEMS = 256, 19
REDUCE_THREADS, REDUCE_ITEMS = 256, 16
MERGE_SORT_THREADS, MERGE_SORT_ITEMS = 256, 17


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads((files("tonnage.virtual") / "data" / "cub.toml").read_text())


def _gpu() -> Gpu:
    return active().device.gpu


def _tile(table: str, item_bytes: int) -> int:
    rows = _tables()[table]
    capability = _gpu().compute_capability
    row = rows["sm_90"] if capability >= (9, 0) else rows["sm_80"] if capability == (8, 0) else rows["default"]
    return int(row.get(str(item_bytes), row["8"] * 8 // max(item_bytes, 8)))


def blob(*sizes: int) -> int:
    """Return the size of one allocation for all of these, each aligned."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes) + ALIGNMENT - 1


def _tile_states(tiles: int, value_bytes: int, primitive: bool) -> int:
    """Return the bytes of the tile descriptors of a single-pass scan: value and status in one word, or in three arrays."""
    states = tiles + WARP
    if primitive:
        return blob(states * {1: 4, 2: 4, 4: 8, 8: 16}[value_bytes], 0, 0)
    return blob(states * 4, states * value_bytes, states * value_bytes)


def memory_bound_tile(threads: int, nominal_items: int, item_bytes: int) -> int:
    """Return the items of a tile of a memory-bound kernel."""
    return _block_items(threads, max(1, min(nominal_items * 4 // item_bytes, nominal_items * 2)), item_bytes)


def register_bound_tile(threads: int, nominal_items: int, item_bytes: int) -> int:
    """Return the items of a tile of a register-bound kernel."""
    return _block_items(threads, max(1, nominal_items * 4 // max(4, item_bytes)), item_bytes)


def _block_items(threads: int, items: int, item_bytes: int) -> int:
    """Return the items of a block of as many threads, in whole warps, as shared memory has room for."""
    return items * min(threads, -(-(SHARED_MEMORY_PER_BLOCK // (item_bytes * items)) // WARP) * WARP)


def scan_bytes(count: int, item_bytes: int, *, primitive: bool = True, plus: bool = False) -> int:
    """Return the storage of DeviceScan; `plus` means cuda::std::plus, which has its own tunings."""
    tile = _tile("scan_plus", item_bytes) if plus else memory_bound_tile(128, 15, item_bytes)
    return blob(_tile_states(-(-count // tile), item_bytes, primitive))


def scan_by_key_bytes(count: int, key_bytes: int) -> int:
    """Return the storage of DeviceScan::InclusiveSumByKey for int-sized values."""
    tile = 288 * 14 if _gpu().compute_capability >= (9, 0) else 256 * 9
    tiles = -(-count // tile)
    return blob((tiles + WARP) * 16, key_bytes * (tiles + 1))


def reduce_bytes(count: int, item_bytes: int) -> int:
    """Return the storage of DeviceReduce."""
    if count <= memory_bound_tile(REDUCE_THREADS, REDUCE_ITEMS, item_bytes):
        return 1
    gpu = _gpu()
    return blob(gpu.max_threads_per_sm // REDUCE_THREADS * gpu.sm_count * SUBSCRIPTION_FACTOR * item_bytes)


def select_flagged_bytes(count: int, item_bytes: int) -> int:
    """Return the storage of DeviceSelect::Flagged."""
    return blob(_tile_states(-(-count // _tile("select_flagged", item_bytes)), 4, True), 0, 0)


def select_unique_bytes(count: int, item_bytes: int, *, primitive: bool = True) -> int:
    """Return the storage of DeviceSelect::Unique."""
    tile = _tile("select_unique", item_bytes) if primitive else 128 * max(1, min(40 // item_bytes, 10))
    return blob(_tile_states(-(-count // tile), 4, True), 0, 0)


def unique_by_key_bytes(count: int, key_bytes: int) -> int:
    """Return the storage of DeviceSelect::UniqueByKey for ints by keys of this size; PyTorch counts in 64 bits."""
    tile = _tile("unique_by_key", key_bytes)
    return blob(_tile_states(-(-count // tile), 8, True), 0)


def merge_sort_bytes(count: int, key_bytes: int, value_bytes: int) -> int:
    """Return the storage of DeviceMergeSort for pairs, which Thrust uses for custom comparisons."""
    tiles = -(-count // (MERGE_SORT_THREADS * max(1, min(MERGE_SORT_ITEMS * 4 // key_bytes, MERGE_SORT_ITEMS))))
    return blob((tiles + 1) * 4, count * key_bytes, count * value_bytes, 0)


def run_length_bytes(count: int) -> int:
    """Return the storage of DeviceRunLengthEncode::Encode with 8-byte lengths."""
    return blob((-(-count // (128 * 6)) + WARP) * 16)


def radix_sort_bytes(
    count: int, key_bytes: int, value_bytes: int = 0, bits: int | None = None, *, floating: bool = False
) -> int:
    """Return the storage of DeviceRadixSort for keys or pairs; PyTorch counts in 64 bits."""
    largest = max(key_bytes, value_bytes)
    if count <= register_bound_tile(SINGLE_TILE_THREADS, SINGLE_TILE_ITEMS, largest):
        return 1
    is_older = _gpu().compute_capability < (9, 0)
    if key_bytes < 4 and is_older:
        # Upsweep and downsweep passes; assumes that two downsweep blocks of 512 threads fit on an SM.
        digits = 1 << (7 if key_bytes > 1 else 5)
        spine = 2 * _gpu().sm_count * SUBSCRIPTION_FACTOR * digits + memory_bound_tile(512, 23, 8)
        return blob(spine * 8, count * key_bytes, count * value_bytes)
    # The tile of the onesweep kernel
    threads = 384
    if is_older:
        items = 17 if key_bytes == 4 and value_bytes else 21
    elif key_bytes < 4:
        threads, items = _tables()["onesweep_small_key"]["sm_90"][str(key_bytes)].get(str(value_bytes), (384, 23))
    elif key_bytes == 4:
        items = 19 - floating if not value_bytes else 17 if value_bytes < 8 else 29
    else:
        items = 30 if value_bytes < 8 else 24
    tile = register_bound_tile(threads, items, largest)
    passes = -(-(key_bytes * 8 if bits is None else bits) // ONESWEEP_RADIX_BITS)
    portion = ONESWEEP_LARGEST_PORTION // tile * tile
    portions = -(-count // portion)
    digits = 1 << ONESWEEP_RADIX_BITS
    extra = count if passes > 1 else 0
    lookback = -(-min(count, portion) // tile) * digits * 4
    return blob(portions * passes * digits * 8, lookback, extra * key_bytes, extra * value_bytes, portions * passes * 4)


def segmented_sort_bytes(count: int, key_bytes: int, value_bytes: int) -> int:
    """Return the storage of DeviceSegmentedRadixSort for pairs."""
    return blob(count * key_bytes, count * value_bytes)
