"""Other libraries on a GPU that is not there: what must import, and what cannot run and is said so.

- torchvision built for CUDA cannot load its operators beside a CPU torch and then refuses to import, and with it half
  of timm and transformers. Its operators are declared by name instead.
- Triton kernels write into tensors that their caller made, so a launch that does nothing leaves memory right.
- torch.compile runs its function eagerly, so its machinery is not loaded for nothing. CUDA extensions are refused:
  nobody knows what they allocate.
"""

import ctypes
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tonnage.errors import NotModelled
from tonnage.virtual.imports import lazily, release, wake
from tonnage.virtual.kept_index import keep_index
from tonnage.virtual.standins import StandIns

_DECLARED = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[Any] = []  # a torch.library.Library unregisters when it dies


class _Watcher(importlib.abc.MetaPathFinder):
    """Acts just before or after the code of another library runs."""

    def __init__(self, stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision":
            self._declare_operators()
        elif name == "triton.runtime.jit":
            return self._and_then(name, lambda module: quiet_launches(module, self._stand_ins))
        elif name == "transformers.utils.import_utils":
            return self._and_then(name, keep_index)
        elif name == "torch._inductor.utils":
            wake("torch._dynamo")  # they import each other, and only in this order
        elif name == "torch._dynamo":
            return lazily(self._plain_spec(name), _DYNAMO_ASKED_FOR_NOTHING)
        return None

    def _plain_spec(self, name: str) -> importlib.machinery.ModuleSpec | None:
        sys.meta_path.remove(self)
        try:
            return importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)

    def _declare_operators(self) -> None:
        spec = self._plain_spec("torchvision")
        if _libraries or not spec or not spec.origin or _loads(Path(spec.origin).parent):
            return
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        _libraries.append(library)
        for schema in _DECLARED:
            if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):  # somebody may have named them before
                library.define(schema)

    def _and_then(self, name: str, act: Callable[[ModuleType], None]) -> importlib.machinery.ModuleSpec | None:
        spec = self._plain_spec(name)
        if spec and spec.loader:
            plain = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                plain(module)
                act(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install_companions(stand_ins: StandIns) -> Callable[[], None]:
    """Watch imports and patch what only a GPU could do; the result undoes it."""
    import torch
    from torch.utils import cpp_extension

    watcher = _Watcher(stand_ins)
    sys.meta_path.insert(0, watcher)
    saved = [(torch, "compile", torch.compile), *((cpp_extension, n, getattr(cpp_extension, n)) for n in _BUILDERS)]
    torch.compile = _eager_compile(stand_ins)
    for name in _BUILDERS:
        setattr(cpp_extension, name, _refuse(name, stand_ins))

    def undo() -> None:
        release("torch._dynamo")
        sys.meta_path.remove(watcher)
        for owner, name, value in saved:
            setattr(owner, name, value)

    return undo


def _as_it_is(function: Any = None, *_: Any, **__: Any) -> Any:
    """A decorator that tells a compiler how to treat a function."""
    return _as_it_is if function is None else function


def _nothing(*_: Any) -> None:
    """There is no graph to break and no cache to reset."""


# Optimizers, checkpoints and transformers ask torch._dynamo for these: a second, for nothing where nothing is compiled.
_DYNAMO_ASKED_FOR_NOTHING = {
    "disable": _as_it_is, "allow_in_graph": _as_it_is, "assume_constant_result": _as_it_is,
    "graph_break": _nothing, "reset": _nothing, "is_compiling": lambda: False,
}  # fmt: skip


_BUILDERS = ("load", "load_inline", "CUDAExtension")


def _eager_compile(stand_ins: StandIns) -> Callable[..., Any]:
    def compile(model: Any = None, **options: Any) -> Any:  # the name that scripts see
        stand_ins.unmodelled("torch.compile", "run eagerly: a compiled graph allocates other, often fewer, temporaries")
        return model if model is not None else lambda function: function

    return compile


def _refuse(name: str, stand_ins: StandIns) -> Callable[..., Any]:
    def refuse(*arguments: Any, **keywords: Any) -> Any:
        what = keywords.get("name") or (arguments[0] if arguments else "")
        stand_ins.unmodelled(f"torch.utils.cpp_extension.{name}", "a CUDA extension of the script's own")
        raise NotModelled(
            f"The script builds a CUDA extension of its own ({what}), and nobody here knows what it allocates.",
            hint="Leave the extension out for a virtual run, or register its operators with torch.library and a fake.",
        )

    return refuse


def quiet_launches(module: ModuleType, stand_ins: StandIns) -> None:
    """Triton's launches do nothing, and are counted."""

    def run(self: Any, *arguments: Any, **keywords: Any) -> None:
        name = getattr(self, "__name__", None) or getattr(getattr(self, "fn", None), "__name__", "kernel")
        stand_ins.unmodelled(f"triton kernel {name}", "not run: it writes into tensors that exist already")

    module.JITFunction.run = run


def _loads(folder: Path) -> bool:
    try:
        for library in folder.glob("_C*.so"):
            ctypes.CDLL(str(library))
            return True
    except OSError:
        pass
    return False
