"""Measured times as calls of operators, for kernels that move bytes: what their figures are fitted to, and judged by.

A probe's row may be several operators, which are written down here; rows that are not are left out. Rows of real steps have
no strides and no arguments but shapes: kernels' names tell layouts, and the axes of a reduction are guessed from both.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tonnage.clock.kernels import copies, elementwise, fused, indexing, optimizers, reductions, rows
from tonnage.clock.kernels.memory import figures
from tonnage.clock.launch import Launch, Settings
from tonnage.clock.operators import OperatorCall
from tonnage.hardware.gpu import Gpu

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
KINDS = ("elementwise", "conversions", "reductions", "norms", "losses", "indexing", "creation", "optimizers", "copies")
BY_KIND: dict[str, Any] = {
    "elementwise": elementwise, "copy": copies, "reduction": reductions, "norm": rows, "loss": rows, "indexing": indexing,
    "sorting": indexing, "optimizer": optimizers, "fused": fused,
}  # fmt: skip
MODULES = (copies, rows, reductions, indexing, optimizers, elementwise)
TYPES = {"float32": "float", "bfloat16": "c10::BFloat16", "float16": "c10::Half", "int64": "long int"}
FP32, FLAG, INDEX = "float", "bool", "long int"
SETTINGS = Settings()


@dataclass(frozen=True)
class Sample:
    """Launches that took so long together. A probe's time has gaps between kernels in it, a profiler's has not."""

    group: str  # a probe's kind, or a training
    label: str
    launches: tuple[Launch, ...]
    count: float
    measured_s: float
    judged: bool
    gapped: bool


def predicted_s(sample: Sample, gpu: Gpu) -> float:
    """A burst of one call finds in the L2 cache all that fits; a step does not."""
    common = figures()["common"]
    if not sample.gapped:
        return sample.count * sum(seconds(launch, gpu) for launch in sample.launches)
    kept, common["kept"] = common["kept"], 1.0
    try:
        return sample.count * sum(seconds(launch, gpu) + common["gap_s"] * launch.kernels for launch in sample.launches)
    finally:
        common["kept"] = kept


def seconds(launch: Launch, gpu: Gpu) -> float:
    """By the module that knows the kind."""
    return float(BY_KIND[launch.kind].seconds(launch, gpu))


def launch_of(call: OperatorCall) -> Launch | None:
    if call.name.startswith(fused.PREFIX):
        return fused.fused(call, SETTINGS)
    reader = _readers().get(call.name)
    return reader(call, SETTINGS) if reader else None


@cache
def _readers() -> dict[str, Any]:
    return {
        name: reader
        for module in MODULES
        for name, reader in {**getattr(module, "WHEN_ALONE", {}), **module.OPERATORS}.items()
    }


# ── probes ──


def probe_samples() -> list[Sample]:
    """Of the probe's cases, in turn fitted to and judged by; a case's backward goes where its forward goes."""
    counts: dict[str, int] = defaultdict(int)
    found = []
    with gzip.open(RESULTS / "times-h200.jsonl.gz", "rt") as file:
        for row in map(json.loads, file):
            if row.get("kind") not in KINDS or "gpu_s" not in row:
                continue
            if not row["op"].endswith(" backward"):
                counts[row["kind"]] += 1
            launches = tuple(_launches(row))
            if launches:
                found.append(
                    Sample(
                        group=row["kind"], label=f"{row['op']} {row['note']} {_sizes(row)}", launches=launches, count=1,
                        measured_s=row["gpu_s"], judged=counts[row["kind"]] % 2 == 1, gapped=True,
                    )
                )  # fmt: skip
    return found


def _sizes(row: dict[str, Any]) -> str:
    return " ".join(f"{arg['shape']} {arg['dtype']}" for arg in row["args"] if isinstance(arg, dict) and "shape" in arg)


def _launches(row: dict[str, Any]) -> Iterator[Launch]:
    if row["kind"] == "copies":
        size = 4.0 * row["args"][0]["shape"][0]
        yield copies.transfer(
            size, "to_device" if row["op"] == "to device" else "to_host", pinned=row["note"] == "pinned"
        )
        return
    calls = _optimizer(row["note"]) if row["kind"] == "optimizers" else _calls(row)
    made = [launch_of(call) for call in calls]
    if all(made):
        yield from (launch for launch in made if launch)


def call(name: str, *arguments: Any) -> OperatorCall:
    """Arguments as (shape, type), (shape, type, strides), or the text of a value."""
    tensors = [argument if isinstance(argument, tuple) else ((), "Scalar") for argument in arguments]
    return OperatorCall(
        name=name,
        shapes=tuple(tensor[0] for tensor in tensors),
        types=tuple(tensor[1] for tensor in tensors),
        strides=tuple(tensor[2] if len(tensor) > 2 else () for tensor in tensors),
        values=tuple(argument if isinstance(argument, str) else "" for argument in arguments),
    )


def _calls(row: dict[str, Any]) -> list[OperatorCall]:
    """The operators that a row consists of; none where that is not written down."""
    shape, kind = tuple(row["args"][0]["shape"]), TYPES[row["args"][0]["dtype"]]
    strides = tuple(row["args"][0].get("stride", ()))
    x: Any = (shape, kind, strides) if strides else (shape, kind)
    backward = row["op"].endswith(" backward")
    name = row["op"].removesuffix(" backward")
    if row["kind"] == "elementwise":
        return (_elementwise_backward if backward else _elementwise)(name, x)
    if row["kind"] == "conversions":
        return _conversion(row["note"], x, row, backward)
    if row["kind"] == "reductions":
        return [] if backward else _reduction(name, x)
    if row["kind"] == "norms":
        return _norm(name, x, row, backward)
    if row["kind"] == "losses":
        return _loss(name, x, row, backward)
    if row["kind"] == "indexing":
        return _indexing(name, x, row, backward)
    if name == "copy_":
        return [call("flip", x), call("copy_", x, x)]
    return [call("fill_" if name == "zero_" else name, x)]


def _elementwise(name: str, x: Any) -> list[OperatorCall]:
    flags = (x[0], FLAG)
    several = {
        "rsqrt": [call("abs", x), call("rsqrt", x)],
        "where": [call("gt", x), call("where", flags, x, x)],
        "masked_fill": [call("gt", x), call("copy_", x, x), call("masked_fill_", x, flags)],
        "clone": [call("copy_", x, x)],
        "relu": [call("clamp_min", x)],
        "dropout": [call("native_dropout", x)],
    }
    return several.get(name) or [call(name, *([x, x] if name in ("add", "mul", "add_") else [x]))]


def _elementwise_backward(name: str, x: Any) -> list[OperatorCall]:
    flags = (x[0], FLAG)
    return {
        "gelu": [call("gelu_backward", x, x)], "silu": [call("silu_backward", x, x)], "tanh": [call("tanh_backward", x, x)],
        "sigmoid": [call("sigmoid_backward", x, x)], "relu": [call("threshold_backward", x, x)], "exp": [call("mul", x, x)],
        "neg": [call("neg", x)], "div": [call("div", x)], "dropout": [call("native_dropout_backward", x, flags)],
        "mul": [call("mul", x, x)] * 2, "masked_fill": [call("copy_", x, x), call("masked_fill_", x, flags)],
        "pow": [call("pow", x), call("mul", x), call("mul", x, x)],
    }.get(name, [])  # fmt: skip


def _conversion(note: str, x: Any, row: dict[str, Any], backward: bool) -> list[OperatorCall]:
    (rows_, columns), kind = x[0], x[1]
    wide = (x[0], FP32)
    narrow = (x[0], next(TYPES[arg["dtype"]] for arg in row["args"]))
    column = ((rows_, 1), kind)
    if note == "narrow":
        target = (x[0], "c10::BFloat16")
        return [call("copy_", wide, target)] if backward else [call("copy_", target, wide)]
    if note == "widen":
        return [call("copy_", narrow, wide)] if backward else [call("copy_", wide, narrow)]
    if note == "mixed add":
        return [call("copy_", narrow, wide)] if backward else [call("add", narrow, wide)]
    if note == "bias":
        return [call("sum", x, "[0]", "")] if backward else [call("add", x, ((columns,), kind))]
    if note == "column":
        if backward:
            return [call("mul", x, column), call("mul", x, x), call("sum", x, "[-1]", "")]
        return [call("mul", x, column)]
    if backward or min(rows_, columns) == 1:
        return []
    if note == "transposed":
        turned = (columns, rows_)
        return [call("copy_", (turned, kind, (rows_, 1)), (turned, kind, (1, columns)))]
    if note == "heads":
        shape = (columns // 64, rows_, 64)
        return [call("copy_", (shape, kind, (rows_ * 64, 64, 1)), (shape, kind, (64, columns, 1)))]
    if note == "strided":
        shape = (rows_, -(-columns // 2))
        return [call("copy_", (shape, kind, (shape[1], 1)), (shape, kind, (columns, 2)))]
    return [call("cat", ((x[0], x[0]), kind))] if note == "cat" else []


def _reduction(name: str, x: Any) -> list[OperatorCall]:
    word, _, axis = name.partition(" ")
    if word == "norm":
        return [call("linalg_vector_norm", x, "2")]
    if word in ("cumsum", "argmax"):
        return [call(word, x, "-1", "")]
    return [call(word, x, {"last": "[-1]", "first": "[0]", "": ""}[axis], *([""] if axis else []))]


def _norm(name: str, x: Any, row: dict[str, Any], backward: bool) -> list[OperatorCall]:
    weight = ((x[0][-1],), x[1])
    moment = ((*x[0][:-1], 1), FP32)
    if name in ("softmax", "log_softmax"):
        # Without a logarithm, the gradient is first multiplied by the result.
        before = [call("mul", x, x)] if name == "softmax" else []
        return [*before, call(f"_{name}_backward_data", x, x)] if backward else [call(f"_{name}", x, "-1", "False")]
    if name == "layer_norm":
        if backward:
            return [call("native_layer_norm_backward", x, x, "", moment, moment, weight, weight)]
        return [call("native_layer_norm", x, "", weight, weight)]
    if name == "rms_norm":
        if backward:
            return [call("_fused_rms_norm_backward", x, x, "", moment, weight)]
        return [call("_fused_rms_norm", x, "", weight)]
    if name == "spelled rms":
        return [] if backward else _spelled_rms(x, weight)
    channel = ((x[0][1],), x[1])
    if name == "batch_norm":
        prefix = "cudnn" if x[1] == FP32 else "native"
        if backward:
            return [call(f"{prefix}_batch_norm_backward", x, x, channel, channel, channel, channel, channel)]
        return [call(f"{prefix}_batch_norm", x, channel, channel, channel, channel)]
    if len(x) > 2:
        return []  # made contiguous first
    if backward:
        return [call("native_group_norm_backward", x, x, ((x[0][0], 32), x[1]), ((x[0][0], 32), x[1]), channel)]
    return [call("native_group_norm", x, channel, channel, "", "", "", "32")]


def _spelled_rms(x: Any, weight: Any) -> list[OperatorCall]:
    wide, column = (x[0], FP32), ((*x[0][:-1], 1), FP32)
    casts = [call("copy_", wide, x)], [call("copy_", x, wide)]
    return [
        *(casts[0] if x[1] != FP32 else []), call("pow", wide), call("mean", wide, "[-1]", ""), call("add", column), call("rsqrt", column),
        call("mul", wide, column), *(casts[1] if x[1] != FP32 else []), call("mul", weight, x),
    ]  # fmt: skip


def _loss(name: str, x: Any, row: dict[str, Any], backward: bool) -> list[OperatorCall]:
    if name == "mse_loss":
        if backward:
            return [call("fill_", x), call("mse_loss_backward", ((1,), FP32), x, x)]
        return [call("mse_loss", x, x), call("mean", x, "", "")]
    target = ((x[0][0],), INDEX)
    if backward:
        return [
            call("nll_loss_backward", ((), FP32), x, target),
            call("fill_", x),
            call("_log_softmax_backward_data", x, x),
        ]
    return [call("_log_softmax", x, "-1", "False"), call("nll_loss_forward", x, target)]


def _indexing(name: str, x: Any, row: dict[str, Any], backward: bool) -> list[OperatorCall]:
    others = [(tuple(arg["shape"]), TYPES[arg["dtype"]]) for arg in row["args"][1:]]
    if name == "embedding":
        table, index = others[0], x
        if backward:
            gradient = ((*index[0], table[0][1]), table[1])
            return [call("fill_", table), call("embedding_dense_backward", gradient, index)]
        return [call("embedding", table, index)]
    taken = ((*others[0][0], x[0][-1]), x[1]) if others else x
    if name == "index_select":
        return (
            [call("fill_", x), call("index_add_", x, "0", others[0], taken)]
            if backward
            else [call(name, x, "0", others[0])]
        )
    if name == "gather":
        same = (others[0][0], x[1])
        return (
            [call("fill_", x), call("scatter_add_", x, "-1", others[0], same)]
            if backward
            else [call(name, x, "-1", others[0])]
        )
    if name == "scatter_add":
        return [] if backward else [call("fill_", x), call("copy_", x, x), call("scatter_add_", x, "-1", others[0], x)]
    if name == "index_add":
        if backward:
            return [call("index_select", x, "0", others[0])]
        return [call("copy_", x, x), call("index_add_", x, "0", others[0], others[1])]
    return [] if backward else [call(name, x)]


def _optimizer(note: str) -> list[OperatorCall]:
    name, how, count, _, size, kind = note.split()
    type_name, many = TYPES[kind], int(count)
    one: Any = ((int(size),), type_name)
    lists: Any = (((int(size),),) * many, type_name)
    if how == "fused":
        return []  # of zeros, whose divisions and roots take the long way: half as fast again as a real step
    prefix, argument = ("_foreach_", lists) if how == "foreach" else ("", one)
    updates = (
        {"mul_": 1, "add_": 2}
        if name == "SGD"
        else {"lerp_": 2, "mul_": 1, "addcmul_": 3, "sqrt": 1, "div_": 1, "add_": 1, "addcdiv_": 3}
    )
    made = [call(prefix + word, *[argument] * uses) for word, uses in updates.items()]
    if name == "AdamW":
        made.append(call(prefix + "mul_", argument))
    if name == "SGD":
        made.append(call(prefix + "add_", argument, argument))
    return made if how == "foreach" else made * many


# ── real steps ──


def step_samples() -> list[Sample]:
    """A sample for each operator of each training; kernels of one call are taken together."""
    judged = {
        name: row["judged"] or row.get("seen", False)
        for name, row in json.loads((RESULTS / "steps-h200.json").read_text())["trainings"].items()
    }
    grouped: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    with gzip.open(RESULTS / "steps-operators-h200.jsonl.gz", "rt") as file:
        for row in map(json.loads, file):
            grouped[row["training"], row.get("op", ""), json.dumps([row.get("shapes"), row.get("types")])].append(row)
    found = []
    for (training, op, _), rows_ in grouped.items():
        name = op.removeprefix("aten::")
        if name in SEVERAL:
            found.append(_step_sample(training, name, rows_, min(row["calls"] for row in rows_), judged[training]))
        else:
            cleared = sum(row["gpu_s"] for row in rows_ if row["kernel"].startswith("Memset"))
            kernels = [row for row in rows_ if not row["kernel"].startswith("Memset")] or rows_
            for row in kernels:
                row["gpu_s"] += cleared / len(kernels) if kernels is not rows_ else 0.0
                found.append(_step_sample(training, name, [row], row["calls"], judged[training]))
        if "TensorList" in (rows_[0].get("types") or []) and training in PARAMETERS:
            found.append(_list_sample(training, name, rows_, judged[training]))
    return [sample for sample in found if sample]


SEVERAL = {
    "native_batch_norm", "native_batch_norm_backward", "native_group_norm", "native_group_norm_backward",
    "embedding_dense_backward", "_index_put_impl_", "sort", "topk", "cudnn_batch_norm", "cudnn_batch_norm_backward",
    "max_pool2d_with_indices_backward", "cumsum",
}  # fmt: skip
UNRECORDED = {"cat", "index"}


def _step_sample(training: str, name: str, rows_: list[dict[str, Any]], count: float, judged: bool) -> Sample | None:
    shapes, types = _tupled(rows_[0].get("shapes") or []), tuple(rows_[0].get("types") or [])
    if not shapes or name in UNRECORDED or "TensorList" in types:
        return None
    kernels = tuple(row["kernel"].removeprefix("void at::native::").removeprefix("void ") for row in rows_)
    made = OperatorCall(
        name=name,
        shapes=shapes,
        types=types,
        kernels=kernels,
        values=_guessed_values(name, shapes, kernels[0]),
        strides=_guessed_strides(name, shapes, kernels[0]),
    )
    launch = launch_of(made)
    if launch is None:
        return None
    if name == "native_layer_norm_backward":  # its kernels are told apart
        first, _, weight = launch.variant.partition("+")
        launch = replace(launch, variant=weight if "GammaBeta" in kernels[0] else first, kernels=1)
    if name not in SEVERAL:
        count = count / launch.kernels
    measured_s = sum(row["gpu_s"] for row in rows_)
    return Sample(
        group=training, label=f"{name} {shapes} {types} {kernels[0][:60]}", launches=(launch,), count=count,
        measured_s=measured_s, judged=judged, gapped=False,
    )  # fmt: skip


def _list_sample(training: str, name: str, rows_: list[dict[str, Any]], judged: bool) -> Sample | None:
    """An operator on all parameters. Rows do not have their shapes, but these models' are known."""
    if name not in LISTS or name == "_foreach_add_":  # which may be of steps
        return None
    shapes, kind = tuple(PARAMETERS[training][0]), PARAMETERS[training][1]
    launch = launch_of(call(name, *[(shapes, kind)] * LISTS[name]))
    kernels = sum(row["calls"] for row in rows_)
    if launch is None:
        return None
    return Sample(
        group=training, label=f"{name} of all parameters", launches=(launch,), count=kernels / launch.kernels,
        measured_s=sum(row["gpu_s"] for row in rows_), judged=judged, gapped=False,
    )  # fmt: skip


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def _guessed_strides(name: str, shapes: Any, kernel: str) -> tuple[Any, ...]:
    """Channels last, where a reduction of images has threads along channels; heads inside rows, where attention's tensors are slow."""
    shape = shapes[0]
    if len(shape) != 4:
        return ()
    if name in reductions.OPERATORS and shape[2] == shape[3] and "<512, 1" not in kernel:
        return ((shape[1] * shape[2] * shape[3], 1, shape[1] * shape[3], shape[1]),)
    if (
        name in ("mul", "add", "add_", "neg")
        and kernel.startswith("elementwise_kernel")
        and shapes[-1][:2] in (shape[:2], (1, 1), ())
    ):
        _, heads, length, width = shape
        return ((heads * length * width, width, heads * width, 1),)
    return ()


