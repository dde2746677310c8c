"""What libraries are told after they are imported, with modules that look like theirs."""

import os
import sys
from types import ModuleType

import pytest

from tonnage.errors import NotModelled
from tonnage.virtual.packages import Packages, actions_after_imports, supply_deepspeed
from tonnage.virtual.standins import StandIns


@pytest.fixture
def stand_ins() -> StandIns:
    return StandIns(lambda: "train.py:1")


def test_an_installed_package_needs_no_stand_in(stand_ins: StandIns) -> None:
    packages = Packages(stand_ins)
    packages.install()
    try:
        assert not packages.place("numpy")
        assert packages.place("flash_attn") and packages.place("flash_attn")
        assert [note.operator for note in stand_ins.notes()] == ["flash_attn"]
    finally:
        packages.remove()
    assert packages not in sys.meta_path


def test_xformers_whose_library_does_not_load_runs_on_torch(stand_ins: StandIns) -> None:
    module = ModuleType("xformers._cpp_lib")
    module.__dict__.update(_cpp_library_load_exception=OSError("libcudart.so.12"), _built_with_cuda=False)
    actions_after_imports(Packages(stand_ins), stand_ins)["xformers._cpp_lib"](module)
    assert module._built_with_cuda
    assert "does not load beside this torch" in stand_ins.notes()[0].text
    loaded = ModuleType("xformers._cpp_lib")
    loaded.__dict__.update(_cpp_library_load_exception=None, _built_with_cuda=True)
    actions_after_imports(Packages(stand_ins), stand_ins)["xformers._cpp_lib"](loaded)
    assert len(stand_ins.notes()) == 1


def test_vllm_stays_in_one_process(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/own/lib")
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", "/cache/stand-ins")
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    actions_after_imports(Packages(stand_ins), stand_ins)["vllm"](ModuleType("vllm"))
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "1"  # what the user set is kept
    assert os.environ["LD_LIBRARY_PATH"] == "/cache/stand-ins:/own/lib"


def test_an_operator_of_deepspeed_without_a_stand_in_is_named(stand_ins: StandIns) -> None:
    class OpBuilder:
        name = "evoformer_attn"

    module = ModuleType("deepspeed.ops.op_builder.builder")
    module.__dict__["OpBuilder"] = OpBuilder
    supply_deepspeed(module, stand_ins)
    with pytest.raises(NotModelled, match="evoformer_attn at first use"):
        OpBuilder().jit_load()
