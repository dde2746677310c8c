"""Workspaces of cuBLAS and cuBLASLt: once for each thread and stream, as large as card, version and environment say."""

import threading

import pytest
import torch

from tonnage.allocator import AllocatorSettings
from tonnage.hardware import all_gpus, find_gpu
from tonnage.virtual.device import Device
from tonnage.virtual.modelled import ModelledSession as Session
from tonnage.virtual.modelled import Workspaces

MIB = 1 << 20


def _workspaces(card: str, version: tuple[int, int] = (2, 11)) -> Workspaces:
    return Workspaces(Device(find_gpu(card), version, AllocatorSettings()))


@pytest.mark.parametrize(
    ("card", "size"), [("h200", 32 * MIB), ("h100", 32 * MIB), ("a100-80", 8519680), ("rtx-4090", 8519680)]
)
def test_the_card_decides(card: str, size: int) -> None:
    assert _workspaces(card).size_bytes("cublas") == size
    assert _workspaces(card).size_bytes("cublaslt") == MIB


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert _workspaces("h200").size_bytes("cublas") == 32 * MIB
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert _workspaces("h200").size_bytes("cublas") == 128 * 1024
    assert _workspaces("h200").size_bytes("cublaslt") == 128 * 1024, "never more than cuBLAS has"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    assert _workspaces("h200").size_bytes("cublas") == 0


def test_one_workspace_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1")
    assert _workspaces("h200").size_bytes("cublaslt") == 0


@pytest.mark.parametrize(
    ("version", "card", "sizes"),
    [
        ((2, 8), "h200", (32 * MIB, MIB)),
        ((2, 11), "b200", (8519680, MIB)),
        ((2, 12), "b200", (32 * MIB, 0)),
        ((2, 12), "a100-80", (8519680, 0)),
    ],
)
def test_the_version_decides(version: tuple[int, int], card: str, sizes: tuple[int, int]) -> None:
    workspaces = _workspaces(card, version)
    assert (workspaces.size_bytes("cublas"), workspaces.size_bytes("cublaslt")) == sizes


def test_a_plan_reckons_with_what_the_newest_torch_keeps() -> None:
    for card in all_gpus():
        if card.runs_cuda:
            assert card.cublas_workspace_bytes == _workspaces(card.key, (2, 13)).size_bytes("cublas"), card.key


def test_before_2_9_each_product_takes_its_workspace_and_gives_it_back() -> None:
    session = Session(find_gpu("h200"), "2.8")
    session.open()
    try:
        operands = [torch.empty(shape, device="cuda") for shape in ((64,), (64, 64), (64, 64))]
        torch.addmm(*operands)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.addmm(*operands)
        assert torch.cuda.memory_allocated() == held
        assert torch.cuda.max_memory_allocated() == held + MIB + 64 * 64 * 4
    finally:
        session.close()


def test_each_thread_and_each_stream_has_its_own(gpu: Session) -> None:
    x = torch.empty(8, 8, device="cuda")

    def held() -> int:
        x @ x
        return sum(a.requested_bytes == 32 * MIB and a.died is None for a in gpu.device.allocations)

    once = held()
    assert held() == once
    with torch.cuda.stream(torch.cuda.Stream()):
        assert held() == once + 1
    worker = threading.Thread(target=held)
    worker.start()
    worker.join()
    assert held() == once + 2