def _guessed_values(name: str, shapes: Any, kernel: str) -> tuple[str, ...]:
    """Axes of a reduction, from how the kernel's threads lie: <512, 1> goes along the last axis, others do not."""
    shape = shapes[0]
    if name not in reductions.OPERATORS or len(shapes) < 3:
        return ()
    along_last = "<512, 1" in kernel
    if len(shape) == 4 and shape[2] == shape[3]:
        axes = [2, 3] if name == "mean" else [0, 2, 3]
    elif name == "mean" or along_last:
        axes = [len(shape) - 1]
    else:
        axes = list(range(len(shape) - 1))
    return ("", str(axes))


# ── parameters ──

LISTS = {
    "_fused_adamw_": 4, "_foreach_mul_": 1, "_foreach_lerp_": 2, "_foreach_addcmul_": 3, "_foreach_sqrt": 1, "_foreach_div_": 1,
    "_foreach_addcdiv_": 3,
}  # fmt: skip


def _gpt2(width: int, layers: int) -> list[tuple[int, ...]]:
    inside = [
        (width, 3 * width),
        (3 * width,),
        (width, width),
        (width,),
        (width, 4 * width),
        (4 * width,),
        (4 * width, width),
        (width,),
    ]
    return [(50257, width), (1024, width), *(inside + [(width,)] * 4) * layers, (width,), (width,)]


