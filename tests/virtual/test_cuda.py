"""`torch.cuda` on the virtual H200, against what a real H200 with torch 2.11 answered."""

from collections.abc import Iterator

import pytest

from tonnage.hardware import find_gpu
from tonnage.virtual.loading import load
from tonnage.virtual.modelled import ModelledSession as Session

load()
import torch  # noqa: E402  (after the native library)


def opened(gpu: str = "h200") -> Session:
    session = Session(find_gpu(gpu), "2.11.0")
    session.open()
    return session


@pytest.fixture
def session() -> Iterator[Session]:
    session = opened()
    yield session
    session.close()


def test_before_initialisation_nothing_is_counted(session: Session) -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    assert not torch.cuda.is_initialized()
    assert torch.cuda.memory_stats() == {} and torch.cuda.memory_allocated() == 0
    torch.empty(10, device="cuda")
    assert torch.cuda.is_initialized()


def test_properties_are_those_of_the_real_card(session: Session) -> None:
    card = torch.cuda.get_device_properties()
    real = {
        "name": "NVIDIA H200", "major": 9, "minor": 0, "total_memory": 150109880320, "multi_processor_count": 132,
        "L2_cache_size": 62914560, "clock_rate": 1980000, "memory_clock_rate": 3201000, "warp_size": 32,
        "max_threads_per_block": 1024, "max_threads_per_multi_processor": 2048, "regs_per_multiprocessor": 65536,
        "shared_memory_per_block": 49152, "shared_memory_per_block_optin": 232448, "is_integrated": 0,
        "shared_memory_per_multiprocessor": 233472, "is_multi_gpu_board": 0, "gcnArchName": "NVIDIA H200",
        "pci_domain_id": 0,
    }  # fmt: skip
    assert {name: getattr(card, name) for name in real} == real
    assert repr(card).startswith(
        "_CudaDeviceProperties(name='NVIDIA H200', major=9, minor=0, total_memory=143155MB, "
        "multi_processor_count=132, uuid="
    )
    assert repr(card).endswith("L2_cache_size=60MB)") and len(str(card.uuid)) == 36
    assert torch.cuda.get_device_name() == torch.cuda.get_device_name("cuda:0") == "NVIDIA H200"
    assert torch.cuda.get_device_capability(0) == (9, 0)


def test_versions_are_those_of_the_release(session: Session) -> None:
    assert torch.version.cuda == "13.0" and torch.backends.cuda.is_built()
    assert torch.backends.cudnn.is_available() and torch.backends.cudnn.version() == 91900
    assert torch.backends.cusparselt.version() == 800
    assert torch.cuda.nccl.version() == (2, 28, 9)
    assert torch.cuda.get_arch_list() == ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize(("gpu", "native"), [("h200", True), ("a100-80", True), ("t4", False)])
def test_bf16_by_capability_and_by_emulation(gpu: str, native: bool) -> None:
    session = opened(gpu)
    try:
        assert torch.cuda.is_bf16_supported(including_emulation=False) is native
        assert torch.cuda.is_bf16_supported() and torch.cuda.is_tf32_supported() is native
    finally:
        session.close()


def test_devices_are_selected_and_checked(session: Session) -> None:
    torch.cuda.set_device(0)
    assert torch.cuda.is_initialized()
    torch.cuda.set_device("cuda:0")
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(0), torch.cuda.device_of(torch.empty(1, device="cuda")):
        assert torch.cuda.current_device() == 0
    for wrong in (
        lambda: torch.cuda.set_device(5),
        lambda: torch.cuda.device(5).__enter__(),
        lambda: torch.empty(1, device="cuda:1"),
    ):
        with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
            wrong()
    with pytest.raises(AssertionError, match="Invalid device id"):
        torch.cuda.get_device_properties(5)
    torch.empty(1, device="cuda")


def test_statistics_follow_the_allocator(session: Session) -> None:
    torch.empty(10, device="cuda")
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.peak"] == 512 and stats["requested_bytes.all.peak"] == 40
    assert stats["inactive_split_bytes.all.peak"] == 2096640 and stats["max_split_size"] == -1
    assert torch.cuda.memory_stats_as_nested_dict()["segment"]["small_pool"]["current"] == 1
    held = torch.empty(2**22, device="cuda")
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() == 2**24
    assert torch.cuda.memory_reserved() == 2**24 + 2**21
    assert torch.accelerator.memory_allocated() == 2**24
    del held
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0 and torch.cuda.max_memory_reserved() == 2**24 + 2**21
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == 0
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


