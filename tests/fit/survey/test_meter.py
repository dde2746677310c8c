"""Durations of a card that is made by hand: it runs what it was given, and waits where the host is late."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tonnage.errors import RequestError
from tonnage.fit.survey.meter import Duration, GpuMeter, adding_bytes_per_s, clocked, link_bytes_per_s
from tonnage.hardware import find_gpu
from tonnage.virtual.builds import new_session


class MadeUp(GpuMeter):
    """A meter of a card that takes `gpu_s` for a call which takes the host `host_s` to launch."""

    def __init__(self, gpu_s: float, host_s: float) -> None:
        self.device, self.virtual = torch.device("cuda"), False
        self.gpu_s, self.host_s = gpu_s, host_s
        self.calls: list[tuple[int, float]] = []

    def _timed(self, run: Callable[[], object], calls: int, *, behind_s: float = 0.0) -> Duration:
        self.calls.append((calls, behind_s))
        waits = behind_s < calls * self.host_s
        return Duration(max(self.gpu_s, self.host_s) if waits else self.gpu_s, self.host_s)


def test_a_card_that_is_the_slower_one_is_timed_under_load() -> None:
    meter = MadeUp(gpu_s=1e-2, host_s=1e-4)
    assert meter.time(lambda: None) == Duration(1e-2, 1e-4)
    assert meter.calls == [(1, 0.0), (5, 0.0), (10, 0.0)]


def test_where_the_host_is_the_slower_one_the_card_finds_its_work_in_the_queue() -> None:
    meter = MadeUp(gpu_s=1e-4, host_s=1e-3)
    assert meter.time(lambda: None) == Duration(1e-4, 1e-3)
    bursts = [(calls, behind_s) for calls, behind_s in meter.calls if behind_s]
    assert bursts
    assert all(behind_s >= calls * meter.host_s for calls, behind_s in bursts)


def test_without_times_a_call_runs_once_and_takes_none() -> None:
    meter, ran = MadeUp(gpu_s=1e-4, host_s=1e-3), []
    meter.timed = False
    assert meter.time(lambda: ran.append(1)) == Duration(0.0)
    assert (ran, meter.calls) == ([1], [])


H200, T4 = find_gpu("h200"), find_gpu("t4")


@pytest.fixture
def card() -> Iterator[None]:
    if torch.version.cuda:
        pytest.skip("for the virtual GPU of a CPU build")
    session = new_session(H200, "2.11")
    session.open(capture=True)
    yield
    session.close()


@pytest.mark.usefixtures("card")
def test_a_large_product_is_the_card_s_and_a_small_one_the_host_s() -> None:
    large = torch.empty(8192, 8192, device="cuda", dtype=torch.bfloat16)
    small = torch.empty(16, 16, device="cuda")
    card_s, host_s = clocked(lambda: large @ large, H200)
    assert 1.1e-3 < card_s < 2.5e-3 and host_s < card_s
    card_s, host_s = clocked(lambda: small @ small, H200)
    assert card_s < host_s


@pytest.mark.usefixtures("card")
def test_a_slower_card_takes_longer_and_its_host_no_longer() -> None:
    half = torch.empty(4096, 4096, device="cuda", dtype=torch.float16)
    (ours, host_s), (other, same) = (clocked(lambda: half @ half, gpu) for gpu in (H200, T4))
    assert other > 5 * ours
    assert same == pytest.approx(host_s, rel=0.1)


@pytest.mark.usefixtures("card")
def test_who_profiles_already_is_told() -> None:
    with torch.profiler.profile(), pytest.raises(RequestError, match="profiler"):
        clocked(lambda: None, H200)


def test_rates_are_shares_of_what_the_card_has() -> None:
    assert 0.7 < adding_bytes_per_s(H200) / H200.bandwidth_bytes_per_s < 1
    assert 0.7 < link_bytes_per_s(H200) / H200.pcie_bytes_per_s < 1
