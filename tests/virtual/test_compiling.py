"""torch.compile on the virtual GPU: graphs are those of PyTorch alone, buffers are made, kernels are not.

Triton lies apart from the other packages (`.venv/triton`, or where TONNAGE_TRITON points), for PyTorch behaves differently
where it can be imported.
"""

import os
import struct
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tonnage.hardware import find_gpu
from tonnage.virtual.compiling import kernels
from tonnage.virtual.compiling.kernels import Kernel, register_count
from tonnage.virtual.cuda.patches import Patches
from virtual_runs import SCRIPTS, run_tonnage

ROOT = Path(__file__).parents[2]
TRITON = Path(os.environ.get("TONNAGE_TRITON", ROOT / ".venv" / "triton"))
needs_triton = pytest.mark.skipif(not (TRITON / "triton").is_dir(), reason=f"no Triton in {TRITON}")


def run(script: str, *words: str, gpu: str = "h200", **settings: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(TRITON)} | settings
    done = run_tonnage("run", "--gpu", gpu, str(SCRIPTS / script), *words, env=environment, timeout_s=600, fresh=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_triton
def test_graphs_are_whole_and_lines_of_their_code_are_known() -> None:
    said = run("compiled_training.py")
    assert "graphs 2\n" in said
    assert "breaks at what is left alone 1\n" in said
    assert "in the folder of the script False\n" in said
    assert "('compiled_training.py:22', 'aten.addmm')" in said  # the line that begins `return x + self.down(`
    assert "step 3 at other\n" in said  # compiled optimizers are seen to step


@needs_triton
@pytest.mark.parametrize("gpu", ["h200", pytest.param("rtx-4090", marks=pytest.mark.slow)])
def test_a_fused_function_makes_one_buffer_and_timing_takes_another(gpu: str) -> None:
    assert run("compiled_memory.py", gpu=gpu).startswith("first True\nlater True\n")


@needs_triton
def test_a_scripts_own_kernels_are_counted_and_tuned_without_a_clock() -> None:
    said = run("triton_kernels.py")
    assert (
        "best {'BLOCK': 128} peak 268443648" in said
    )  # two tensors, and the 256 MiB that Triton flushes the cache with
    assert "compiled torch.Size([1024]) GPUTarget(backend='cuda', arch=90, warp_size=32)" in said
    assert "triton kernel copy" in said


@needs_triton
def test_graphs_with_host_tensors_run_eagerly_without_a_compiler(tmp_path: Path) -> None:
    script = tmp_path / "host.py"
    script.write_text("import torch\nprint(torch.compile(lambda x: x.sin() + 1)(torch.zeros(4)))\n")
    said = run(str(script), CXX="/nowhere/g++", PATH="/nowhere")
    assert "tensor([1., 1., 1., 1.])" in said
    assert "a graph with host tensors ran eagerly" in said


def _cubin(registers: list[int]) -> bytes:
    """An ELF file with nothing but a table of names and an .nv.info section."""
    names = b"\0.shstrtab\0.nv.info\0"
    attributes = struct.pack("<BBH", 0x03, 0x37, 0x0001)  # an attribute without a value, of another kind
    for index, count in enumerate(registers):
        attributes += struct.pack("<BBHII", 0x04, 0x2F, 8, index, count)
    at_names, at_attributes = 64, 64 + len(names)
    header = bytearray(64)
    struct.pack_into("<Q", header, 0x28, at_attributes + len(attributes))
    struct.pack_into("<HHH", header, 0x3A, 64, 3, 1)
    sections = struct.pack("<IIQQQQIIQQ", *[0] * 10)
    sections += struct.pack("<IIQQQQIIQQ", 1, 3, 0, 0, at_names, len(names), 0, 0, 1, 0)
    sections += struct.pack("<IIQQQQIIQQ", 11, 0x70000000, 0, 0, at_attributes, len(attributes), 0, 0, 4, 0)
    return bytes(header) + names + attributes + sections


@pytest.mark.parametrize(("registers", "most"), [([40], 40), ([24, 168], 168), ([], 0)])
def test_the_register_count_is_read_from_the_machine_code(registers: list[int], most: int) -> None:
    assert register_count(_cubin(registers)) == most


def _reduction(rows: int, configs: int = 1, **blocks: int) -> tuple[Any, Any]:
    card = find_gpu("h200")
    properties = SimpleNamespace(
        warp_size=card.warp_size, regs_per_multiprocessor=card.registers_per_sm, multi_processor_count=card.sm_count
    )
    config = SimpleNamespace(kwargs=blocks, num_warps=16)
    function = SimpleNamespace(src="")
    return (
        SimpleNamespace(compile_results=[None] * configs, device_props=properties, size_hints={"x": rows}, fn=function),
        config,
    )


@pytest.mark.parametrize(
    ("reduction", "decides"),
    [
        (_reduction(8192, XBLOCK=1, R0_BLOCK=2048), True),
        (_reduction(64, XBLOCK=1, R0_BLOCK=2048), False),  # all blocks are resident, whatever they take
        (_reduction(8192, XBLOCK=1, R0_BLOCK=64), False),  # too small to halve
        (_reduction(8192, 2, XBLOCK=1, R0_BLOCK=2048), False),  # two are timed in any case
    ],
)
def test_only_large_reductions_with_one_configuration_depend_on_registers(
    reduction: tuple[Any, Any], decides: bool
) -> None:
    compiled = SimpleNamespace(asm={"cubin": _cubin([40])})
    assert Kernel(*reduction, lambda: compiled).n_regs == (40 if decides else 0)


def test_before_torch_2_9_a_configuration_is_described_here() -> None:
    config = SimpleNamespace(kwargs={"XBLOCK": 64}, num_warps=4, num_stages=2)
    card = SimpleNamespace(type="cuda", cc=90)
    autotuner = SimpleNamespace(triton_meta={"constants": {"x": 1}}, inductor_meta={}, device_props=card)
    assert kernels._compile_meta(autotuner, config) == {
        "constants": {"x": 1, "XBLOCK": 64}, "num_warps": 4, "num_stages": 2, "debug": True, "device_type": "cuda", "cc": 90,
    }  # fmt: skip
    assert autotuner.triton_meta == {"constants": {"x": 1}}


def test_torch_2_6_gets_a_kernel_and_its_launcher_and_times_with_triton() -> None:
    autotuner = SimpleNamespace(
        triton_meta={"constants": {}}, inductor_meta={}, device_props=SimpleNamespace(type="cuda", cc=90),
        custom_kernel=False, fn=SimpleNamespace(src="source"),
    )  # fmt: skip
    heuristics: Any = SimpleNamespace(CachingAutotuner=type("CachingAutotuner", (), {"_precompile_config": None}))
    config = SimpleNamespace(kwargs={}, num_warps=4, num_stages=2)
    kernels.skip_compilation(heuristics, Mock(), Patches())
    kernel, launcher = heuristics.CachingAutotuner._precompile_config(autotuner, config, False)
    assert isinstance(kernel, kernels.Kernel) and launcher.config is config
    kernels.constant_times(ModuleType("benchmarking"), Patches())
