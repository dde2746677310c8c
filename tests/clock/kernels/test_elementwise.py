import pytest

from clock.kernels.calls import BF16, FLAG, FP32, H200, SETTINGS, call
from tonnage.clock.kernels import elementwise

SHAPE = (256, 1024)
COUNT = 256 * 1024


def read(name: str, *arguments: object, kernels: tuple[str, ...] = ()):
    return elementwise.OPERATORS[name](call(name, *arguments, kernels=kernels), SETTINGS)


def test_bytes_are_read_and_written_once() -> None:
    assert read("add", (SHAPE, BF16), (SHAPE, BF16), "1").moved_bytes == 3 * 2 * COUNT
    assert read("add_", (SHAPE, FP32), (SHAPE, BF16)).moved_bytes == (4 + 2 + 4) * COUNT
    assert read("gt", (SHAPE, FP32), "0").moved_bytes == (4 + 1) * COUNT
    assert read("fill_", (SHAPE, FP32), "0").moved_bytes == 4 * COUNT
    assert read("native_dropout", (SHAPE, BF16), "0.1", "True").moved_bytes == 5 * COUNT
    assert read("mul", (SHAPE, BF16), ((), "double")).moved_bytes == 4 * COUNT


@pytest.mark.parametrize(
    ("arguments", "variant"),
    [
        ([(SHAPE, BF16), (SHAPE, BF16)], "vector"),
        ([(SHAPE, BF16), (SHAPE, FP32)], "mixed"),
        ([(SHAPE, BF16), (SHAPE, FLAG)], "vector"),
        ([(SHAPE, BF16), ((1024,), BF16)], "strided_narrow"),
        ([(SHAPE, FP32), ((256, 1), FP32)], "strided_wide"),
        ([(SHAPE, FP32), ((1024,), BF16)], "strided_mixed"),
        ([(SHAPE, BF16, (1024, 1)), (SHAPE, BF16, (2048, 1))], "strided_narrow"),
        ([(SHAPE, BF16, (1, 256)), (SHAPE, BF16, (1, 256))], "vector"),
        ([(SHAPE, BF16, (1024, 1)), (SHAPE, BF16, (1, 256))], "transposed"),
    ],
)
def test_the_kernel_follows_types_and_strides(arguments: list, variant: str) -> None:
    assert read("mul", *arguments).variant == variant


def test_a_condition_that_is_broadcast_crosses_nothing() -> None:
    whole = ((2, 8, 64, 64), FP32, (32768, 4096, 64, 1))
    made = read("where", ((2, 8, 64, 1), "bool", (512, 64, 1, 1)), whole, whole)
    assert made.variant.startswith("strided")


def test_a_trace_settles_which_kernel_it_is() -> None:
    kernels = ("void at::native::unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>",)
    assert read("add", (SHAPE, BF16), (SHAPE, BF16), kernels=kernels).variant == "mixed"


def test_slow_kernels_are_slower() -> None:
    shape = (8192, 4096)
    fast, mixed = read("add", (shape, FP32), (shape, FP32)), read("add", (shape, FP32), (shape, BF16))
    assert elementwise.seconds(mixed, H200) > 1.2 * elementwise.seconds(fast, H200)
    gelu, neg = read("gelu", (shape, BF16)), read("neg", (shape, BF16))
    assert elementwise.seconds(gelu, H200) > 1.2 * elementwise.seconds(neg, H200)


def test_axes_that_lie_one_behind_the_other_are_one() -> None:
    heads = (4, 16, 2048, 128)
    inside = (16 * 2048 * 128, 128, 16 * 128, 1)
    assert read("mul", (heads, BF16), ((1, 1, 2048, 128), BF16)).shape[1] == 2
    assert read("mul", (heads, BF16, inside), ((1, 1, 2048, 128), BF16)).shape[1] == 4


def test_a_list_is_joined() -> None:
    made = read("cat", ((SHAPE, SHAPE), BF16), "-1")
    assert made.moved_bytes == 2 * 2 * 2 * COUNT
