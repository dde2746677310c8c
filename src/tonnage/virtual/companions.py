"""Other libraries on a GPU that is not there: what must import, and what cannot run and is said so.

- torchvision built for CUDA cannot load its operators beside a CPU torch and then refuses to import, and with it half
  of timm and transformers. Its operators are declared by name instead.
- Triton kernels write into tensors that their caller made, so a launch that does nothing leaves memory right.
- torch.compile runs its function eagerly, so its machinery is not loaded for nothing. CUDA extensions are refused:
  nobody knows what they allocate.
"""

import builtins
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

from tonnage.errors import TonnageError
from tonnage.virtual.standins import StandIns

_DECLARED = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[Any] = []  # a torch.library.Library unregisters when it dies


class NotModelled(TonnageError):
    """The script needs what the virtual GPU does not have."""


class _Watcher(importlib.abc.MetaPathFinder):
    """Acts just before torchvision's code runs, and just after Triton's launcher is defined."""

    def __init__(self, stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision":
            self._declare_operators()
        elif name == "triton.runtime.jit":
            return self._with_quiet_launches(name)
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
            library.define(schema)

    def _with_quiet_launches(self, name: str) -> importlib.machinery.ModuleSpec | None:
        spec = self._plain_spec(name)
        if spec and spec.loader:
            plain = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                plain(module)
                quiet_launches(module, self._stand_ins)

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
    restore_dynamo = _spare_dynamo()
    for name in _BUILDERS:
        setattr(cpp_extension, name, _refuse(name, stand_ins))

    def undo() -> None:
        restore_dynamo()
        sys.meta_path.remove(watcher)
        for owner, name, value in saved:
            setattr(owner, name, value)

    return undo


class _NoDynamo:
    """Stands for `torch._dynamo` where it is imported only to be told that nothing is compiled; else becomes it."""

    def disable(self, function: Any, *_: Any, **__: Any) -> Any:
        """What is never compiled needs no disabling."""
        return function

    def graph_break(self, *_: Any, **__: Any) -> None:
        """There is no graph."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("torch._dynamo"), name)


# They import torch._dynamo at every first optimizer and checkpoint: a second, for nothing where nothing is compiled.
_ASK_FOR_NOTHING = frozenset(("torch._compile", "torch.optim.optimizer"))


def _spare_dynamo() -> Callable[[], None]:
    import torch

    plain, stand_in = builtins.__import__, _NoDynamo()

    def spare(name: str, globals: Any = None, *arguments: Any, **keywords: Any) -> Any:
        if name == "torch._dynamo" and name not in sys.modules and globals and globals["__name__"] in _ASK_FOR_NOTHING:
            torch._dynamo = stand_in
            return torch
        return plain(name, globals, *arguments, **keywords)

    builtins.__import__ = spare

    def undo() -> None:
        builtins.__import__ = plain
        if vars(torch).get("_dynamo") is stand_in:
            del torch._dynamo

    return undo


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
