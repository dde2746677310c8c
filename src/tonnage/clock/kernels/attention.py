"""The time of fused attention: blocks of scores over the SMs, forward and backward.

An SM takes a block of rows of one head and loops over blocks of columns: two products per block in the forward, five in
the backward, with an exponential per score between them. A causal mask skips the blocks above the diagonal. A launch
has the shape (batch, heads, key heads, rows, columns, width, value width); its variant lists the library, the direction
and options: "cudnn forward causal bias dropout". Head widths are padded to the next power of two. Packed sequences are
modelled as sequences of equal length.
"""

from functools import lru_cache
from math import ceil, prod
from typing import Any

from tonnage.clock.kernels.figures import arithmetic, careful, figures, older_share, peak, share_of_peak
from tonnage.clock.launch import Launch, Settings
from tonnage.clock.operators import OperatorCall
from tonnage.hardware.gpu import Gpu

_CAUSAL = ("True", "1", "2")
_EXPONENTIALS_PER_CLOCK = 16  # of an SM's special function units
_LEAST_WIDTH, _MOST_WIDTH = 64, 128
_SUM_BYTES = 4  # per element while gradients of the query are summed
_PRODUCTS = {"forward": 2, "backward": 5}


def _read(call: OperatorCall, settings: Settings) -> Launch | None:
    table = figures()["attention_operators"][call.name]
    at: int = table["query"]
    precision = arithmetic(call, at, tf32=False)
    query, key, value = (call.shapes[at + offset] for offset in range(3))
    starts = call.shapes[table["lengths"]] if table.get("lengths", len(call.shapes)) < len(call.shapes) else ()
    if starts:  # packed: one long sequence, whose heads come before the width
        batch, heads, key_heads = max(1, starts[0] - 1), query[-2], key[-2]
        rows, columns = ceil(prod(query[:-2]) / batch), ceil(prod(key[:-2]) / batch)
    elif len(query) == 4:
        at_heads, at_length = table["heads"], 3 - table["heads"]
        batch, heads, key_heads = query[0], query[at_heads], key[at_heads]
        rows, columns = query[at_length], key[at_length]
    else:
        return None
    width, value_width = query[-1], value[-1]
    sizes = (batch, heads, key_heads, rows, columns, width, value_width)
    if precision is None or not prod(sizes):
        return None
    direction = "backward" if at else "forward"
    causal = call.value(table["causal"]) in _CAUSAL
    bias = "bias" in table and table["bias"] < len(call.shapes) and bool(call.shapes[table["bias"]])
    dropout = call.value(table["dropout"]) not in ("", "0", "0.0", "0.", "False")
    options = [word for word, is_on in (("causal", causal), ("bias", bias), ("dropout", dropout)) if is_on]
    above_diagonal = rows * (rows - 1) / 2 if columns >= rows else rows * columns - columns * (columns + 1) / 2
    pairs = rows * columns - (above_diagonal if causal else 0)
    # The forward reads three tensors and writes one; the backward reads five and writes three.
    one_way = batch * (heads * rows * (width + value_width) + key_heads * columns * (width + value_width))
    return Launch(
        kind="attention", name=call.name, shape=sizes, precision=precision,
        moved_bytes=float(one_way * call.element_bytes(at) * (2 if at else 1)),
        operations=float(_PRODUCTS[direction] * batch * heads * pairs * (width + value_width)),
        variant=" ".join([table["library"], direction, *options]),
        kernels=1 if not at else 4 + 2 * (heads != key_heads),
    )  # fmt: skip


OPERATORS = careful(dict.fromkeys(figures()["attention_operators"], _read))


@lru_cache(maxsize=1 << 16)
def seconds(launch: Launch, gpu: Gpu) -> float:
    """Return the seconds of the kernel and of the small ones around it."""
    family = figures()["attention"][family_of(launch)]
    batch, heads, key_heads, rows, columns, width, value_width = launch.shape
    element_bytes: int = figures()["element_bytes"][launch.precision]
    bandwidth = gpu.bandwidth_bytes_per_s
    query, keys = batch * heads * rows * width, batch * heads * columns * (width + value_width)
    backward = "backward" in launch.variant
    moved = 4 * query + 2 * keys if backward else 2 * query + keys * key_heads / heads
    memory_s = moved * element_bytes / (bandwidth * family["dram"])
    whole_s: float = family["start_s"] + (_busy_s(launch, gpu, family) ** 4 + memory_s**4) ** 0.25
    if not backward:
        return whole_s
    # Around the backward: row sums of the output, casts of the query's gradients, sums over shared heads.
    side: float = query * (3 * element_bytes + 2 * _SUM_BYTES)
    if heads != key_heads:
        side += keys * element_bytes * (1 + key_heads / heads)
    return float(whole_s + side / (bandwidth * family["side"]) + family["side_s"] * (launch.kernels - 1))


modelled = seconds.__wrapped__  # without the cache


def _busy_s(launch: Launch, gpu: Gpu, family: dict[str, Any]) -> float:
    """Return the seconds until the last SM is done."""
    _, direction, *options = launch.variant.split()
    batch, heads, _, rows, columns, width, value_width = launch.shape
    # One block of scores on one SM.
    precision = "tf32" if launch.precision == "fp32" else launch.precision
    share = family["mac"] * (older_share(gpu) if family["older"] else 1.0)
    rate = peak(gpu, precision) / gpu.sm_count * share_of_peak(gpu, precision, share)
    slower = family["wide"] if max(width, value_width) > _MOST_WIDTH else 1.0
    products_s = _PRODUCTS[direction] * (_padded(width) + _padded(value_width)) * slower / rate
    shares = sum(1 / family[word] for word in ("exp", *options) if word != "causal")
    exponentials_s = shares / (_EXPONENTIALS_PER_CLOCK * gpu.clock_mhz * 1e6)
    block_s = family["rows"] * family["columns"] * (products_s + exponentials_s)
    # All of them; the SM with the longest row of blocks ends last.
    blocks, most = _blocks(rows, columns, family["rows"], family["columns"], "causal" in options)
    longest_s = most * block_s + family["block_s"]
    row_blocks = ceil(rows / family["rows"])
    shared_s = batch * heads * (blocks * block_s + row_blocks * family["block_s"]) / gpu.sm_count
    return float(max(longest_s, shared_s + family["tail"] * longest_s))


def family_of(launch: Launch) -> str:
    """Return the name of the fitted figures."""
    library, direction, *_ = launch.variant.split()
    wide = "-fp32" if launch.precision == "fp32" and library == "efficient" else ""
    return f"{library}{wide}-{direction}"


def _padded(width: int) -> int:
    return max(_LEAST_WIDTH, 1 << (width - 1).bit_length())


@lru_cache(maxsize=1 << 12)
def _blocks(rows: int, columns: int, high: int, wide: int, causal: bool) -> tuple[int, int]:
    """Return the score blocks to compute for one head, and the most that one block of rows has."""
    count = ceil(rows / high)
    if not causal:
        return count * ceil(columns / wide), ceil(columns / wide)
    each = [ceil(min(columns, (place + 1) * high) / wide) for place in range(count)]
    return sum(each), max(each)
