from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from nvml_fake import FakeCard, FakeNvml
from tonnage.hardware.nvml import GpuMemory, ProcessMemory, open_nvml
from tonnage.watch import GpuSample, WatchHistory, moments

TOTAL = 2**40
LEVELS = st.lists(st.integers(0, TOTAL), min_size=1, max_size=40)


def moment(time_s: float, used_bytes: int, *pids: int) -> GpuSample:
    processes = tuple(ProcessMemory(pid, "python", used_bytes) for pid in pids)
    return GpuSample(time_s, (GpuMemory(0, "card", "GPU-0", TOTAL, used_bytes, 0, None, processes),))


@given(levels=LEVELS, kept=st.integers(1, 10))
def test_it_keeps_the_last_and_the_peak_of_all(levels: list[int], kept: int) -> None:
    history = WatchHistory(kept)
    for second, used_bytes in enumerate(levels):
        history.add(moment(second, used_bytes, 7))
    for track in (history.gpu(0), history.process(0, 7)):
        assert list(track.used_bytes) == levels[-kept:]
        assert track.peak_bytes == max(levels)


def test_a_process_that_ends_is_forgotten() -> None:
    history = WatchHistory()
    history.add(moment(0, 5, 7))
    history.add(moment(1, 3, 8))
    history.add(moment(2, 4, 7, 8))
    assert list(history.process(0, 7).used_bytes) == [4]
    assert history.process(0, 7).peak_bytes == 4
    assert history.gpu(0).peak_bytes == 5
    assert history.first_s == 0


class Clock:
    """Time that passes only when someone sleeps, or works."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_samples_are_an_interval_apart_whatever_showing_them_takes() -> None:
    clock, times = Clock(), []
    with open_nvml(FakeNvml(FakeCard())) as reader:
        for moment in islice(moments(reader, 2.0, now=clock, sleep=clock.sleep), 4):
            times.append(moment.time_s)
            clock.now_s += 0.5
    assert times == [100.0, 102.0, 104.0, 106.0]


def test_a_slow_screen_is_not_waited_for() -> None:
    clock, times = Clock(), []
    with open_nvml(FakeNvml(FakeCard())) as reader:
        for moment in islice(moments(reader, 1.0, now=clock, sleep=clock.sleep), 3):
            times.append(moment.time_s)
            clock.now_s += 5
    assert times == [100.0, 105.0, 110.0]
