from clock.kernels.calls import BF16, FP32, H200, INDEX, SETTINGS, call
from tonnage.clock.kernels import fused

X = ((4096, 4096), BF16)


def read(name: str, *arguments: object):
    return fused.fused(call(name, *arguments), SETTINGS)


def test_arguments_are_what_moves() -> None:
    assert read("triton_poi_fused_add_0", X, X, X, "").moved_bytes == 3 * 2 * 4096 * 4096
    assert read("triton_per_fused_sum_0", X, ((4096,), FP32), "").variant == "fused_rows"
    assert read("mm", X, X) is None


def test_a_table_is_read_in_part() -> None:
    made = read("triton_poi_fused_embedding_0", ((512,), INDEX), ((50257, 768), FP32), ((512, 768), FP32), "")
    assert made.moved_bytes == 512 * 8 + 2 * 512 * 768 * 4


def test_a_long_row_is_still_in_the_cache_when_it_is_read_again() -> None:
    assert read("triton_red_fused_0", X, X).moved_bytes == 2 * 2 * 4096 * 4096


def test_expensive_operators_cost() -> None:
    cheap, dear = read("triton_poi_fused_add_0", X, X), read("triton_poi_fused_gelu_sigmoid_0", X, X)
    assert fused.seconds(dear, H200) > 1.1 * fused.seconds(cheap, H200)
