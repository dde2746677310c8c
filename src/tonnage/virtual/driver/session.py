"""The virtual GPU of a CUDA build of torch: everything above the CUDA libraries is real, and these are stand-ins, whose
questions are answered here: workspaces, engines, buffer sizes, versions.

The stand-in libraries (`native/`) ask in one line of text, "kind key=value key=value ...", with commas between the
items of a list. The answer is a number, usually bytes; -1 means unsupported, and the library then fails. The figures
are those of the CPU build's kernels.

    convolution way=forward dtype=bfloat16 x=8,3,224,224 xs=... w=64,3,7,7 ws=... y=... ys=... padding=3,3 ... engine=0
    solver routine=potrf rows=100 columns=100 reflectors=0 batch=1 item_bytes=4
    version library=cudnn
"""

import ctypes
import re
from collections.abc import Callable
from math import prod
from typing import Any

from tonnage.garbage import no_collection
from tonnage.hardware import Gpu
from tonnage.virtual.companions import install_companions
from tonnage.virtual.cuda.releases import release_of
from tonnage.virtual.driver import loading
from tonnage.virtual.driver.device import DriverDevice, DriverTrace
from tonnage.virtual.driver.following import Follower
from tonnage.virtual.driver.unwritten import Unwritten
from tonnage.virtual.driver.values import DriverValues
from tonnage.virtual.kernels import convolution_engines as engines
from tonnage.virtual.kernels import library_sizes as sizes
from tonnage.virtual.kernels.convolution_engines import Convolution, ConvolutionCall, Way
from tonnage.virtual.kernels.library_sizes import KINDS, RecurrentNetwork, dropout_state_bytes
from tonnage.virtual.session import Session, version_pair
from tonnage.virtual.standins import StandIns

_EVENTS = ctypes.CFUNCTYPE(None)
_ANSWER = ctypes.CFUNCTYPE(ctypes.c_longlong, ctypes.c_char_p)
_UNKNOWN_FUNCTION = "a function of a CUDA library that the virtual GPU does not know; it failed"
_ASSUMED_KERNELS = "One whose machine code could not be read is taken to use 32 registers a thread."


class DriverSession(Session):
    """A session with virtual cards below torch."""

    device: DriverDevice

    def __init__(self, gpu: Gpu, torch_version: str | None = None, cards: int = 1) -> None:
        installed, _ = loading.installed_version(loading.torch_root())
        self.core = loading.prepare(gpu, cards)
        version = version_pair(installed)
        with no_collection():
            import torch
        # `torch._C._cuda_getArchFlags` would tell, too, but after it no forked child could use the card.
        built_for = " ".join(re.findall(r"code=(\w+)", torch._C._show_config())) or release_of(version).architectures
        loading.choose_code(self.core, gpu, installed, built_for)
        super().__init__(gpu, torch, installed.split("+")[0], cards)
        self.device = DriverDevice(gpu, version, self.core, torch)
        self.stand_ins = StandIns(self.device.attribution.line, self.device.held)
        if torch_version and version_pair(torch_version) != version:
            words = (
                f"The installed {installed} ran as it is, not {torch_version}: a CUDA build models no other version."
            )
            self.stand_ins.assume("torch", words)
        self.history = DriverTrace(self.device, torch)
        self.follower = Follower(torch)
        self.values = DriverValues(self, torch)
        self.unwritten = Unwritten(self.follower, torch)
        self.device.on_freed = self.values.dropped
        self.is_known, self.forget = self.values.is_known, self.values.forget

    @property
    def pinned_peak_bytes(self) -> int:
        self.core.tn_pinned_peak_bytes.restype = ctypes.c_int64
        return int(self.core.tn_pinned_peak_bytes())

    def _install(self) -> None:
        from tonnage.script.hooks import install_hooks

        self._callbacks = (_EVENTS(self.device.catch_up), _ANSWER(self._answer))
        self.core.tn_answer_with(self._callbacks[1])
        self.core.tn_lift_limit(0)
        self.core.tn_open(self._callbacks[0])
        self._undo += [install_hooks(self.device.attribution), self.history.install(), self.follower.release]
        self.values.install()
        self.unwritten.install()
        self._undo.append(install_companions(self.stand_ins, self.gpu))

    def _uninstall(self) -> None:
        self.device.drain()
        self.core.tn_close()
        # Unsupported functions of CUDA's libraries that were called.
        library, name, calls, at = ctypes.c_char_p(), ctypes.c_char_p(), ctypes.c_longlong(), 0
        while self.core.tn_unknown_at(at, ctypes.byref(library), ctypes.byref(name), ctypes.byref(calls)):
            at += 1
            what = f"{(library.value or b'').decode()}: {(name.value or b'').decode()}"
            for _ in range(min(calls.value, 1000)):
                self.stand_ins.unmodelled(what, _UNKNOWN_FUNCTION)
        if self.core.tn_assumed_kernels():
            self.stand_ins.assume("kernels", _ASSUMED_KERNELS)

    def recording(self, **header: Any) -> Any:
        self.device.drain()
        self.history.take()
        return super().recording(**header)

    def _answer(self, question: bytes) -> int:
        if question.startswith(b"grant "):
            return int(self.device.grants(int(question.partition(b"=")[2])))
        return answer(question.decode(), self.device, self.stand_ins.assume)


# Answers

NONE = -1
_ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}
_WAYS: dict[str, Way] = {way: way for way in ("forward", "backward_data", "backward_filter")}

Assume = Callable[[str, str], None]
Fields = dict[str, str]


