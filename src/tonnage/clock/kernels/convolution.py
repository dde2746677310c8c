"""The time of convolutions: implicit matrix products, forward and backward.

A launch has the shape (batch, in channels, out channels, groups, pixels in, pixels out, pixels of the kernel) of the
plain convolution; its variant names the layout and the passes: "nhwc forward", "nchw input weight". A transposed
convolution is the plain one's gradient of the input. NCHW tensors are converted to NHWC and back around each pass on
tensor cores. Depthwise convolutions run on the FP32 lanes.
"""

from dataclasses import replace
from functools import lru_cache
from math import ceil, inf, prod
from typing import Any

from tonnage.clock.kernels import matmul
from tonnage.clock.kernels.figures import arithmetic, careful, figures, on_card, peak
from tonnage.clock.kernels.matmul import tiled
from tonnage.clock.launch import Launch, Settings
from tonnage.clock.operators import OperatorCall
from tonnage.hardware.gpu import Gpu

_ALIGNED_BYTES = 16
_TOGETHER = (1, 2, 4, 8, 16)
_SMALL_KERNEL = 9  # pixels
_PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16")
_NO_SPLIT = {"join_s": 0.0, "join": 1.0}
_OPTIONS = ("padding", "stride", "dilation", "output_padding")


def _read(call: OperatorCall, settings: Settings) -> Launch | None:
    table = figures()["convolution_operators"][call.name]
    at: int = table["input"]
    image, weight = call.shapes[at], call.shapes[at + 1]
    precision = arithmetic(call, at, settings.tf32_convolution)
    transposed = call.name.endswith("transpose") or call.value(table.get("transposed", len(call.values))) == "True"
    result = call.shapes[0] if at else _result(call, table, transposed)
    forward, gradient = ("input", "forward") if transposed else ("forward", "input")
    mask = call.value(table["mask"]).split(",")[:2] if "mask" in table else []
    wanted = ["True" in word or word.strip("[] ") == "1" for word in mask]
    passes = [name for name, is_on in zip((gradient, "weight"), wanted, strict=True) if is_on] if mask else [forward]
    empty = not passes or not prod(image) or not prod(weight)
    if precision not in _PRECISIONS or empty or len(result) != len(image):
        return None
    # Of the plain convolution: a transposed one has its ends swapped.
    first, last = (result, image) if transposed else (image, result)
    groups = first[1] // weight[1]
    shape = first[0], first[1], last[1], groups, prod(first[2:]), prod(last[2:]), prod(weight[2:])
    strides: tuple[int, ...] = call.strides[at] if at < len(call.strides) else ()
    layout = "nhwc" if len(strides) > 1 and strides[1] == 1 and image[1] > 1 else "nchw"
    once = (prod(image) + prod(result) + prod(weight)) * call.element_bytes(at)
    return Launch(
        kind="convolution", name=call.name, shape=shape, precision=precision, moved_bytes=float(once * len(passes)),
        operations=2.0 * len(passes) * _macs(shape), variant=" ".join([layout, *passes]), kernels=len(passes),
    )  # fmt: skip


