"""Triton without a GPU, and Inductor's kernels without Triton: never compiled, never launched, and all equally fast.

Triton's own driver builds a small C library and queries the CUDA driver; here it describes the virtual card, and
launches of a script's own kernels are only counted.

Inductor's `CachingAutotuner` chooses among the configurations of a kernel. If there are several, it runs each on the
card, with a buffer to flush the cache; with one it does not. So the number of configurations affects memory, and it
can change: a reduction whose kernel uses many registers gets a second configuration with smaller blocks
(`_dynamic_scale_rblock`). For those kernels, and only where the register count can matter, Triton really compiles.
Register spills only exclude a configuration from the comparison, which has no effect here.
"""

import copy
import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tonnage.hardware import Gpu
from tonnage.virtual.cuda.patches import Patches
from tonnage.virtual.standins import StandIns

MILLISECONDS = 1.0  # time of every kernel; the first of several configurations wins
_FLUSH_BYTES = 256 * 2**20  # what Triton's CUDA driver writes to flush the L2 cache before each timing
_MOST_REGISTERS = 255  # per thread, on all cards so far
_NOT_RUN = "not run: it writes into tensors that exist already"

# Triton


class VirtualDriver:
    """The driver of the virtual card, with the methods of Triton's CudaDriver."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        properties = {  # by Triton's names
            "max_shared_mem": gpu.shared_memory_per_block_optin_bytes, "max_num_regs": gpu.registers_per_sm,
            "multiprocessor_count": gpu.sm_count, "warpSize": gpu.warp_size, "sm_clock_rate": gpu.clock_mhz * 1000,
            "mem_clock_rate": gpu.memory_clock_mhz * 1000, "mem_bus_width": gpu.memory_bus_bits,
        }  # fmt: skip
        self.utils = SimpleNamespace(get_device_properties=lambda device: dict(properties))

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        major, minor = self._gpu.compute_capability
        return GPUTarget("cuda", major * 10 + minor, self._gpu.warp_size)

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return self._gpu.compute_capability

    def get_current_device(self) -> int:
        return torch.cuda.current_device()

    def set_current_device(self, device: int) -> None:
        torch.cuda.set_device(device)

    def get_current_stream(self, device: int | None = None) -> int:
        return torch.cuda.current_stream(device).cuda_stream

    def get_device_interface(self) -> Any:
        """Return the module with events and synchronization."""
        return torch.cuda

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", self.get_current_device())

    def get_benchmarker(self) -> Callable[..., Any]:
        """Return the function that `triton.autotune` times configurations with."""
        return do_bench

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        """Return the buffer that flushes the L2 cache."""
        return torch.empty(_FLUSH_BYTES // 4, dtype=torch.int, device="cuda")

    def clear_cache(self, cache: torch.Tensor) -> None:
        cache.zero_()

    def map_python_to_cpp_type(self, type_name: str) -> str:
        """Return the C type of an argument in a launcher's source."""
        from triton.backends.nvidia.driver import ty_to_cpp

        return str(ty_to_cpp(type_name))


def do_bench(
    fn: Callable[[], Any],
    warmup: int = 25,
    rep: int = 100,
    grad_to_none: Sequence[torch.Tensor] | None = None,
    quantiles: Sequence[float] | None = None,
    return_mode: str = "mean",
) -> Any:
    """Run the function as `triton.testing.do_bench` does, with its flush buffer, and return a constant time."""
    fn()
    flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int, device="cuda")
    for tensor in grad_to_none or ():
        tensor.grad = None
    fn()
    del flush
    times = [MILLISECONDS] * (1 if quantiles is None else len(quantiles))
    return times if len(times) > 1 or (quantiles is None and return_mode == "all") else times[0]


def replace_driver(backends: ModuleType, gpu: Gpu, patches: Patches) -> None:
    """Replace Triton's NVIDIA backend driver with the virtual card's."""
    nvidia = backends.backends["nvidia"]
    driver = type("CudaDriver", (VirtualDriver,), {"__init__": lambda self: VirtualDriver.__init__(self, gpu)})
    patches.set_item(backends.backends, "nvidia", type(nvidia)(compiler=nvidia.compiler, driver=driver))