def test_the_summary_is_pytorchs_own_table(session: Session) -> None:
    torch.empty(10, device="cuda")
    rows = torch.cuda.memory_summary().splitlines()
    assert "|                  PyTorch CUDA memory summary, device ID 0                 |" in rows
    assert "| Requested memory      |      0 B   |     40 B   |     40 B   |     40 B   |" in rows
    assert "| Non-releasable memory |      0 B   |   2047 KiB |   2047 KiB |   2047 KiB |" in rows


def test_free_memory_is_what_the_process_leaves(session: Session) -> None:
    free, total = torch.cuda.mem_get_info()
    assert total == 150109880320 and 0 < total - free < 2**30
    torch.empty(2**28, device="cuda")
    assert torch.cuda.mem_get_info("cuda") == (free - 2**30, total)
    assert torch.cuda.cudart().cudaMemGetInfo(0) == torch.accelerator.get_memory_info() == (free - 2**30, total)


def test_a_fraction_of_the_card_can_be_set(session: Session) -> None:
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    torch.cuda.set_per_process_memory_fraction(0.01)
    assert torch.cuda.get_per_process_memory_fraction() == 0.01
    with pytest.raises(torch.OutOfMemoryError, match=r"1\.40 GiB allowed"):
        torch.empty(2**31, dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match="Invalid fraction value"):
        torch.cuda.set_per_process_memory_fraction(2.0)


def test_out_of_memory_is_seen_by_observers(session: Session) -> None:
    seen: list[tuple[int, ...]] = []
    torch.cuda.init()
    torch._C._cuda_attach_out_of_memory_observer(lambda *numbers: seen.append(numbers))
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"Tried to allocate 2048\.00 GiB"):
        torch.empty(2**41, dtype=torch.uint8, device="cuda")
    assert [numbers[:2] for numbers in seen] == [(0, 2**41)]
    assert torch.cuda.memory_stats()["num_ooms"] == 1


def test_raw_allocations(session: Session) -> None:
    address = torch.cuda.caching_allocator_alloc(100)
    assert torch.cuda.memory_allocated() == 512
    torch.cuda.caching_allocator_delete(address)
    assert torch.cuda.memory_allocated() == 0
    with pytest.raises(RuntimeError, match="invalid device pointer: 0x1e240"):
        torch.cuda.caching_allocator_delete(123456)
    with pytest.raises(torch.OutOfMemoryError):
        torch.cuda.caching_allocator_alloc(2**41)


def test_settings_change_in_a_run(session: Session) -> None:
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    held = torch.empty(2**22, device="cuda")
    assert torch.cuda.memory_snapshot()[0]["is_expandable"]
    with pytest.raises(ValueError, match="Unrecognized key 'nonsense'"):
        torch._C._accelerator_setAllocatorSettings("nonsense:1")
    assert torch.cuda.get_allocator_backend() == "native" and held.is_cuda


def test_seeds_wait_for_initialisation(session: Session) -> None:
    torch.cuda.manual_seed_all(7)
    torch.manual_seed(11)
    assert not torch.cuda.is_initialized()
    assert torch.cuda.initial_seed() == 11
    torch.cuda.manual_seed(13)
    state = torch.cuda.get_rng_state()
    assert state.tolist() == [13, *[0] * 15] and torch.cuda.memory_allocated() == 0
    assert torch.cuda.default_generators[0].device == torch.device("cuda:0")
    with torch.random.fork_rng():
        torch.cuda.manual_seed(17)
    assert torch.equal(torch.cuda.get_rng_state_all()[0], state)
    torch.cuda.set_rng_state_all([torch.zeros_like(state)])
    assert torch.cuda.initial_seed() == 0
    torch.cuda.seed_all()
    assert torch.cuda.initial_seed() != 0


