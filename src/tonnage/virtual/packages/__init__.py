"""Stand-ins for Python packages that need a GPU to be built, for machines without them.

A stand-in has the package's functions and allocates what its host code does, in the same order, but computes nothing.
It is used when the script imports the package or requests it from another library; a library that only checks for the
package sees what is installed. An installed package is always used instead.

Some libraries are adjusted after they are imported:

- transformers is asked for flash-attn by a setting, diffusers for xformers. They check once what is installed; if a
  script then asks for a missing package, its stand-in is placed and they are updated.
- An installed xformers is usable where its own library does not load: it mostly uses torch's operators.
- vLLM would start its engine in another process, which has no virtual GPU.
- DeepSpeed compiles optimizer operators with nvcc at first use; stand-ins update their arguments in place. Only LAMB's
  allocates on the card: two rows of partial norms and a coefficient for each parameter. The others pass tensor lists
  as kernel arguments, or run on the host, where the values are not needed.
"""

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

from tonnage.errors import NotModelled
from tonnage.virtual.standins import StandIns

Act = Callable[[ModuleType], None]
# The version whose memory each stand-in models.
VERSIONS = {"flash_attn": "2.8.3", "xformers": "0.0.35"}
_HERE = Path(__file__).parent
_INSTALLED = ("site-packages", "dist-packages")


class Packages(MetaPathFinder):
    """Finds stand-ins, after everything that is installed."""

    def __init__(self, stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins
        self._placed: set[str] = set()

    def install(self) -> None:
        sys.meta_path.append(self)

    def remove(self) -> None:
        """Remove the stand-ins and their imported modules."""
        sys.meta_path.remove(self)
        for name in [name for name in sys.modules if name.partition(".")[0] in self._placed]:
            del sys.modules[name]

    def place(self, name: str) -> bool:
        """Make the package visible to every library. Returns False if it is installed and needs no stand-in."""
        if name in self._placed:
            return True
        if importlib.util.find_spec(name):
            return False
        self._placed.add(name)
        self._stand_ins.assume(
            name, f"{name} is not installed: a stand-in allocated what {name} {VERSIONS[name]} does."
        )
        return True

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a stand-in; raise ModuleNotFoundError for a submodule that it lacks."""
        package, _, rest = name.partition(".")
        if package not in VERSIONS:
            return None
        asker = _asker()
        if rest and asker and package in self._placed:  # this finder comes last: no other has such a module
            raise ModuleNotFoundError(
                f"{package} is not installed, and its stand-in has no {name}. Install {package}, or leave {name} out.",
                name=name,
            )
        if not rest and asker and not any(folder in asker for folder in _INSTALLED):
            self.place(package)
        if name not in self._placed:
            return None
        folder = _HERE / name
        return importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        """Return the distributions of the stand-ins in use, for `importlib.metadata`."""
        wanted = (context.name or "").replace("-", "_").lower() if context else ""
        return [_Distribution(name) for name in self._placed if wanted in ("", name)]


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            return f"Metadata-Version: 2.1\nName: {self._name}\nVersion: {VERSIONS[self._name]}\n"
        return self._name if filename == "top_level.txt" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return _HERE / path


def _asker() -> str | None:
    """Return the file whose import statement led here, or None if a caller only checks for a module."""
    frame: FrameType | None = sys._getframe(2)
    while frame:
        file = frame.f_code.co_filename
        if file.endswith(("importlib/util.py", "importlib.util>")):
            return None
        if not file.startswith("<frozen ") and "/importlib/" not in file and "/tonnage/virtual/" not in file:
            return file
        frame = frame.f_back
    return None


def actions_after_imports(packages: Packages, stand_ins: StandIns) -> dict[str, Act]:
    """Return what to do after each of these modules has been imported."""
    adjusts, sets = "_check_and_adjust_attn_implementation", "set_use_memory_efficient_attention_xformers"
    flash, xformers = partial(_for_transformers, packages), partial(_for_diffusers, packages)
    return {
        "transformers.modeling_utils": lambda module: _ask_first(module.PreTrainedModel, adjusts, flash),
        "diffusers.models.attention_processor": lambda module: _ask_first(module.Attention, sets, xformers),
        "diffusers.models.attention": lambda module: _ask_first(
            getattr(module, "AttentionModuleMixin", None), sets, xformers
        ),
        "deepspeed.ops.op_builder.builder": lambda module: supply_deepspeed(module, stand_ins),
        "vllm": lambda module: _in_one_process(stand_ins),
        "xformers._cpp_lib": lambda module: _complete(module, stand_ins),
    }


def _ask_first(owner: Any, name: str, ask: Callable[..., None]) -> None:
    """Call `ask` with a method's arguments before the method, if the installed version has it."""
    plain = getattr(owner, name, None)
    if plain is None:
        return

    @wraps(plain)
    def asked(self: Any, *arguments: Any, **keywords: Any) -> Any:
        ask(*arguments, **keywords)
        return plain(self, *arguments, **keywords)

    setattr(owner, name, asked)


def _for_transformers(packages: Packages, /, *arguments: Any, **keywords: Any) -> None:
    wanted = keywords.get("attn_implementation", arguments[0] if arguments else None)
    if not str(wanted).endswith("flash_attention_2") or not packages.place("flash_attn"):
        return
    utils: Any = sys.modules["transformers.utils.import_utils"]
    getattr(utils, "PACKAGE_DISTRIBUTION_MAPPING", {})["flash_attn"] = ["flash-attn"]
    for name in dir(utils):
        if name.startswith("is_flash_attn") and hasattr(getattr(utils, name), "cache_clear"):
            getattr(utils, name).cache_clear()


def _for_diffusers(packages: Packages, /, *arguments: Any, **keywords: Any) -> None:
    wanted = next(iter([*arguments, *keywords.values()]), False)
    if not wanted or not packages.place("xformers"):
        return
    import xformers.ops  # the stand-in

    told = {
        "diffusers.utils.import_utils": {"_xformers_available": True, "_xformers_version": VERSIONS["xformers"]},
        "diffusers.models.attention_processor": {"xformers": xformers},
        "diffusers.models.attention": {"xops": xformers.ops},
        "diffusers.models.attention_dispatch": {"_CAN_USE_XFORMERS_ATTN": True, "xops": xformers.ops},
    }
    for name, values in told.items():
        if name in sys.modules:
            vars(sys.modules[name]).update(values)


def _complete(module: ModuleType, stand_ins: StandIns) -> None:
    """Mark an installed xformers as built for CUDA if its library does not load with this torch.

    Its attention uses torch's operators and its other kernels are Triton's; its library only has sparse products.
    """
    if getattr(module, "_cpp_library_load_exception", None) is not None:
        module._built_with_cuda = True  # type: ignore[attr-defined]
        stand_ins.assume(
            "xformers", "Its own library does not load beside this torch; its attention, which is torch's, ran."
        )


def _in_one_process(stand_ins: StandIns) -> None:
    """Make vLLM run its engine in this process, and sample with torch, because FlashInfer compiles kernels at first
    use.

    vLLM still inspects a model's class in a child process, whose torch finds the stand-in CUDA libraries by
    LD_LIBRARY_PATH; Triton finds them by its own variable.
    """
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_FLASHINFER_SAMPLER"):
        os.environ.setdefault(name, "0")
    paths = [os.environ.get("TRITON_LIBCUDA_PATH"), os.environ.get("LD_LIBRARY_PATH")]
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in paths if path)
    stand_ins.assume("vllm", "Its engine ran in one process and sampled with torch's operators, not FlashInfer's.")


