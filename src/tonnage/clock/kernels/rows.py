"""Kernels with a block per row or channel: norms, softmax and losses, forward and backward.

Their forms are those of `memory`, with rows (or channels) as blocks. PyTorch selects the kernel by the length of a row.
"""

from dataclasses import replace
from functools import partial
from math import ceil, prod
from typing import Any

from tonnage.clock.kernels import memory
from tonnage.clock.kernels.figures import careful
from tonnage.clock.kernels.memory import cycle_seconds, figures, launch, memory_seconds, slowest
from tonnage.clock.launch import Launch, Settings
from tonnage.clock.operators import OperatorCall, Shape
from tonnage.hardware.gpu import Gpu

# Softmax rows that fit a warp, the registers or the shared memory of a block.
_WARP_COLUMNS, _REGISTER_COLUMNS, _SHARED_BYTES = 1024, 9216, 46 << 10
_MANY_ROWS = 64 << 10  # from here on, gradients of a norm's weight are summed in parts
_WEIGHT = "norm_weight"
_WEIGHT_COLUMNS = 32  # per block that sums gradients of a norm's weight


def seconds(launch: Launch, gpu: Gpu) -> Any:
    """Return the device time of a launch of this module."""
    if not launch.variant.endswith(_WEIGHT):
        return memory.seconds(launch, gpu)
    rest = launch.variant.removesuffix(_WEIGHT).removesuffix("+")
    rest_s = memory.seconds(replace(launch, variant=rest, kernels=1), gpu) if rest else 0.0
    # A norm's weight gradient: blocks of columns loop over all rows, unless rows are many and columns few.
    elements, rows = launch.shape
    columns, form = elements // max(rows, 1), figures()[_WEIGHT]  # a rank's part of a short sequence may be empty
    weight_s = memory_seconds(launch.moved_bytes * form["passes"], form["share"], gpu)
    if rows <= _MANY_ROWS or columns / _WEIGHT_COLUMNS >= gpu.sm_count / 2:
        waves = max(1.0, ceil(columns / _WEIGHT_COLUMNS) / gpu.sm_count)
        weight_s = slowest(weight_s, cycle_seconds(form["serial"] * rows * waves, gpu))
    return float(form["floor_s"] + weight_s) + rest_s


def _layer_norm(call: OperatorCall, settings: Settings) -> Launch | None:
    elements, columns, each = prod(call.shapes[0]), _normalized(call, 1), call.element_bytes(0)
    plain = columns % 4 != 0
    family = "rms_norm" if "rms" in call.name else "layer_norm"
    return launch(
        "norm", call, moved=2.0 * elements * each, elements=elements, blocks=elements // columns,
        variant="layer_norm_plain" if plain else f"{family}{_width(each)}", kernels=1 + plain,
    )  # fmt: skip


def _layer_norm_backward(call: OperatorCall, settings: Settings) -> Launch | None:
    elements, columns, each = prod(call.shapes[0]), _normalized(call, 2), call.element_bytes(0)
    weighted = any(call.shapes[at] == (columns,) for at in range(5, min(7, len(call.shapes)))) or "rms" in call.name
    how = _width(each) if columns % 4 == 0 else "_plain"
    return launch(
        "norm", call, moved=3.0 * elements * each, elements=elements, blocks=elements // columns,
        variant=f"layer_norm_backward{how}" + f"+{_WEIGHT}" * weighted, kernels=1 + weighted,
    )  # fmt: skip


def _normalized(call: OperatorCall, at: int) -> int:
    """Return the columns: the weight's size, else the last axis."""
    weights = [shape for shape in call.shapes[at + 1 :] if len(shape) == 1 and shape == call.shapes[0][-1:]]
    return int(weights[0][0]) if weights else int(call.shapes[0][-1])


