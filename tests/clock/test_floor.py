"""The shortest kernel."""

from tonnage.clock.floor import kernel_floor_s


def test_a_kernel_takes_a_few_microseconds_at_least() -> None:
    assert 5e-7 < kernel_floor_s() < 5e-6