def _result(call: OperatorCall, table: dict[str, Any], transposed: bool) -> tuple[int, ...]:
    """Return the shape of a forward's result, from the options that the trace holds as text."""
    image, weight = call.shapes[table["input"]], call.shapes[table["input"] + 1]
    space = len(image) - 2
    options = (call.value(table[word]) if word in table else "0" for word in _OPTIONS)
    padding, stride, dilation, extra = (
        numbers * space if len(numbers) == 1 else numbers
        for numbers in ([int(word) for word in text.strip("[]()").split(",") if word.strip()] for text in options)
    )
    spans = [hole * (size - 1) for hole, size in zip(dilation, weight[2:], strict=True)]
    axes = zip(image[2:], stride, padding, spans, extra, strict=True)
    if transposed:
        pixels = [(side - 1) * step - 2 * pad + span + more + 1 for side, step, pad, span, more in axes]
        return (image[0], weight[1] * int(call.value(table["groups"])), *pixels)
    return (image[0], weight[0], *((side + 2 * pad - span - 1) // step + 1 for side, step, pad, span, _ in axes))


def _macs(shape: tuple[int, ...]) -> float:
    batch, channels, out_channels, groups, _, out_pixels, kernel_pixels = shape
    return float(batch * out_pixels * out_channels * channels // groups * kernel_pixels)


OPERATORS = careful(dict.fromkeys(figures()["convolution_operators"], _read))


@lru_cache(maxsize=1 << 16)
def seconds(launch: Launch, gpu: Gpu) -> float:
    """Return the seconds of all passes, with the layout conversions around them."""
    launch = on_card(launch, gpu)
    layout, *passes = launch.variant.split()
    one = {"depthwise": _depthwise, "pointwise": _pointwise}.get(_sort(launch), _gathered)
    return sum(one(launch, gpu, layout, name) for name in passes)


modelled = seconds.__wrapped__  # without the cache


def _sort(launch: Launch) -> str:
    _, channels, _, groups, pixels, out_pixels, kernel_pixels = launch.shape
    if groups == channels and groups > 1:
        return "depthwise"
    plain = kernel_pixels == 1 and pixels == out_pixels and groups == 1
    return "pointwise" if plain and launch.precision != "fp32" else "gathered"


def families_of(launch: Launch) -> list[str]:
    """Return the names of the fitted figures, one per pass."""
    layout, *passes = launch.variant.split()
    sort = _sort(launch)
    first = f"depthwise-{layout}" if sort == "depthwise" else figures()["family"][launch.precision]
    return [f"{first}-{name}" for name in passes] if sort != "pointwise" else []


def _depthwise(launch: Launch, gpu: Gpu, layout: str, name: str) -> float:
    family = figures()["convolution"][f"depthwise-{layout}-{name}"]
    batch, channels, out_channels, _, pixels, out_pixels, kernel_pixels = launch.shape
    moved = batch * (channels * pixels + out_channels * out_pixels) * figures()["element_bytes"][launch.precision]
    memory_s = moved / (gpu.bandwidth_bytes_per_s * family["dram"])
    lanes_s = 2 * _macs(launch.shape) / (peak(gpu, "fp32") * family["taps"])
    if launch.precision in ("bf16", "fp16"):
        lanes_s *= family["half"]
    # The weight's gradient has a thread block for each of its elements.
    blocks_s = channels * kernel_pixels / gpu.sm_count * family.get("block_s", 0.0)
    return float(family["start_s"] + blocks_s + (memory_s**4 + lanes_s**4) ** 0.25)


def _gathered(launch: Launch, gpu: Gpu, layout: str, name: str) -> float:
    family = figures()["convolution"][f"{figures()['family'][launch.precision]}-{name}"]
    element_bytes: int = figures()["element_bytes"][launch.precision]
    batch, channels, out_channels, groups, pixels, out_pixels, kernel_pixels = launch.shape
    # Channels are padded to the width of a load.
    unit = _ALIGNED_BYTES // element_bytes
    slower = family["odd_in"] if channels % unit else 1.0
    slower *= family["odd_out"] if out_channels % unit else 1.0
    slower *= family["strided"] if kernel_pixels > _SMALL_KERNEL and pixels > out_pixels else 1.0
    whole_s = inf
    # Small groups share a tile, padded with zeros, if that is faster.
    for together in (count for count in _TOGETHER if groups % count == 0):
        apart = groups // together
        into, out = (ceil(count / apart / unit) * unit for count in (channels, out_channels))
        products = {
            "forward": (apart, batch * out_pixels, out, into * kernel_pixels),
            "input": (apart, batch * pixels, into, max(1, out * kernel_pixels * out_pixels // pixels)),
            "weight": (apart, out, into * kernel_pixels, batch * out_pixels),
        }
        made_s = tiled(_NO_SPLIT | family, products[name], gpu, launch.precision, element_bytes, element_bytes, slower)
        whole_s = min(whole_s, float(made_s))
    if layout == "nchw" and "convert" in family:
        weights = channels * out_channels // groups * kernel_pixels
        turned = batch * (channels * pixels + out_channels * out_pixels) + weights
        converted_s = 2 * element_bytes * turned / (gpu.bandwidth_bytes_per_s * family["convert"])
        whole_s += 3 * family["convert_s"] + converted_s
    return whole_s


def _pointwise(launch: Launch, gpu: Gpu, layout: str, name: str) -> float:
    """Time a 1×1 kernel, a plain product on tensor cores; in NCHW one per image with its pixels as rows."""
    batch, channels, out_channels, _, pixels, _, _ = launch.shape
    last = layout == "nhwc" or pixels == 1  # channels are last
    rows, inner = (channels, out_channels) if name == "input" else (out_channels, channels)
    if name == "weight":
        shape, letters, row = (1, out_channels, channels, batch * pixels), "nt", min(channels, out_channels)
    elif last:
        shape, letters, row = (1, batch * pixels, rows, inner), "nn" if name == "input" else "tn", rows
    else:
        shape, letters, row = (batch, rows, pixels, inner), "nn", pixels
    row_bytes = (row if last else pixels) * figures()["element_bytes"][launch.precision]
    aligned = next(size for size in (_ALIGNED_BYTES, 8, 4, 2, 1) if not row_bytes % size)
    return float(matmul.modelled(replace(launch, kind="matmul", shape=shape, variant=f"{letters}-{aligned}"), gpu))