def _batch_norm(call: OperatorCall, settings: Settings, *, at: int, passes: float, name: str) -> Launch | None:
    shape = call.shapes[at]
    elements, channels = prod(shape), shape[1]
    if "backward" not in name and call.value(5) == "False":  # with running statistics: one pass
        moved, accesses = 2.0 * elements * call.element_bytes(at), 2.0 * elements
        return launch("norm", call, moved=moved, elements=elements, accesses=accesses, variant="vector", kernels=1)
    # Kernels for channels-last: PyTorch's own are for rows of channels only.
    strides: Shape = call.strides[at] if at < len(call.strides) else ()
    rows = prod(shape[2:]) == 1
    last = not name.startswith("cudnn") if rows else bool(strides) and strides[1] == 1
    last = last or any("channels_last" in one or "NHWC" in one for one in call.kernels)
    moved = passes * elements * call.element_bytes(at)
    variant = "+".join(f"{form}_last" if last else form for form in name.split("+"))
    kernels = 3 if "+" in name else 1
    planes = float(shape[0] * channels)  # each starts anew, which matters if they are small
    return launch(
        "norm", call, moved=moved, elements=elements, blocks=channels, accesses=planes, variant=variant,
        kernels=kernels,
    )  # fmt: skip


def _group_norm(call: OperatorCall, settings: Settings, *, backward: bool) -> Launch | None:
    """Read native_group_norm(input, weight, bias, …, groups, eps): group sums, then an elementwise kernel."""
    shape, each = call.shapes[0], call.element_bytes(0)
    blocks = prod(shape[:2]) if backward else shape[0] * int(call.value(6) or 32)
    variant = "group_norm_gradients+group_norm_backward" if backward else "group_norm_moments+group_norm"
    return launch(
        "norm", call, moved=prod(shape) * each * (2.0 + backward), elements=prod(shape), blocks=blocks, variant=variant,
        kernels=3 + backward,
    )  # fmt: skip


def _softmax(call: OperatorCall, settings: Settings, *, backward: bool) -> Launch | None:
    shape, each = call.shapes[0], call.element_bytes(0)
    elements, columns = prod(shape), shape[-1] if shape else 1
    if not elements:
        return None
    variant = softmax_form(columns, each, backward=backward)
    # Backward, two tensors are read and one written.
    moved = elements * float(3 * each if backward else each + (4 if call.value(2) == "True" else each))
    blocks = ceil(elements / columns / (8 if "warp" in variant else 1))
    return launch("norm", call, moved=moved, elements=elements, blocks=blocks, variant=variant)


def softmax_form(columns: int, each: int, *, backward: bool = False) -> str:
    """Return PyTorch's softmax kernel, by where a row of elements of that size fits."""
    name = "softmax_backward" if backward else "softmax"
    if columns <= _WARP_COLUMNS:
        name += "_warp"
    elif columns <= _REGISTER_COLUMNS and not backward:
        name += "_registers"
    elif columns * each <= _SHARED_BYTES and columns * each % 16 == 0:
        name += "_shared"
    return f"{name}{_width(each)}"


def _width(each: int) -> str:
    return "_narrow" if each < 4 else "_wide"


def _nll_loss(call: OperatorCall, settings: Settings, *, at: int, variant: str) -> Launch | None:
    """Read nll_loss: one block loops over all rows, and each row costs a sector."""
    rows = call.shapes[at][0] if len(call.shapes[at]) > 1 else 1
    return launch("loss", call, moved=rows * 40.0, elements=rows, blocks=1, variant=variant)


OPERATORS = careful(
    {
        **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _layer_norm),
        **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), _layer_norm_backward),
        **dict.fromkeys(
            ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"),
            partial(_batch_norm, at=0, passes=2.0, name="batch_norm_statistics+batch_norm"),
        ),
        "native_batch_norm_backward": partial(_batch_norm, at=1, passes=5.0, name="batch_norm_backward"),
        "cudnn_batch_norm": partial(_batch_norm, at=0, passes=3.0, name="cudnn_batch_norm"),
        "cudnn_batch_norm_backward": partial(_batch_norm, at=0, passes=5.0, name="cudnn_batch_norm_backward"),
        "native_group_norm": partial(_group_norm, backward=False),
        "native_group_norm_backward": partial(_group_norm, backward=True),
        **dict.fromkeys(("_softmax", "_log_softmax"), partial(_softmax, backward=False)),
        **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), partial(_softmax, backward=True)),
        **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), partial(_nll_loss, at=0, variant="nll_loss")),
        **dict.fromkeys(
            ("nll_loss_backward", "nll_loss2d_backward"), partial(_nll_loss, at=1, variant="nll_loss_backward")
        ),
    }
)
