"""Kernels with a block per row or channel: norms, softmax and losses, forward and backward.

Their forms are those of `memory`, with rows (or channels) as blocks. PyTorch selects the kernel by the length of a row.
"""

from dataclasses import replace
from math import ceil, prod
from typing import Any

from tonnage.clock.kernels import memory
from tonnage.clock.kernels.memory import Reader, careful, cycle_seconds, figures, launch, memory_seconds, slowest
from tonnage.clock.launch import Launch
from tonnage.clock.operators import OperatorCall, Shape
from tonnage.clock.settings import Settings
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
    alone = replace(launch, variant=rest, kernels=1)
    return _weight_seconds(launch, gpu) + (memory.seconds(alone, gpu) if rest else 0.0)


def _weight_seconds(launch: Launch, gpu: Gpu) -> float:
    """Time a norm's weight gradient: blocks of columns loop over all rows, unless rows are many and columns few."""
    elements, rows = launch.shape
    columns, form = elements // max(rows, 1), figures()[_WEIGHT]  # a rank's part of a short sequence may be empty
    moved_s = memory_seconds(launch.moved_bytes * form["passes"], form["share"], gpu)
    if rows > _MANY_ROWS and columns / _WEIGHT_COLUMNS < gpu.sm_count / 2:
        return float(form["floor_s"] + moved_s)
    waves = max(1.0, ceil(columns / _WEIGHT_COLUMNS) / gpu.sm_count)
    return float(form["floor_s"] + slowest(moved_s, cycle_seconds(form["serial"] * rows * waves, gpu)))


# ── norms ──


def _layer_norm(call: OperatorCall, settings: Settings) -> Launch | None:
    elements, columns = prod(call.shapes[0]), _normalized(call, 1)
    rows, moved = elements // columns, 2.0 * elements * call.element_bytes(0)
    family = "rms_norm" if "rms" in call.name else "layer_norm"
    variant = f"{family}{_width(call.element_bytes(0))}" if columns % 4 == 0 else "layer_norm_plain"
    return launch(
        "norm", call, moved=moved, elements=elements, blocks=rows, variant=variant, kernels=1 if columns % 4 == 0 else 2
    )


def _layer_norm_backward(call: OperatorCall, settings: Settings) -> Launch | None:
    elements, columns = prod(call.shapes[0]), _normalized(call, 2)
    weighted = any(call.shapes[at] == (columns,) for at in range(5, min(7, len(call.shapes)))) or "rms" in call.name
    how = _width(call.element_bytes(0)) if columns % 4 == 0 else "_plain"
    variant = f"layer_norm_backward{how}" + (f"+{_WEIGHT}" if weighted else "")
    moved = 3.0 * elements * call.element_bytes(0)
    return launch(
        "norm",
        call,
        moved=moved,
        elements=elements,
        blocks=elements // columns,
        variant=variant,
        kernels=2 if weighted else 1,
    )


def _normalized(call: OperatorCall, at: int) -> int:
    """Return the columns: the weight's size, else the last axis."""
    weights = [shape for shape in call.shapes[at + 1 :] if len(shape) == 1 and shape == call.shapes[0][-1:]]
    return int(weights[0][0]) if weights else int(call.shapes[0][-1])


def _batch_norm(at: int, passes: float, name: str) -> Reader:
    def made(call: OperatorCall, settings: Settings) -> Launch | None:
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

    return made


def _group_norm(call: OperatorCall, settings: Settings) -> Launch | None:
    """Read native_group_norm(input, weight, bias, …, groups, eps): moments of groups, then an elementwise kernel."""
    elements, groups = prod(call.shapes[0]), int(call.value(6) or 32)
    moved = elements * call.element_bytes(0) * 2.0
    blocks = call.shapes[0][0] * groups
    return launch(
        "norm", call, moved=moved, elements=elements, blocks=blocks, variant="group_norm_moments+group_norm", kernels=3
    )