def test_switches_that_scripts_turn(session: Session) -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.set_float32_matmul_precision("highest")
    assert not torch.backends.cuda.matmul.allow_tf32
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False):
        assert torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark_limit = 5
    assert torch.backends.cudnn.benchmark_limit == 5
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert not torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.preferred_linalg_library("cusolver")
    torch.backends.cuda.preferred_linalg_library("default")
    assert torch.cuda.amp.common.amp_definitely_not_available() is False
    assert torch.amp.GradScaler("cuda").is_enabled()
    torch.cuda.set_sync_debug_mode("warn")
    assert torch.cuda.get_sync_debug_mode() == 1
    torch.cuda.ipc_collect()


def test_tools_that_only_watch(session: Session) -> None:
    torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
    with torch.cuda.nvtx.range("step"):
        torch.cuda.nvtx.mark("here")
    with torch.cuda.profiler.profile():
        torch.cuda.synchronize()
    assert torch.cuda.utilization() == 0 and 0 < torch.cuda.temperature() < 100
    assert torch.cuda.clock_rate() == 1980 and torch.cuda.power_draw() == 700_000
    free, total = torch.cuda.mem_get_info()
    assert torch.cuda.device_memory_used() == total - free
    assert "MB GPU memory" in torch.cuda.list_gpu_processes()


def test_what_is_not_modelled_says_so(session: Session) -> None:
    torch.cuda.init()
    with pytest.raises(RuntimeError, match="does not model memory without the caching allocator"):
        torch.cuda.caching_allocator_enable(False)
    with pytest.raises(RuntimeError, match="does not model NCCL"):
        torch.cuda.nccl.unique_id()
    with pytest.raises(RuntimeError, match="CUDAPluggableAllocator"):
        torch._C._cuda_customAllocator(1, 1)


def test_pinned_memory_is_counted(session: Session) -> None:
    torch.cuda.init()
    before = torch.cuda.host_memory_stats()["active_bytes.current"]
    held = torch.empty(1_000_003, dtype=torch.uint8, pin_memory=True)
    stats = torch.cuda.host_memory_stats()
    assert stats["active_bytes.current"] - before == 2**20 and stats["allocated_bytes.peak"] >= 2**20
    assert held.is_pinned()


def test_a_script_may_hide_the_card(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1


def test_outside_settings_do_not_hide_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    session = opened()
    try:
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    finally:
        session.close()


def _state() -> dict[str, object]:
    modules = {
        "C": torch._C, "cuda": torch.cuda, "version": torch.version, "memory": torch.cuda.memory,
        "graphs": torch.cuda.graphs, "nvtx": torch.cuda.nvtx, "streams": torch.cuda.streams,
    }  # fmt: skip
    seen = {f"{name}.{key}": value for name, module in modules.items() for key, value in vars(module).items()}
    seen |= {f"cudnn.{key}": value for key, value in torch.backends.cudnn.version.__globals__.items()}
    seen |= {f"class {c.__name__}": c.__bases__ for c in (torch.cuda.CUDAGraph, torch.cuda.MemPool)}
    seen["region"] = torch.autograd.profiler.record_function.__enter__
    seen["storage"] = "__new__" in vars(torch.UntypedStorage)
    seen["capture"] = torch.cuda.graphs.graph.default_capture_stream
    return seen


def test_everything_is_put_back() -> None:
    opened().close()
    before = _state()
    queued = list(torch.cuda._queued_calls)
    session = opened()
    torch.manual_seed(3)
    torch.cuda.memory._record_memory_history()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.ones(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ones(3, device="cuda")
    torch.cuda.memory_summary()
    assert _state() != before
    session.close()
    after = _state()
    assert after.keys() == before.keys()
    assert [key for key in before if after[key] is not before[key] and after[key] != before[key]] == []
    assert torch.cuda._queued_calls == queued
    assert not torch.cuda.is_available() and torch.version.cuda is None
    assert torch.UntypedStorage(10).nbytes() == 10
    with pytest.raises(AssertionError, match="not compiled with CUDA"):
        torch.empty(1, device="cuda")


def test_a_second_card_starts_afresh() -> None:
    for gpu, name in (("h200", "NVIDIA H200"), ("a100-80", "NVIDIA A100-SXM4-80GB")):
        session = opened(gpu)
        try:
            assert torch.cuda.memory_stats() == {}
            held = torch.empty(10, device="cuda")
            assert torch.cuda.memory_allocated() == 512 and torch.cuda.get_device_name() == name
            del held
        finally:
            session.close()
