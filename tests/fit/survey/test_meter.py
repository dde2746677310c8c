"""Durations of a card that is made by hand: it runs what it was given, and waits where the host is late."""

from collections.abc import Callable

import torch

from tonnage.fit.survey.meter import Duration, GpuMeter


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