def _group_norm_backward(call: OperatorCall, settings: Settings) -> Launch | None:
    elements = prod(call.shapes[0])
    moved, blocks = elements * call.element_bytes(0) * 3.0, prod(call.shapes[0][:2])
    variant = "group_norm_gradients+group_norm_backward"
    return launch("norm", call, moved=moved, elements=elements, blocks=blocks, variant=variant, kernels=4)


# ── softmax and losses ──


def _softmax(call: OperatorCall, settings: Settings) -> Launch | None:
    shape = call.shapes[0]
    elements, columns, each = prod(shape), shape[-1] if shape else 1, call.element_bytes(0)
    written = 4 if call.value(2) == "True" else each
    return _rows(call, elements, columns, elements * float(each + written), softmax_form(columns, each))


def _softmax_backward(call: OperatorCall, settings: Settings) -> Launch | None:
    shape = call.shapes[0]
    elements, columns, each = prod(shape), shape[-1] if shape else 1, call.element_bytes(0)
    return _rows(call, elements, columns, 3.0 * elements * each, softmax_form(columns, each, backward=True))


def softmax_form(columns: int, each: int, *, backward: bool = False) -> str:
    """Return PyTorch's softmax kernel, by where a row of elements of that size fits."""
    name, shared = (
        "softmax_backward" if backward else "softmax",
        columns * each <= _SHARED_BYTES and columns * each % 16 == 0,
    )
    if columns <= _WARP_COLUMNS:
        name += "_warp"
    elif columns <= _REGISTER_COLUMNS and not backward:
        name += "_registers"
    elif shared:
        name += "_shared"
    return f"{name}{_width(each)}"


def _rows(call: OperatorCall, elements: int, columns: int, moved: float, variant: str) -> Launch | None:
    if not elements:
        return None
    blocks = ceil(elements / columns / (8 if "warp" in variant else 1))
    return launch("norm", call, moved=moved, elements=elements, blocks=blocks, variant=variant)


def _width(each: int) -> str:
    return "_narrow" if each < 4 else "_wide"


def _nll_loss(call: OperatorCall, settings: Settings) -> Launch | None:
    """Read nll_loss: one block loops over all rows, and each row costs a sector."""
    rows = call.shapes[0][0] if len(call.shapes[0]) > 1 else 1
    return launch("loss", call, moved=rows * 40.0, elements=rows, blocks=1, variant="nll_loss")


def _nll_loss_backward(call: OperatorCall, settings: Settings) -> Launch | None:
    rows = call.shapes[1][0] if len(call.shapes[1]) > 1 else 1
    return launch("loss", call, moved=rows * 40.0, elements=rows, blocks=1, variant="nll_loss_backward")


OPERATORS = careful(
    {
        "native_layer_norm": _layer_norm,
        "_fused_rms_norm": _layer_norm,
        "native_layer_norm_backward": _layer_norm_backward,
        "_fused_rms_norm_backward": _layer_norm_backward,
        "native_batch_norm": _batch_norm(0, 2.0, "batch_norm_statistics+batch_norm"),
        "_native_batch_norm_legit": _batch_norm(0, 2.0, "batch_norm_statistics+batch_norm"),
        "_batch_norm_with_update": _batch_norm(0, 2.0, "batch_norm_statistics+batch_norm"),
        "native_batch_norm_backward": _batch_norm(1, 5.0, "batch_norm_backward"),
        "cudnn_batch_norm": _batch_norm(0, 3.0, "cudnn_batch_norm"),
        "cudnn_batch_norm_backward": _batch_norm(0, 5.0, "cudnn_batch_norm_backward"),
        "native_group_norm": _group_norm,
        "native_group_norm_backward": _group_norm_backward,
        "_softmax": _softmax,
        "_log_softmax": _softmax,
        "_softmax_backward_data": _softmax_backward,
        "_log_softmax_backward_data": _softmax_backward,
        "nll_loss_forward": _nll_loss,
        "nll_loss2d_forward": _nll_loss,
        "nll_loss_backward": _nll_loss_backward,
        "nll_loss2d_backward": _nll_loss_backward,
    }
)