# DeepSpeed

_PARTIAL_NORMS = 512


def _update(*_: Any) -> int:
    return 0


def _lamb(parameter: Any, *_: Any) -> Any:
    import torch

    kind = torch.float32 if parameter.dtype == torch.float16 else parameter.dtype
    norms = [parameter.new_empty(_PARTIAL_NORMS, dtype=kind) for _ in range(2)]
    coefficient = parameter.new_empty(1, dtype=kind)
    del norms
    return coefficient


_OPERATORS: dict[str, dict[str, Any]] = {
    "fused_adam": {"multi_tensor_adam": _update},
    "fused_lion": {"multi_tensor_lion": _update},
    "fused_lamb": {"lamb": _lamb},
    **{
        f"cpu_{name}": dict.fromkeys(
            (f"create_{name}", f"destroy_{name}", f"{name}_update", f"{name}_rollback"), _update
        )
        for name in ("adam", "adagrad", "lion")
    },
}


def supply_deepspeed(module: ModuleType, stand_ins: StandIns) -> None:
    """Make `deepspeed.ops.op_builder.builder` return a stand-in where it would compile an operator."""

    def jit_load(self: Any, verbose: bool = True) -> Any:
        functions = _OPERATORS.get(self.name)
        if functions is None:
            stand_ins.unmodelled(f"DeepSpeed's {self.name}", "compiled at first use")
            raise NotModelled(
                f"DeepSpeed compiles its operator {self.name} at first use, and it has no stand-in here.",
                hint=f"Leave it out for a virtual run. These have one: {', '.join(sorted(_OPERATORS))}.",
            )
        stand_ins.assume(f"DeepSpeed's {self.name}", "It is compiled at first use: a stand-in allocated what it does.")
        return SimpleNamespace(**functions)

    module.OpBuilder.jit_load = jit_load
