"""torch.compile on the virtual GPU: Dynamo, AOTAutograd and Inductor really run, kernels do nothing.

Inductor's generated code allocates every buffer itself and passes it to kernels, so memory is right without running
any. Autotuning also runs unchanged, because it takes memory on the card: copies of what a kernel overwrites, and a
buffer that flushes the L2 cache.

`kernels` replaces Triton's driver and launches, the compilation of Inductor's kernels, their launch and time, and the
timing by which Inductor decides whether to pad a matrix product. Here are the cache folders of Inductor and Triton, what
generated code needs that a CPU build lacks, and a few functions of torch._dynamo, until something is compiled.

Nothing here depends on how memory is allocated, so it works for CPU and CUDA builds of torch. Not modelled on a CPU
build: the CUDA graph trees of `mode="reduce-overhead"`. They checkpoint the allocator's pools and free memory under
live tensors; their peak is close to that of the same code without them.
"""

import functools
import importlib.util
import linecache
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from tonnage.hardware import Gpu
from tonnage.virtual.cache import cache_folder
from tonnage.virtual.compiling import kernels
from tonnage.virtual.cuda.devices import untouched
from tonnage.virtual.cuda.patches import Patches
from tonnage.virtual.driver.loading import is_cuda_build
from tonnage.virtual.standins import StandIns

__all__ = ["Act", "install", "source_of"]

Act = Callable[[ModuleType], None]
# Modules that cache facts about a card with functools.cache: its properties, whether Triton supports it.
_REMEMBERING = ("torch._inductor.", "torch._dynamo.device_interface", "torch.utils._triton")
_ORIGIN = re.compile(r"# Topologically Sorted Source Nodes: \[.*?\], Original ATen: \[(.*?)\]")
_FARTHEST = 60  # lines between a comment and the call or allocation that it describes


def install(gpu: Gpu, stand_ins: StandIns) -> tuple[dict[str, Act], Callable[[], None]]:
    """Prepare torch.compile. Returns actions to run after the import of modules, and a function that undoes all."""
    patches = Patches()
    if importlib.util.find_spec("triton") is None:

        def compile(model: Any = None, **options: Any) -> Any:  # the name that scripts see
            why = "run eagerly: Triton is not installed (pip install triton); compiled code often needs less memory"
            stand_ins.unmodelled("torch.compile", why)
            return model if model is not None else lambda function: function

        patches.set(torch, "compile", compile)
    if lacks_cuda := not is_cuda_build(Path(torch.__file__).parent):
        empty = functools.partial(torch.empty_strided, device="cuda")
        patches.set(
            torch._C._dynamo.guards, "_empty_strided_cuda", lambda size, stride, dtype: empty(size, stride, dtype=dtype)
        )
        # torch._inductor.cudagraph_trees looks up the name when it is imported.
        patches.set(torch._C, "_cuda_CUDAAllocator_AllocatorState", type("_AllocatorState", (), {}))
    keep_folder = _separate_caches(patches)

    def leave_alone(trace_rules: ModuleType) -> None:
        """Keep Dynamo out of our kernels and callbacks, which run at graph breaks, but not out of stand-in packages."""
        ours = [str(path) for path in Path(__file__).parents[1].iterdir() if path.name != "packages"]
        patches.set(trace_rules, "SKIP_DIRS", [*trace_rules.SKIP_DIRS, *ours])
        for package in ("tonnage.allocator", "tonnage.recording", "tonnage.script"):
            trace_rules.add(package)
        patches.on_undo(trace_rules._recompile_re)

    # Patches for modules of Triton and Inductor, applied right after their import.
    actions: dict[str, Act] = {
        "triton.backends": lambda module: kernels.replace_driver(module, gpu, patches),
        # Make Triton look its driver up again, now and on undo.
        "triton.runtime.driver": lambda module: patches.set_all(module.driver, {"_active": None, "_default": None}),
        "triton.runtime.jit": lambda module: kernels.quiet_launches(module, stand_ins, patches),
        # Real times would be the host's.
        "triton.testing": lambda module: patches.set_all(
            module,
            {"do_bench": kernels.do_bench, "do_bench_cudagraph": lambda fn, *_, **given: kernels.do_bench(fn, **given)},
        ),
        "torch._dynamo.trace_rules": leave_alone,
        # Compile in this process: a worker pool takes seconds to start and would have nothing to do. No binaries are kept.
        "torch._inductor.config": lambda module: patches.set_all(
            module, {"compile_threads": 1, "bundle_triton_into_fx_graph_cache": False}
        ),
        "torch._inductor.runtime.cache_dir_utils": keep_folder,
        "torch._inductor.runtime.triton_heuristics": lambda module: kernels.skip_compilation(
            module, stand_ins, patches
        ),
        "torch._inductor.runtime.benchmarking": lambda module: kernels.constant_times(module, patches),
        "torch._inductor.fx_passes.pad_mm": lambda module: kernels.decide_padding(module, gpu, patches),
        "torch._inductor.compile_fx": lambda module: _change_backend(module, stand_ins, patches, lacks_cuda),
    }
    for name, act in actions.items():
        if name in sys.modules:
            act(sys.modules[name])
    return actions, patches.undo


