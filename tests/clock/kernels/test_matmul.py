from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clock.kernels.measured import errors, errors_of_trainings
from tonnage.clock.kernels.matmul import OPERATORS, modelled, seconds
from tonnage.clock.launch import Launch, Settings
from tonnage.clock.operators import OperatorCall
from tonnage.hardware import all_gpus, find_gpu

BF16, FP32, FP8 = "c10::BFloat16", "float", "c10::Float8_e4m3fn"
H200 = find_gpu("h200")
EXTENTS = st.integers(1, 20_000)


def call(name: str, *tensors: tuple[Any, ...]) -> OperatorCall:
    """Tensors as (shape, type) or (shape, type, strides)."""
    return OperatorCall(
        name=name, shapes=tuple(tensor[0] for tensor in tensors), types=tuple(tensor[1] for tensor in tensors),
        strides=tuple(tensor[2] if len(tensor) > 2 else () for tensor in tensors),
    )  # fmt: skip


def launch(name: str, *tensors: tuple[Any, ...], settings: Settings | None = None) -> Launch:
    found = OPERATORS[name](call(name, *tensors), settings or Settings())
    assert found is not None
    return found


def product(m: int, n: int, k: int, precision: str = "bf16", variant: str = "tn-16", batch: int = 1) -> Launch:
    return Launch(kind="matmul", name="mm", shape=(batch, m, n, k), precision=precision, variant=variant)


def test_a_linear_layer() -> None:
    found = launch("addmm", ((4,), BF16), ((8, 16), BF16), ((16, 4), BF16, (1, 16)))
    assert found.kind == "matmul" and found.shape == (1, 8, 4, 16) and found.precision == "bf16"
    assert found.operations == 2 * 8 * 4 * 16 and found.moved_bytes == 2 * (8 * 16 + 16 * 4 + 8 * 4)


def test_the_variant_says_what_is_transposed_and_how_rows_are_aligned() -> None:
    plain, turned = ((64, 64), BF16), ((64, 64), BF16, (1, 64))
    assert launch("mm", plain, turned).variant == "tn-16"
    assert launch("mm", plain, plain).variant == "nn-16"
    assert launch("mm", turned, plain).variant == "nt-16"
    assert launch("mm", ((64, 64), BF16), ((64, 50257), BF16)).variant == "nn-2"
    assert launch("bmm", ((3, 8, 12), FP32), ((3, 12, 6), FP32)).variant == "nn-8"


def test_batches_and_bytes() -> None:
    assert launch("bmm", ((3, 8, 16), BF16), ((3, 16, 4), BF16)).shape == (3, 8, 4, 16)
    narrow = launch("_scaled_mm", ((8, 16), FP8), ((16, 4), FP8, (1, 16)))
    assert narrow.precision == "fp8" and narrow.moved_bytes == 8 * 16 + 16 * 4 + 2 * 8 * 4


def test_groups_are_taken_as_equal() -> None:
    offsets = ((8,), "int")
    assert launch("_grouped_mm", ((4096, 64), BF16), ((8, 64, 32), BF16), offsets).shape == (8, 512, 32, 64)
    assert launch("_grouped_mm", ((64, 4096), BF16), ((4096, 32), BF16), offsets).shape == (8, 64, 32, 512)


def test_groups_that_are_not_in_bf16_are_multiplied_one_by_one() -> None:
    offsets = ((8,), "int")
    looped = launch("_grouped_mm", ((4096, 64), FP32), ((8, 64, 32), FP32), offsets)
    assert looped.kernels == 8
    assert seconds(looped, H200) > 2 * seconds(replace(looped, kernels=1), H200)


def test_tf32_is_a_setting() -> None:
    tensors = ((8, 16), FP32), ((16, 4), FP32)
    assert launch("mm", *tensors).precision == "fp32"
    assert launch("mm", *tensors, settings=Settings(tf32_matmul=True)).precision == "tf32"


@pytest.mark.parametrize("shapes", [((8, 16), (4, 4)), ((0, 16), (16, 4)), ((16,), (16, 4)), ()])
def test_what_is_no_product_has_no_launch(shapes: tuple[Any, ...]) -> None:
    assert OPERATORS["mm"](call("mm", *((shape, BF16) for shape in shapes)), Settings()) is None
    assert OPERATORS["mm"](call("mm", ((8, 8), "bool"), ((8, 8), "bool")), Settings()) is None


@given(m=EXTENTS, n=EXTENTS, k=EXTENTS, precision=st.sampled_from(["bf16", "fp32", "tf32", "fp8"]))
def test_more_rows_take_no_less_time(m: int, n: int, k: int, precision: str) -> None:
    less, more = (seconds(product(rows, n, k, precision), H200) for rows in (m, 2 * m))
    assert more >= 0.999 * less > 0


@given(m=EXTENTS, n=EXTENTS, k=EXTENTS)
def test_a_faster_card_is_no_slower(m: int, n: int, k: int) -> None:
    now = modelled(product(m, n, k), H200)
    quicker = replace(H200, bandwidth_bytes_per_s=2 * H200.bandwidth_bytes_per_s)
    assert modelled(product(m, n, k), quicker) <= now * 1.000001
    assert modelled(product(m, n, k), replace(H200, sm_count=2 * H200.sm_count, rates={"bf16": 2e15})) <= now * 1.000001


def test_a_large_product_reaches_most_of_the_rate() -> None:
    large = product(8192, 8192, 8192)
    share = 2 * 8192**3 / seconds(large, H200) / H200.rates["bf16"]
    assert 0.7 < share < 0.9
    assert seconds(replace(large, variant="tn-2"), H200) > 3 * seconds(large, H200)


def test_a_card_without_tf32_runs_fp32() -> None:
    v100 = find_gpu("v100-32")
    assert seconds(product(4096, 4096, 4096, "tf32"), v100) == seconds(product(4096, 4096, 4096, "fp32"), v100)


def test_a_bias_keeps_fp32_from_splitting_the_inner_dimension() -> None:
    plain = product(64, 1000, 8192, "fp32")
    assert seconds(replace(plain, name="addmm"), H200) > 1.5 * seconds(plain, H200)


def test_every_card_has_a_time() -> None:
    for gpu in all_gpus():
        for precision in ("bf16", "fp32", "tf32", "fp8"):
            assert 0 < seconds(product(512, 512, 512, precision), gpu) < 1


@pytest.mark.truth
@pytest.mark.parametrize(
    ("precisions", "median", "p90"),
    [(("bf16", "fp16"), 0.047, 0.15), (("fp8",), 0.043, 0.13), (("tf32",), 0.083, 0.28), (("fp32",), 0.10, 0.22)],
)  # fmt: skip
def test_measured_products_are_told(precisions: tuple[str, ...], median: float, p90: float) -> None:
    off = errors("matmul", *precisions)
    assert np.median(off) < median and np.quantile(off, 0.9) < p90


@pytest.mark.truth
def test_the_products_of_measured_trainings_are_told() -> None:
    off = errors_of_trainings("matmul")
    assert np.median(off) < 0.042 and np.quantile(off, 0.9) < 0.11
