import pytest

from clock.kernels.calls import BF16, FP32, H200, SETTINGS, call
from tonnage.clock.kernels import optimizers
from tonnage.clock.kernels.optimizers import packed

CHUNK = 65536


def read(name: str, lists: int, shapes: list[tuple[int, ...]], kind: str):
    return optimizers.OPERATORS[name](call(name, *[(tuple(shapes), kind)] * lists), SETTINGS)


@pytest.mark.parametrize(
    ("sizes", "lists", "kernels"),
    [
        ([CHUNK], 4, 1),
        ([320 * CHUNK], 4, 1),
        ([321 * CHUNK], 4, 2),
        ([10] * 36, 4, 1),
        ([10] * 37, 4, 2),
        ([10] * 111, 1, 2),
    ],
)
def test_chunks_are_packed_into_kernels(sizes: list[int], lists: int, kernels: int) -> None:
    assert packed(sizes, lists)[0] == kernels


def test_every_list_is_read_and_results_are_written() -> None:
    assert read("_fused_adamw_", 4, [(1024, 1024)], BF16).moved_bytes == 7 * 2 * 1024 * 1024
    assert read("_foreach_addcdiv_", 3, [(1024, 1024)], FP32).moved_bytes == 4 * 4 * 1024 * 1024
    assert read("_foreach_mul_", 1, [(1024,)] * 8, FP32).moved_bytes == 2 * 4 * 1024 * 8


def test_many_middling_tensors_take_longer_than_one_large() -> None:
    many, one = read("_fused_adamw_", 4, [(70000,)] * 360, FP32), read("_fused_adamw_", 4, [(70000 * 360,)], FP32)
    assert optimizers.seconds(many, H200) > 1.5 * optimizers.seconds(one, H200)


def test_steps_are_single_numbers() -> None:
    assert read("_foreach_add_", 1, [()] * 100, FP32).kernels == 1


def test_lists_that_were_not_recorded_give_no_launch() -> None:
    assert optimizers.OPERATORS["_fused_adamw_"](call("_fused_adamw_", ((), "TensorList")), SETTINGS) is None
