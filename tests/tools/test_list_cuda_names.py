"""The lists of CUDA's functions: what a header adds, and how versions of CUDA are told apart."""

import importlib.util
from pathlib import Path
from types import ModuleType


def load_tool() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "list_cuda_names.py"
    spec = importlib.util.spec_from_file_location("list_cuda_names", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_tool()


def test_header_gives_declared_and_renamed_functions(tmp_path: Path) -> None:
    header = tmp_path / "cuda.h"
    header.write_text(
        "#define cuMemAlloc                          cuMemAlloc_v2\n"
        "#define cuMemcpyAsync   __CUDA_API_PTSZ(cuMemcpyAsync_v2)\n"
        "#define CU_LIMIT  7\n"
        "/** CUresult CUDAAPI cuInAComment(void); */\n"
        "CUresult CUDAAPI cuInit(unsigned int Flags);\n"
    )
    assert tool.read(header, "13") == {
        "cuda": {"cuMemAlloc", "cuMemAlloc_v2", "cuMemcpyAsync", "cuMemcpyAsync_v2", "cuMemcpyAsync_v2_ptsz", "cuInit"}
    }


def test_python_bindings_give_the_names_that_they_look_up(tmp_path: Path) -> None:
    bindings = tmp_path / "pynvml.py"
    bindings.write_text('def nvmlInit():\n    fn = _nvmlGetFunctionPointer("nvmlInitWithFlags")\n')
    assert tool.read(bindings, "12") == {"nvidia-ml": {"nvmlInitWithFlags"}}


def test_name_of_one_version_is_marked_until_the_other_has_it(tmp_path: Path) -> None:
    names = tmp_path / "cudart.txt"
    tool.merge(names, {"cudaFree", "cudaMalloc"}, "13")
    assert names.read_text() == "cudaFree 13\ncudaMalloc 13\n"
    tool.merge(names, {"cudaMalloc", "cudaThreadExit"}, "12")
    assert names.read_text() == "cudaFree 13\ncudaMalloc\ncudaThreadExit 12\n"
    tool.merge(names, set(), "12")
    assert names.read_text() == "cudaFree 13\ncudaMalloc\ncudaThreadExit 12\n"