def _llama(hidden: int, between: int, layers: int, heads: int, groups: int, vocabulary: int) -> list[tuple[int, ...]]:
    narrow = hidden // heads * groups
    attention = [(hidden, hidden), (narrow, hidden), (narrow, hidden), (hidden, hidden)]
    layer = [*attention, (between, hidden), (between, hidden), (hidden, between), (hidden,), (hidden,)]
    return [(vocabulary, hidden), *layer * layers, (hidden,), (vocabulary, hidden)]


def _vit(width: int, layers: int) -> list[tuple[int, ...]]:
    layer = (
        [(width, width), (width,)] * 4
        + [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
        + [(width,)] * 4
    )
    return [
        (1, 1, width),
        (1, 197, width),
        (width, 3, 16, 16),
        (width,),
        *layer * layers,
        (width,),
        (width,),
        (1000, width),
        (1000,),
    ]


_B16 = "c10::BFloat16"
PARAMETERS: dict[str, tuple[list[tuple[int, ...]], str]] = {
    "gpt2-amp-16x1024": (_gpt2(768, 12), FP32),
    "gpt2-bf16-32x256": (_gpt2(768, 12), _B16),
    "gpt2-amp-1x128": (_gpt2(768, 12), FP32),
    "gpt2-medium-fp32-8x512": (_gpt2(1024, 24), FP32),
    "gpt2-medium-tf32-8x1024": (_gpt2(1024, 24), FP32),
    "gpt2-medium-amp-8x1024-checkpointed": (_gpt2(1024, 24), FP32),
    "llama-0.1b-bf16-8x2048": (_llama(768, 2048, 12, 12, 4, 32000), _B16),
    "llama-0.5b-bf16-4x4096": (_llama(896, 4864, 24, 14, 2, 151936), _B16),
    "llama-0.5b-amp-8x512": (_llama(896, 4864, 24, 14, 2, 151936), FP32),
    "llama-1b-bf16-2x2048-eager": (_llama(2048, 8192, 16, 32, 8, 128256), _B16),
    "llama-1b-bf16-1x16384": (_llama(2048, 8192, 16, 32, 8, 128256), _B16),
    "vit-b-amp-128": (_vit(768, 12), FP32),
    "vit-l-bf16-64": (_vit(1024, 24), _B16),
    "mlp-fp32-64": ([(256, 256), (256,)] * 8, FP32),
    "mlp-bf16-8192-wide": ([(4096, 4096), (4096,)] * 8, _B16),
}