def quiet_launches(jit: ModuleType, stand_ins: StandIns, patches: Patches) -> None:
    """Replace launches of the script's own kernels: count them and do nothing."""

    def run(self: Any, *arguments: Any, warmup: bool = False, **keywords: Any) -> None:
        name = getattr(self, "__name__", None) or getattr(getattr(self, "fn", None), "__name__", "kernel")
        if not warmup:
            stand_ins.unmodelled(f"triton kernel {name}", _NOT_RUN)
            # Tell the profiler, as Inductor does for its kernels; Triton leaves that to CUPTI.
            if torch.autograd.profiler._is_profiler_enabled:
                given = (*arguments, *keywords.values())
                shown = [value for value in given if isinstance(value, (torch.Tensor, int, float))]
                with torch._C._profiler._RecordFunctionFast(f"triton_{str(name).removeprefix('triton_')}", shown):
                    pass

    patches.set(jit.JITFunction, "run", run)


# Inductor


class Kernel:
    """Replaces Triton's compiled kernel."""

    n_spills, shared = 0, 0

    def __init__(self, autotuner: Any, config: Any, compile: Callable[[], Any]) -> None:
        self._autotuner, self._config, self._compile = autotuner, config, compile
        self.hash = hashlib.sha256(f"{autotuner.fn.src}{config}".encode()).hexdigest()

    @property
    def n_regs(self) -> int:
        """Registers per thread; 0 where none would give the kernel its second configuration (`_dynamic_scale_rblock`)."""
        tuner, config = self._autotuner, self._config
        results = tuner.compile_results if hasattr(tuner, "compile_results") else tuner.configs  # in torch 2.6
        if len(results) != 1:  # they will be timed anyway
            return 0
        card = tuner.device_props
        blocks = [size for name, size in config.kwargs.items() if name.startswith("R")]
        registers_of_block = _MOST_REGISTERS * card.warp_size * config.num_warps
        resident = max(card.regs_per_multiprocessor // registers_of_block, 1) * card.multi_processor_count
        in_grid = math.ceil(tuner.size_hints["x"] / config.kwargs.get("XBLOCK", 1))
        may_decide = math.prod(blocks) > 64 and in_grid > resident
        return register_count(self._compile().asm["cubin"]) if may_decide else 0


def register_count(cubin: bytes) -> int:
    """Return the registers per thread, the maximum over all kernels in a cubin, the ELF file that ptxas writes.

    See https://en.wikipedia.org/wiki/Executable_and_Linkable_Format for the layout of ELF; the attribute is the one
    that cuobjdump prints as EIATTR_REGCOUNT.
    """
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry_size) for i in range(count)]
    found = 0
    for name, _, _, _, at, size, *_ in headers:
        start, end = headers[names_index][4] + name, at + size
        if cubin[start : cubin.index(b"\0", start)] != b".nv.info":
            continue
        while at < end:
            form, attribute, value_bytes = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if form == 0x04:  # the format whose third field is the size of the value that follows
                if attribute == 0x2F:  # the register count
                    found = max(found, struct.unpack_from("<II", cubin, at)[1])
                at += value_bytes
    return found


def skip_compilation(triton_heuristics: ModuleType, stand_ins: StandIns, patches: Patches) -> None:
    """Replace the compilation of a kernel's configuration."""
    autotuner_class = triton_heuristics.CachingAutotuner
    plain = autotuner_class._precompile_config

    def precompile_config(self: Any, config: Any, *warm_cache_only: bool) -> Any:
        if self.device_props.type != "cuda":
            return plain(self, config, *warm_cache_only)

        def launch(*_: Any, **__: Any) -> None:
            """Do nothing, and count launches of the script's own kernels."""
            if self.custom_kernel:
                stand_ins.unmodelled(f"triton kernel {self.fn.__name__}", _NOT_RUN)

        kernel = Kernel(self, config, lambda: _compile(triton_heuristics, self, config))
        vars(launch).update(config=config, cache_hash=kernel.hash, n_spills=0, n_regs=0, shared=0, store_cubin=False)
        if warm_cache_only:  # in torch 2.6
            return kernel, launch
        meta = _compile_meta(self, config)
        return SimpleNamespace(kernel=kernel, config=config, compile_meta=meta, make_launcher=lambda: launch)

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
        return dict(autotuner._create_compile_meta(config))
    meta: dict[str, Any] = copy.deepcopy(autotuner.triton_meta)
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


# Whether Inductor pads an unaligned matrix product, which it would find out by timing both versions. Tensor cores load
# whole rows that begin at multiples of 16 bytes; a product with smaller alignment runs at a fraction of their rate, and
# padding pays unless copying the operands takes longer than it saves. The rates below are medians over 1,508 products
# timed on an H200 as Inductor times them; on held-out products, they agree with the card in 92 % (95 % where the times
# differ by 15 % or more). Other cards are assumed to reach the same shares of their peaks.

