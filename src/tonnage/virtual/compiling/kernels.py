"""Inductor's kernels without Triton: never compiled, never launched, and all equally fast.

Inductor's `CachingAutotuner` chooses among the configurations of a kernel. If there are several, it runs each on the
card, with a buffer to flush the cache; with one it does not. So the number of configurations affects memory, and it
can change: a reduction whose kernel uses many registers gets a second configuration with smaller blocks
(`_dynamic_scale_rblock`). For those kernels, and only where the register count can matter, Triton really compiles.
Register spills only exclude a configuration from the comparison, which has no effect here.
"""

import copy
import hashlib
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tonnage.virtual.compiling.cubin import register_count
from tonnage.virtual.cuda.patches import Patches
from tonnage.virtual.standins import StandIns

MILLISECONDS = 1.0  # time of every kernel; the first of several configurations wins
_MOST_REGISTERS = 255  # per thread, on all cards so far


class Launcher:
    """Replaces the launcher of a compiled kernel."""

    n_spills, n_regs, shared, store_cubin = 0, 0, 0, False

    def __init__(self, config: Any, cache_hash: str, on_launch: Callable[[], None] | None) -> None:
        self.config = config
        self.cache_hash = cache_hash
        self._on_launch = on_launch

    def __call__(self, *arguments: Any, **keywords: Any) -> None:
        if self._on_launch:
            self._on_launch()


class Kernel:
    """Replaces Triton's compiled kernel."""

    n_spills, shared = 0, 0

    def __init__(self, autotuner: Any, config: Any, compile: Callable[[], Any]) -> None:
        self._autotuner, self._config, self._compile = autotuner, config, compile
        self.hash = hashlib.sha256(f"{autotuner.fn.src}{config}".encode()).hexdigest()

    @property
    def n_regs(self) -> int:
        """Registers per thread; 0 where the true number would make no difference."""
        if not _registers_decide(self._autotuner, self._config):
            return 0
        return register_count(self._compile().asm["cubin"])


class CompileResult:
    """Replaces Inductor's class of this name: a kernel with its configuration."""

    def __init__(self, kernel: Kernel, config: Any, compile_meta: Any, on_launch: Callable[[], None] | None) -> None:
        self.kernel, self.config, self.compile_meta = kernel, config, compile_meta
        self._on_launch = on_launch

    def make_launcher(self) -> Launcher:
        """Return a launcher; there is nothing to load."""
        return Launcher(self.config, self.kernel.hash, self._on_launch)


def _registers_decide(autotuner: Any, config: Any) -> bool:
    """Whether some register count would give a kernel its second configuration (see `_dynamic_scale_rblock`)."""
    results = autotuner.compile_results if hasattr(autotuner, "compile_results") else autotuner.configs  # in torch 2.6
    if len(results) != 1:  # they will be timed anyway
        return False
    card = autotuner.device_props
    blocks = [size for name, size in config.kwargs.items() if name.startswith("R")]
    registers_of_block = _MOST_REGISTERS * card.warp_size * config.num_warps
    resident = max(card.regs_per_multiprocessor // registers_of_block, 1) * card.multi_processor_count
    in_grid = math.ceil(autotuner.size_hints["x"] / config.kwargs.get("XBLOCK", 1))
    return math.prod(blocks) > 64 and in_grid > resident


def skip_compilation(triton_heuristics: ModuleType, stand_ins: StandIns, patches: Patches) -> None:
    """Replace the compilation of a kernel's configuration."""
    autotuner_class = triton_heuristics.CachingAutotuner
    plain = autotuner_class._precompile_config

    def precompile_config(self: Any, config: Any, *warm_cache_only: bool) -> Any:
        if self.device_props.type != "cuda":
            return plain(self, config, *warm_cache_only)
        kernel = Kernel(self, config, lambda: _compile(triton_heuristics, self, config))
        on_launch = None
        if self.custom_kernel:
            on_launch = lambda: stand_ins.unmodelled(  # noqa: E731
                f"triton kernel {self.fn.__name__}", "not run: it writes into tensors that exist already"
            )
        result = CompileResult(kernel, config, _compile_meta(self, config), on_launch)
        return (kernel, result.make_launcher()) if warm_cache_only else result  # a pair in torch 2.6

    patches.set(autotuner_class, "_precompile_config", precompile_config)


def _compile(triton_heuristics: ModuleType, autotuner: Any, config: Any) -> Any:
    """Compile with Triton down to machine code, which needs no GPU."""
    meta = _compile_meta(autotuner, config)
    source = triton_heuristics.ASTSource(autotuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
    target = triton_heuristics.GPUTarget("cuda", meta["cc"], autotuner.device_props.warp_size)
    if hasattr(autotuner, "_create_compile_options"):
        options = autotuner._create_compile_options(config, meta)
    else:
        options = {key: meta[key] for key in ("num_warps", "num_stages", "debug")} | {"sanitize_overflow": False}
    return triton_heuristics.triton.compile(source, target=target, options=options)


def _compile_meta(autotuner: Any, config: Any) -> dict[str, Any]:
    """Return Inductor's compile options for a configuration; before torch 2.9 Inductor has no method for that."""
    if hasattr(autotuner, "_create_compile_meta"):
        meta: dict[str, Any] = autotuner._create_compile_meta(config)
        return meta
    meta = copy.deepcopy(autotuner.triton_meta)
    meta["constants"].update(config.kwargs)
    return meta | {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "debug": autotuner.inductor_meta.get("assert_indirect_indexing", True),
        "device_type": autotuner.device_props.type,
        "cc": autotuner.device_props.cc,
    }


def constant_times(benchmarking: ModuleType, patches: Patches) -> None:
    """Run benchmarked functions as rarely as possible; the buffers that benchmarking takes are still allocated."""
    benchmarker = getattr(benchmarking, "InductorBenchmarker", None)
    if benchmarker is None:  # torch 2.6 times with Triton, whose `do_bench` is replaced
        return
    plain = benchmarker.benchmark_gpu

    def benchmark_gpu(self: Any, _callable: Callable[[], Any], *arguments: Any, **keywords: Any) -> Any:
        keywords.update(estimation_iters=1, memory_warmup_iters=0, benchmark_iters=1)
        times = plain(self, _callable, **keywords)
        return [MILLISECONDS] if isinstance(times, list) else MILLISECONDS

    patches.set(benchmarker, "benchmark_gpu", benchmark_gpu)