def _change_backend(compile_fx: ModuleType, stand_ins: StandIns, patches: Patches, lacks_cuda: bool) -> None:
    """Without a C++ compiler, which Inductor needs for host code, run graphs with host tensors eagerly.

    On a CPU build, run compiled code directly instead of capturing a CUDA graph, and report that.
    """
    plain = compile_fx.compile_fx

    def on_host(node: Any) -> bool:
        value = node.meta.get("example_value", node.meta.get("val"))
        return isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim() > 0

    def compile_or_not(model: Any, example_inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        from torch._inductor import cpp_builder

        try:
            has_compiler = shutil.which(cpp_builder.get_cpp_compiler()) is not None
        except Exception:  # InvalidCxxCompiler, defined elsewhere in older versions
            has_compiler = False
        if not has_compiler and any(map(on_host, getattr(model, "graph", model).nodes)):
            stand_ins.unmodelled(
                "torch.compile", "a graph with host tensors ran eagerly: no C++ compiler (install g++)"
            )
            return model
        return plain(model, example_inputs, *arguments, **keywords)

    def cudagraphify(model: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        stand_ins.unmodelled("torch.compile", "CUDA graphs left out: a CPU build of torch has no trees of them")
        return model

    patches.set(compile_fx, "compile_fx", compile_or_not)
    if lacks_cuda:
        patches.set(compile_fx, "cudagraphify", cudagraphify)


# The caches of torch.compile, on disk and in memory: entries must not be shared between a virtual and a real card.
# Inductor gets an empty folder for each run, as on a machine that has never compiled the script: there it benchmarks
# kernels, which takes memory. The timings of a virtual GPU would spoil the user's own folder. Triton's binaries depend
# only on source, options and compute capability, so they are kept.


def _separate_caches(patches: Patches) -> Act:
    """Set cache folders in the environment and drop what was compiled for another card.

    Returns an action that makes Inductor use its folder, even if the script sets another in the environment.
    """
    folder = tempfile.mkdtemp(prefix="inductor-", dir=cache_folder())
    patches.on_undo(lambda: shutil.rmtree(folder, ignore_errors=True))
    patches.set_item(os.environ, "TORCHINDUCTOR_CACHE_DIR", folder)
    patches.set_item(os.environ, "TRITON_CACHE_DIR", str(cache_folder() / "triton"))
    with untouched():  # resetting Dynamo initialises CUDA
        _forget()
    patches.on_undo(_forget)

    def keep_folder(cache_dir_utils: ModuleType) -> None:
        plain, is_open = cache_dir_utils.cache_dir, [True]
        # Other modules keep a reference to this function.
        patches.set(cache_dir_utils, "cache_dir", lambda: folder if is_open else plain())
        patches.on_undo(is_open.clear)

    return keep_folder


def _forget() -> None:
    """Drop compiled functions and cached facts about the card, if anything was compiled."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_REMEMBERING):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
    if (interface := sys.modules.get("torch._dynamo.device_interface")) is not None:
        interface.caching_worker_device_properties.clear()
    # A reset imports Inductor, which takes seconds.
    if (frames := sys.modules.get("torch._dynamo.convert_frame")) is not None and frames.FRAME_COUNTER:
        sys.modules["torch._dynamo"].reset()


def source_of(code_file: str, line_number: int) -> tuple[str, str] | None:
    """Return the script's innermost line ("train.py:41") and the operator ("aten.mm") for a line of generated code.

    None if the file is not one of Inductor's; either part is empty where Inductor does not know it.
    """
    codecache = sys.modules.get("torch._inductor.codecache")
    if codecache is None or code_file not in codecache.PyCodeCache.linemaps:
        return None
    frames = codecache.PyCodeCache.stack_frames_for_code(code_file, line_number)
    line = f"{os.path.basename(frames[0]['filename'])}:{frames[0]['line']}" if frames else ""
    for number in range(line_number, max(line_number - _FARTHEST, 0), -1):
        if found := _ORIGIN.search(linecache.getline(code_file, number)):
            return line, found[1].split(", ")[-1]
    return line, ""


# Stand-ins for a few functions of torch._dynamo, which takes a second to import. Optimizers, checkpoints and transformers
# ask it only for decorators. Until something is compiled they get stand-ins; what these recorded is replayed when
# Dynamo's code runs.

_told: list[Act] = []


def dynamo_answers() -> dict[str, Any]:
    """Return the stand-ins, by attribute of torch._dynamo."""
    return {
        "disable": _disable,
        "allow_in_graph": functools.partial(_mark, "allow_in_graph"),
        "assume_constant_result": functools.partial(_mark, "assume_constant_result"),
        "graph_break": lambda *_, **__: None,
        "reset": lambda: None,
        "is_compiling": lambda: False,
    }


def pass_on_to_dynamo(dynamo: ModuleType) -> None:
    """Replay the recorded calls, now that Dynamo's code has run."""
    while _told:
        _told.pop(0)(dynamo)


def _mark(name: str, function: Any = None) -> Any:
    if function is None:
        return functools.partial(_mark, name)
    _told.append(lambda dynamo: getattr(dynamo, name)(function))
    return function


def _disable(fn: Any = None, recursive: bool = True, **options: Any) -> Any:
    """Replace `torch._dynamo.disable`: Dynamo skips the function, even if it is loaded later."""
    if fn is None:
        return functools.partial(_disable, recursive=recursive, **options)
    if not isinstance(fn, FunctionType):
        import torch._dynamo.eval_frame  # importing the submodule runs the package's code

        return torch._dynamo.disable(fn, recursive, **options)
    target = fn

    @functools.wraps(fn)
    def disabled(*arguments: Any, **keywords: Any) -> Any:
        return target(*arguments, **keywords)

    def disable(dynamo: ModuleType) -> None:
        nonlocal target
        target = dynamo.disable(fn, recursive, **options)
        dynamo.eval_frame.skip_code(disabled.__code__)  # type: ignore[attr-defined]

    disabled._torchdynamo_disable = True  # type: ignore[attr-defined]
    disabled._torchdynamo_orig_callable = fn  # type: ignore[attr-defined]
    _told.append(disable)
    return disabled
