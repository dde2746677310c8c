from itertools import islice

from nvml_fake import FakeCard, FakeNvml
from tonnage.hardware.nvml import open_nvml
from tonnage.watch import moments


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
