"""Operators that launch nothing of their own."""

from tonnage.clock.kernels import launch_of
from tonnage.clock.operators import OperatorCall
from tonnage.clock.settings import Settings
from tonnage.clock.silent import shapeless, silent


def test_no_launch_depends_on_the_shapes_of_those_that_have_none() -> None:
    assert {"view", "to", "_to_copy"} <= shapeless() <= silent()
    settings = Settings(tf32_matmul=False, tf32_convolution=True)
    shapes = ((4, 8), (4, 8))
    for name in shapeless():
        assert launch_of(OperatorCall(name=name, shapes=shapes, types=("float", "float")), settings) is None, name
