"""Makes other libraries work on a virtual GPU: what must import, and what cannot run and is reported.

- torchvision built for CUDA cannot load its operators beside a CPU torch and refuses to import, which breaks much of
  timm and transformers. Its operators are declared by name instead.
- torch.compile and Triton are handled in `compiling`, which is notified here when their modules are imported.
- Packages that need a GPU to be built, and are not installed, have stand-ins: see `packages`.
- CUDA extensions are refused: their allocations are unknown.
- transformers' index of its own modules is cached between runs.
"""

import ctypes
import hashlib
import importlib.abc
import importlib.util
import marshal
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tonnage.errors import NotModelled
from tonnage.hardware import Gpu
from tonnage.virtual.cache import cache_folder
from tonnage.virtual.imports import lazily, release, wake
from tonnage.virtual.packages import Packages, actions_after_imports
from tonnage.virtual.standins import StandIns
from tonnage.virtual.uploads import HUB, leave_out_uploads

if TYPE_CHECKING:
    from tonnage.virtual.compiling import Act

_DECLARED = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[Any] = []  # a torch.library.Library unregisters when it dies


# Parts of Dynamo that need nothing of its package, and that light scripts import (torchvision imports `utils`).
_BESIDE_DYNAMO = ("_trace_wrapped_higher_order_op", "config", "graph_utils", "metrics_context", "utils")


class _Present(importlib.abc.Loader):
    """Loads a module that was imported after it was looked up: its code must not run a second time."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._own_spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec


class _Watcher(importlib.abc.MetaPathFinder):
    """Acts just before or after another library's code runs."""

    def __init__(self, actions: "dict[str, Act]") -> None:
        self._actions = {**actions, "transformers.utils.import_utils": keep_index}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        # These need the code of torch._dynamo to have run: they import each other, and only in this order.
        package, _, part = name.rpartition(".")
        if name == "torch._inductor.utils" or (package == "torch._dynamo" and part not in _BESIDE_DYNAMO):
            wake("torch._dynamo")
            if target is None and (module := sys.modules.get(name)):
                module.__spec__ = ModuleSpec(name, _Present(module))  # importlib uses this spec
                return module.__spec__
        if act := self._actions.get(name):
            spec = self._plain_spec(name)
            if spec and spec.loader:
                plain = spec.loader.exec_module

                def exec_module(module: ModuleType) -> None:
                    plain(module)
                    act(module)

                spec.loader.exec_module = exec_module
            return spec
        if name == "torchvision":
            self._declare_operators()
        elif name == "torch._dynamo":
            from tonnage.virtual.compiling import dynamo_answers, pass_on_to_dynamo

            return lazily(self._plain_spec(name), dynamo_answers(), pass_on_to_dynamo)
        return None

    def _plain_spec(self, name: str) -> ModuleSpec | None:
        sys.meta_path.remove(self)
        try:
            return importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)

    def _declare_operators(self) -> None:
        spec = self._plain_spec("torchvision")
        if _libraries or not spec or not spec.origin:
            return
        with suppress(OSError):
            if library := next(Path(spec.origin).parent.glob("_C*.so"), None):
                ctypes.CDLL(str(library))
                return  # its own operators load
        import torch

        declared = torch.library.Library("torchvision", "FRAGMENT")
        _libraries.append(declared)
        for schema in _DECLARED:
            if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):  # they may be defined already
                declared.define(schema)


_EXTENSIONS = "torch.utils.cpp_extension"


def install_companions(stand_ins: StandIns, gpu: Gpu) -> Callable[[], None]:
    """Watch imports and patch functions that need a GPU; the returned function undoes it."""
    from tonnage.virtual import compiling  # imports torch, which must come after the native library
    from tonnage.virtual.cuda.patches import Patches

    patches = Patches()

    def refuse(builder: str, /, *arguments: Any, **keywords: Any) -> Any:
        what = keywords.get("name") or (arguments[0] if arguments else "")
        stand_ins.unmodelled(f"torch.utils.cpp_extension.{builder}", "a CUDA extension of the script's own")
        raise NotModelled(
            f"The script builds a CUDA extension of its own ({what}), and nobody here knows what it allocates.",
            hint="Leave the extension out for a virtual run, or register its operators with torch.library and a fake.",
        )

    def refuse_builders(cpp_extension: ModuleType) -> None:
        for name in ("load", "load_inline", "CUDAExtension"):
            patches.set(cpp_extension, name, partial(refuse, name))

    # Not imported here: it initialises CUDA, and a child forked by the script could not use the card any more.
    if cpp_extension := sys.modules.get(_EXTENSIONS):
        refuse_builders(cpp_extension)
    act_on_hub = partial(leave_out_uploads, stand_ins=stand_ins, patches=patches)
    if hub := sys.modules.get(HUB):
        act_on_hub(hub)
    actions, undo_compiling = compiling.install(gpu, stand_ins)
    packages = Packages(stand_ins)
    watcher = _Watcher(
        {**actions, **actions_after_imports(packages, stand_ins), _EXTENSIONS: refuse_builders, HUB: act_on_hub}
    )
    sys.meta_path.insert(0, watcher)
    packages.install()

    def undo() -> None:
        release("torch._dynamo")
        sys.meta_path.remove(watcher)
        packages.remove()
        patches.undo()
        undo_compiling()

    return undo


def keep_index(module: ModuleType) -> None:
    """Make `transformers.utils.import_utils` read the index of all models from the cache.

    At every import transformers reads its 3,100 files to find where each name is defined: a second, with the same
    result for an installed version. An editable checkout is always read, because changes there are not detected.
    """
    models = Path(str(module.__file__)).parents[1] / "models"
    if not {"site-packages", "dist-packages"} & set(models.parts):
        return
    make = module.define_import_structure
    stamp = f"{models} {version('transformers')} {models.stat().st_mtime_ns} {marshal.version}"
    kept = cache_folder() / f"transformers-{hashlib.sha256(stamp.encode()).hexdigest()[:20]}.index"

    def whole_index() -> Any:
        with suppress(OSError, EOFError, ValueError, TypeError):
            if index := marshal.loads(kept.read_bytes()):
                return index
        index, scratch = make(str(models)), kept.with_suffix(f".{os.getpid()}")
        with suppress(OSError):  # with a full or read-only disk, the next run just takes a second longer
            scratch.write_bytes(marshal.dumps(index))
            scratch.replace(kept)
        return index

    @lru_cache
    def define_import_structure(module_path: Any, prefix: str | None = None) -> Any:
        if Path(module_path) not in (models, models / "__init__.py"):
            return make(module_path, prefix)
        index = whole_index()
        if prefix is None:
            return index
        return {needs: {f"{prefix}.{name}": names for name, names in files.items()} for needs, files in index.items()}

    module.define_import_structure = define_import_structure  # type: ignore[attr-defined]
