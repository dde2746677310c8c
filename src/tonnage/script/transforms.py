"""Records what is called within transforms of torch.func (vmap, grad, jvp), where torch's profiler has to pause.

The profiler keeps a weak reference to every tensor that it sees. A plain tensor frees its memory nevertheless, but the
wrapper that a transform passes around keeps the tensor inside it, so a profiled script would need more memory than an
unobserved one. Torch's execution trace keeps numbers only. It tells neither times nor which host memory is pinned,
so it is used within transforms alone.
"""

import ctypes
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tonnage.script.profiled import MARK, MOST_WORDS, NODE, STRETCH, Argument, Event
from tonnage.script.wrapping import wrap

_LEVELS = {
    "torch._functorch.vmap": ("_vmap",),
    "torch._functorch.eager_transforms": ("_grad", "_jvp", "_func"),
    "torch._C": ("_vmapmode",),  # the vmap of torch.autograd
}
_FUNCTION, _USER = 0, 7  # torch's scopes
_ERROR = 2  # of torch's log levels


class TransformTrace:
    """Switches between the profiler and the trace where this thread's outermost transform begins and ends.

    Each stretch of the trace is numbered, by a mark in the profile and one in the trace.
    """

    def __init__(self) -> None:
        """Start following transforms; the profiler is running."""
        self._torch = sys.modules["torch"]
        self._thread = threading.get_ident()
        self._path: Path | None = None
        self._stretches = 0
        self._traces = False
        self._level = self._torch._C._functorch.maybe_current_level() or 0
        self._undo = ExitStack()
        for module, kinds in _LEVELS.items():
            owner = sys.modules.get(module)
            for kind in kinds:
                if hasattr(owner, f"{kind}_increment_nesting"):
                    wrap(self._undo, owner, f"{kind}_increment_nesting", self._nesting(1))
                    wrap(self._undo, owner, f"{kind}_decrement_nesting", self._nesting(-1))
        self._follow()

    def _nesting(self, by: int) -> Callable[..., Any]:
        def around(plain: Callable[..., Any], /, *arguments: Any) -> Any:
            result = plain(*arguments)
            if threading.get_ident() == self._thread:
                self._level = max(0, self._level + by)
                self._follow()
            return result

        return around

    def _follow(self) -> None:
        if self._level and not self._traces:
            self._trace()
        elif self._traces and not self._level:
            self._profile()

    def _trace(self) -> None:
        native = self._torch._C._profiler
        words = f"{MARK}{STRETCH}{self._stretches}"
        with _without_warnings(self._torch):
            if self._path is None:
                try:
                    handle, path = tempfile.mkstemp(suffix=".json")
                except OSError:
                    return  # without a file, the profiler goes on
                os.close(handle)
                self._path = Path(path)
                native._add_execution_trace_observer(path)
            with native._RecordFunctionFast(words):
                pass
            self._collect(False)
            native._enable_execution_trace_observer()
        with native._RecordFunctionFast(words):
            pass
        self._stretches += 1
        self._traces = True

    def _profile(self) -> None:
        with _without_warnings(self._torch):
            self._torch._C._profiler._disable_execution_trace_observer()
            self._collect(True)
        self._traces = False

    def _collect(self, enabled: bool) -> None:
        activities = {self._torch._C._profiler.ProfilerActivity.CPU}
        self._torch._C._autograd._toggle_collection_dynamic(enabled, activities)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the profiler record what is called in this context."""
        if not self._traces or threading.get_ident() != self._thread:
            yield
            return
        self._profile()
        yield
        self._trace()

    def stop(self) -> None:
        """Stop following, and let the profiler record again."""
        self._undo.close()
        if self._traces:
            self._profile()

    def read(self) -> "Stretches":
        """Return what was traced, once."""
        if self._path is None:
            return Stretches([])
        try:
            with _without_warnings(self._torch):
                self._torch._C._profiler._remove_execution_trace_observer()
            return Stretches(json.loads(self._path.read_text("utf-8"))["nodes"])
        finally:
            self._path.unlink()


@dataclass(slots=True)
class _Node:
    """A row of the trace. Its number says when it began, its place in the file when it ended."""

    number: int
    ended: int
    name: str
    scope: int
    thread: int
    schema: str
    inputs: dict[str, list[Any]]


class Stretches:
    """The traced calls, by the number of their stretch."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        """Divide the rows of a trace at the marks in it."""
        nodes: list[_Node] = []
        for ended, row in enumerate(rows):
            if not row["name"].startswith("[pytorch|"):
                more = {attribute["name"]: attribute["value"] for attribute in row["attrs"]}
                known = more["scope"], more["tid"], more["op_schema"]
                nodes.append(_Node(row["id"], ended, row["name"], *known, row["inputs"]))
        self._stretches: list[list[_Node]] = []
        for node in sorted(nodes, key=lambda node: node.number):
            if node.name.startswith(MARK + STRETCH):
                self._stretches.append([])
            if self._stretches:
                self._stretches[-1].append(node)

    def events(self, mark: Event) -> Iterator[Event]:
        """Yield the calls of the stretch with this mark, as if they had begun with it.

        The trace names each node's caller, but wrongly after an operator that raised an error.
        """
        begins, *nodes = self._stretches[int(mark.mark.removeprefix(STRETCH))]
        within: dict[int, list[_Node]] = {}  # by thread, the open nodes
        for node in nodes:
            is_main = node.thread == begins.thread
            above = within.setdefault(node.thread, [])
            while above and above[-1].ended < node.ended:
                above.pop()
            # The trace has all threads; of those, only autograd's works for this one.
            if not (is_main or above or node.name.startswith(NODE)):
                continue
            if node.scope in (_FUNCTION, _USER):
                depth, thread = (mark.depth, mark.thread) if is_main else (0, -node.thread)
                arguments = list(_arguments(node.inputs, node.schema))
                yield Event(node, node.name, depth + len(above), mark.began_ns, thread, arguments=arguments)
                above.append(node)


def _arguments(inputs: dict[str, list[Any]], schema: str) -> Iterator[Argument]:
    """Yield arguments with what the profiler tells of them. Where strides are not traced, they are empty."""
    strides = inputs.get("strides") or [[]] * len(inputs["values"])
    for value, shape, stride, kind in zip(inputs["values"], inputs["shapes"], strides, inputs["types"], strict=True):
        if kind.startswith("Tensor(") and "nullptr" not in kind:
            yield tuple(shape), tuple(stride), _tensor_type(kind), "", _device(value)
        elif kind.startswith("GenericList[Tensor(") and "Tensor?[]" not in schema:
            kinds = {_tensor_type(one) for one in kind.removeprefix("GenericList[").removesuffix("]").split(",")}
            name = f"{kinds.pop()}[]" if len(kinds) == 1 else "TensorList"
            device = "cuda" if any(_device(one) == "cuda" for one in value) else "cpu"
            yield tuple(map(tuple, shape)), tuple(map(tuple, stride)), name, "", device
        elif kind.startswith("GenericList[") and "Tensor" not in kind:
            yield (), (), "ScalarList", str(value)[:MOST_WORDS], ""
        elif kind in ("Int", "Bool", "Double"):
            yield (), (), "Scalar", str(value), ""
        else:
            yield (), (), "", "", ""


def _tensor_type(kind: str) -> str:
    return kind.removeprefix("Tensor(").removesuffix(")")


def _device(value: list[Any]) -> str:
    """Return "cuda", "cpu", or "" for a transform's wrapper."""
    return str(value[-1]).split(":")[0]


@contextmanager
def _without_warnings(torch: Any) -> Iterator[None]:
    """Silence the lines that torch writes to standard error whenever the trace goes on or off."""
    libraries = Path(torch.__file__).parent / "lib"
    library = next(libraries.glob("libc10.*"), None)
    try:
        level = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        yield
        return
    before = level.value
    level.value = max(before, _ERROR)
    try:
        yield
    finally:
        level.value = before