# Shares of the card's dense peak, by the smallest row alignment in bytes, in descending order.
HALF_RATES = {16: 0.93, 4: 0.246, 2: 0.120}
TF32_RATES = {16: 0.735, 4: 0.249}
FP32_RATES = {4: 0.69}
PRODUCT_BANDWIDTH, COPY_BANDWIDTH, TRANSPOSED_COPY_BANDWIDTH = 0.69, 0.55, 0.205  # shares of the card's bandwidth
PRODUCT_S, COPY_S = 11e-6, 2.6e-6  # launch overhead
GAIN = 1.1  # the speedup that Inductor requires of padding


@dataclass(frozen=True)
class Operand:
    """A matrix of the product: its sides, the padding of each, its layout, and whether it is created already padded."""

    rows: int
    columns: int
    more_rows: int
    more_columns: int
    transposed: bool
    is_padded_already: bool

    def row_bytes(self, element_bytes: int) -> int:
        """Return the bytes from one row in memory to the next."""
        return (self.rows if self.transposed else self.columns) * element_bytes

    def copied_bytes(self, element_bytes: int) -> int:
        """Return the bytes that padding reads and writes; each padded side takes a copy."""
        if self.is_padded_already:
            return 0
        sides = (self.more_rows > 0) + (self.more_columns > 0)
        padded = (self.rows + self.more_rows) * (self.columns + self.more_columns)
        return sides * (self.rows * self.columns + padded) * element_bytes


def decide_padding(pad_mm: ModuleType, gpu: Gpu, patches: Patches) -> None:
    """Replace Inductor's timing comparison; both products still run once, because their buffers count."""
    plain, pays = pad_mm.should_pad_bench_key, False

    def should_pad_bench_key(match: Any, mat1: Any, mat2: Any, *arguments: Any, **keywords: Any) -> Any:
        nonlocal pays
        operands = []
        for name, matrix in (("mat1", mat1), ("mat2", mat2)):
            more = [pad_mm.get_padded_length(side, pad_mm.get_alignment_size(matrix)) for side in matrix.shape[-2:]]
            is_padded = pad_mm.should_exclude_padding_time(match, name)
            rows, columns = _sides(matrix)[-2:]
            operands.append(Operand(rows, columns, more[0], more[1], matrix.stride(-1) != 1, is_padded))
        pays = padding_pays(gpu, mat1.dtype, math.prod(_sides(mat1)[:-2]), *operands)
        return plain(match, mat1, mat2, *arguments, **keywords)

    patches.set(pad_mm, "should_pad_bench_key", should_pad_bench_key)
    patches.set(pad_mm, "is_padded_faster", lambda *_: pays)


def _sides(matrix: Any) -> list[int]:
    """Return the sizes, or Dynamo's hints where they are symbolic."""
    return [int(side) if isinstance(side, int) else side.node.hint for side in matrix.shape]


def padding_pays(gpu: Gpu, dtype: torch.dtype, batch: int, left: Operand, right: Operand) -> bool:
    """Whether the padded product, with its copies, is faster by the margin that Inductor requires."""
    m, k, n = left.rows, left.columns, right.columns
    element_bytes = dtype.itemsize
    rows = (left.row_bytes(element_bytes), right.row_bytes(element_bytes), n * element_bytes)
    alignment = min(math.gcd(row, 16) for row in rows)
    moved_s = batch * (m * k + k * n + m * n) * element_bytes / (PRODUCT_BANDWIDTH * gpu.bandwidth_bytes_per_s)
    plain_s = PRODUCT_S + moved_s + 2 * batch * m * n * k / _rate(gpu, dtype, alignment)
    # Padded: every row is aligned, and the operands are copied first.
    sides = (m + left.more_rows) * (k + left.more_columns) * (n + right.more_columns)
    padded_s = PRODUCT_S + moved_s + 2 * batch * sides / _rate(gpu, dtype, 16)
    for operand in (left, right):
        copied_bytes = batch * operand.copied_bytes(element_bytes)
        share = TRANSPOSED_COPY_BANDWIDTH if operand.transposed else COPY_BANDWIDTH
        padded_s += COPY_S * (copied_bytes > 0) + copied_bytes / (share * gpu.bandwidth_bytes_per_s)
    return plain_s > GAIN * padded_s


def _rate(gpu: Gpu, dtype: torch.dtype, alignment: int) -> float:
    """Return the FLOP/s that a product with rows of this alignment reaches."""
    if dtype in (torch.float16, torch.bfloat16):
        kind, shares = "fp16", HALF_RATES
    elif torch.backends.cuda.matmul.allow_tf32 and "tf32" in gpu.rates:
        kind, shares = "tf32", TF32_RATES
    else:
        kind, shares = "fp32", FP32_RATES
    return gpu.rates[kind] * next(share for least, share in shares.items() if alignment >= least)
