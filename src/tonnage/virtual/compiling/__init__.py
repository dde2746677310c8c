"""torch.compile on the virtual GPU: Dynamo, AOTAutograd and Inductor really run, kernels do nothing.

Inductor's generated code allocates every buffer itself and passes it to kernels, so memory is right without running
any. Autotuning also runs unchanged, because it takes memory on the card: copies of what a kernel overwrites, and a
buffer that flushes the L2 cache.

| module     | replaces                                                                     |
|------------|------------------------------------------------------------------------------|
| `kernels`  | Triton's compilation of a kernel, its launch and its time                    |
| `cubin`    | nothing: reads register counts from the few kernels that Triton does compile |
| `driver`   | Triton's driver, launches of a script's own kernels, `triton.testing`        |
| `caches`   | the cache folders of Inductor and Triton                                     |
| `sources`  | nothing: maps a line of generated code to the script's line                  |
| `dynamo`   | a few functions of torch._dynamo, until something is compiled                |
| `bindings` | what generated code needs that a CPU build of torch lacks                    |

Apart from `bindings` it does not depend on how memory is allocated, so it works for CPU and CUDA builds of torch.
"""

import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tonnage.hardware import Gpu
from tonnage.virtual.compiling import bindings, caches, driver, kernels, padding
from tonnage.virtual.compiling.sources import source_of
from tonnage.virtual.cuda.patches import Patches
from tonnage.virtual.standins import StandIns

__all__ = ["Act", "install", "source_of"]

Act = Callable[[ModuleType], None]


def install(gpu: Gpu, stand_ins: StandIns) -> tuple[dict[str, Act], Callable[[], None]]:
    """Prepare torch.compile. Returns actions to run after the import of modules, and a function that undoes all."""
    patches = Patches()
    if importlib.util.find_spec("triton") is None:
        patches.set(torch, "compile", _eager(stand_ins, "Triton is not installed (pip install triton)"))
    if bindings.is_needed():
        bindings.install(patches)
    folder = caches.install(patches)

    def configure(config: ModuleType) -> None:
        """Compile in this process: a worker pool takes seconds to start and would have nothing to do."""
        patches.set(config, "compile_threads", 1)
        patches.set(config, "bundle_triton_into_fx_graph_cache", False)  # there are no binaries to keep

    # Patches for modules of Triton and Inductor, applied right after their import.
    actions: dict[str, Act] = {
        "triton.backends": lambda module: driver.replace_driver(module, gpu, patches),
        "triton.runtime.driver": lambda module: driver.forget_driver(module, patches),
        "triton.runtime.jit": lambda module: driver.quiet_launches(module, stand_ins, patches),
        "triton.testing": lambda module: driver.constant_times(module, patches),
        "torch._dynamo.trace_rules": lambda module: _leave_alone(module, patches),
        "torch._inductor.config": configure,
        "torch._inductor.runtime.cache_dir_utils": lambda module: caches.keep_folder(module, folder, patches),
        "torch._inductor.runtime.triton_heuristics": lambda module: kernels.skip_compilation(
            module, stand_ins, patches
        ),
        "torch._inductor.runtime.benchmarking": lambda module: kernels.constant_times(module, patches),
        "torch._inductor.fx_passes.pad_mm": lambda module: padding.decide_padding(module, gpu, patches),
        "torch._inductor.compile_fx": lambda module: _change_backend(module, stand_ins, patches),
    }
    for name, act in actions.items():
        if name in sys.modules:
            act(sys.modules[name])
    return actions, patches.undo


def _leave_alone(trace_rules: ModuleType, patches: Patches) -> None:
    """Keep Dynamo out of our kernels and callbacks, which run at graph breaks, but not out of stand-in packages."""
    virtual = Path(__file__).parents[1]
    ours = [str(path) for path in virtual.iterdir() if path.name != "packages"]
    patches.set(trace_rules, "SKIP_DIRS", [*trace_rules.SKIP_DIRS, *ours])
    for package in ("tonnage.allocator", "tonnage.recording", "tonnage.script"):
        trace_rules.add(package)
    patches.on_undo(trace_rules._recompile_re)


def _change_backend(compile_fx: ModuleType, stand_ins: StandIns, patches: Patches) -> None:
    """Without a C++ compiler, which Inductor needs for host code, run graphs with host tensors eagerly."""
    plain = compile_fx.compile_fx

    def on_host(node: Any) -> bool:
        value = node.meta.get("example_value", node.meta.get("val"))
        return isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim() > 0

    def compile_or_not(model: Any, example_inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        if not _has_compiler() and any(map(on_host, getattr(model, "graph", model).nodes)):
            stand_ins.unmodelled(
                "torch.compile", "a graph with host tensors ran eagerly: no C++ compiler (install g++)"
            )
            return model
        return plain(model, example_inputs, *arguments, **keywords)

    patches.set(compile_fx, "compile_fx", compile_or_not)
    if bindings.is_needed():
        bindings.run_without_graphs(compile_fx, stand_ins, patches)


def _has_compiler() -> bool:
    from torch._inductor import cpp_builder

    try:
        return shutil.which(cpp_builder.get_cpp_compiler()) is not None
    except Exception:  # InvalidCxxCompiler, defined elsewhere in older versions
        return False


def _eager(stand_ins: StandIns, reason: str) -> Callable[..., Any]:
    def compile(model: Any = None, **options: Any) -> Any:  # the name that scripts see
        stand_ins.unmodelled("torch.compile", f"run eagerly: {reason}; compiled code often needs less memory")
        return model if model is not None else lambda function: function

    return compile