def answer(question: str, device: DriverDevice, assume: Assume = lambda operator, words: None) -> int:
    """Answer one question; `assume(operator, words)` is called for figures that were not measured."""
    kind, *pairs = question.split()
    fields = dict(pair.split("=", 1) for pair in pairs)
    match kind:
        case "convolution":
            return _convolution(fields, device, assume)
        case "recurrent":
            return _recurrent(fields)
        case "solver":
            return _solver(*(int(fields[key]) for key in _OF_SOLVERS)).get(fields["routine"], lambda: NONE)()
        case "attention" if fields.get("engine") == "0" and fields["pass"] == "backward":
            return sizes.cudnn_backward_bytes() + int(fields["summed_bytes"])
        case "attention" if fields.get("engine") == "0":
            batch, heads, queries, _ = _list(fields, "q")
            _, _, keys, width = _list(fields, "v")
            return sizes.cudnn_forward_bytes(batch * heads, queries, keys, width, device.gpu.sm_count)
        case "batch_norm":
            if not _is_channels_last(fields):
                return 0
            x, is_backward = _list(fields, "x"), fields["pass"] == "backward"
            return sizes.batch_norm_bytes(prod(x), x[1], _ITEM_BYTES[fields["dtype"]], is_backward)
        case "dropout_states":
            return dropout_state_bytes(device.gpu.sm_count, device.gpu.max_threads_per_sm)
        case "fourier":
            item_bytes = max(int(fields["input_bytes"]), int(fields["output_bytes"]))
            return sizes.fourier_bytes(int(fields["batch"]), _list(fields, "signal"), item_bytes, fields["real"] == "1")
        case "sparse" if (size := sizes.sparse_product_bytes(int(fields["algorithm"]))) is not None:
            assume("cusparse", "the buffer of a sparse product is that of the one measured")
            return size
        case "version":
            release = device.release
            versions = {"cudnn": release.cudnn_number, "cuda": release.cuda_number, "cusparselt": release.cusparselt}
            return versions.get(fields["library"], NONE)
    return NONE


def _list(fields: Fields, key: str) -> tuple[int, ...]:
    return tuple(int(item) for item in fields.get(key, "").split(",") if item)


def _is_channels_last(fields: Fields) -> bool:
    """Return the layout of the first operand whose strides are unambiguous (sizes of 1 make them ambiguous)."""
    for key in "xyw":
        shape, strides = _list(fields, key), _list(fields, f"{key}s")
        last = _packed(shape, (*range(2, len(shape)), 1)) == strides
        if last != (_packed(shape, range(1, len(shape))) == strides):
            return last
    return False


def _packed(shape: tuple[int, ...], inner: tuple[int, ...] | range) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose dimensions after the first are nested in this order."""
    strides, step = [0] * len(shape), 1
    for dim in reversed((0, *inner)):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def _convolution(fields: Fields, device: DriverDevice, assume: Assume) -> int:
    """Return an engine's workspace. Engine 0 is cuDNN's choice; others are tried in benchmark mode or if memory is short."""
    x, weight = _list(fields, "x"), _list(fields, "w")
    stride, padding, dilation = (_list(fields, key) for key in ("stride", "padding", "dilation"))
    layer = Convolution(x[1:], weight, stride, padding, dilation, x[1] // weight[1])
    plan = ConvolutionCall(_WAYS[fields["way"]], layer, x[0], fields["dtype"], _is_channels_last(fields))
    engine = int(fields["engine"])
    if engine == 0 and engines.takes_none(plan, device.gpu.rates):
        return 0
    if engine == 0:
        if engines.measured_bytes(plan) is None:
            assume("cudnn_convolution", "an unmeasured workspace is that of the nearest measured shapes")
        return engines.workspace_bytes(plan)
    others = [size for size in engines.search_bytes(plan)[1:] if size]
    return others[engine - 1] if engine <= len(others) else NONE


def _recurrent(fields: Fields) -> int:
    required = {key: int(fields[key]) for key in ("input", "hidden", "layers", "directions", "projected")}
    given = {key: int(fields.get(key, 0)) for key in ("steps", "batch", "rows")}
    training, dropout = (bool(int(fields.get(key, 0))) for key in ("training", "dropout"))
    kind, dtype = KINDS[int(fields["mode"])], fields["dtype"]
    network = RecurrentNetwork(
        kind=kind, dtype=dtype, element_bytes=_ITEM_BYTES[dtype], training=training, dropout=dropout, **required, **given
    )  # fmt: skip
    if fields["what"] == "weights":
        return network.weight_elements * network.element_bytes
    return network.workspace_bytes() if fields["what"] == "workspace" else network.reserve_bytes()


_OF_SOLVERS = ("rows", "columns", "reflectors", "batch", "item_bytes")


def _solver(rows: int, columns: int, reflectors: int, batch: int, item: int) -> dict[str, Callable[[], int]]:
    return {
        "potrf": lambda: sizes.potrf_bytes(rows),
        "getrf": lambda: sizes.getrf_bytes(max(rows, columns)),
        "geqrf": lambda: sizes.householder_bytes(min(rows, columns), item),
        "orgqr": lambda: sizes.orgqr_bytes(rows, columns, item),
        "ormqr": lambda: sizes.ormqr_bytes(rows, columns, reflectors, item),
        "syevd": lambda: sizes.syevd_bytes(rows, item),
        "syevj": lambda: sizes.syevj_bytes(rows, item),
        "syev_batched": lambda: sizes.syev_batched_bytes(rows, batch, item),
        "gesvdj": lambda: sizes.singular_bytes(rows, columns, item),
        "gesvda": lambda: sizes.singular_bytes(rows, columns, item),
        "geev": lambda: sizes.geev_bytes(rows, item),
    }
