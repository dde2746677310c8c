from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clock.kernels.measured import errors, errors_of_trainings
from tonnage.clock.kernels.attention import OPERATORS, modelled, seconds
from tonnage.clock.kernels.figures import figures
from tonnage.clock.launch import Launch, Settings
from tonnage.clock.operators import OperatorCall
from tonnage.hardware import all_gpus, find_gpu

BF16, FP32 = "c10::BFloat16", "float"
H200 = find_gpu("h200")
LIBRARIES = ("cudnn", "efficient", "flash")


def read(name: str, tensors: dict[int, tuple[int, ...]], values: dict[int, str], kind: str = BF16) -> Launch | None:
    shapes = tuple(tensors.get(place, ()) for place in range(20))
    types = tuple(kind if place in tensors else "" for place in range(20))
    texts = tuple(values.get(place, "") for place in range(20))
    return OPERATORS[name](OperatorCall(name=name, shapes=shapes, types=types, values=texts), Settings())


def attention(
    length: int, variant: str = "cudnn forward causal", heads: int = 16, width: int = 64, **other: Any
) -> Launch:
    shape = (2, heads, heads, length, length, width, width)
    kernels = 4 if "backward" in variant else 1
    options: dict[str, Any] = {"precision": "bf16", "kernels": kernels} | other
    return Launch(kind="attention", name="attention", shape=shape, variant=variant, **options)


def test_cudnn_has_heads_before_lengths() -> None:
    query, key = (2, 32, 128, 64), (2, 8, 256, 64)
    found = read("_cudnn_attention_forward", {0: query, 1: key, 2: key}, {9: "0.0", 10: "True"})
    assert found is not None and found.shape == (2, 32, 8, 128, 256, 64, 64)
    assert found.variant == "cudnn forward causal" and found.precision == "bf16"
    assert found.operations == 4 * 2 * 32 * 64 * (128 * 256 - 128 * 127 / 2)


def test_efficient_has_lengths_before_heads() -> None:
    tensors = dict.fromkeys((0, 1, 2, 3), (2, 128, 12, 64)) | {4: (2, 12, 128, 128)}
    found = read("_efficient_attention_backward", tensors, {11: "0.1", 14: "0"}, FP32)
    assert found is not None and found.shape == (2, 12, 12, 128, 128, 64, 64)
    assert found.variant == "efficient backward bias dropout"


def test_packed_sequences_are_taken_as_equal() -> None:
    tensors = dict.fromkeys((0, 1, 2), (4096, 16, 128)) | {3: (9,), 4: (9,)}
    found = read("_flash_attention_forward", tensors, {7: "0.0", 8: "True"})
    assert found is not None and found.shape == (8, 16, 16, 512, 512, 128, 128)


def test_what_is_no_attention_launches_nothing() -> None:
    assert read("_cudnn_attention_forward", {0: (2, 3)}, {}) is None


@pytest.mark.parametrize("way", ["", "_backward"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_operator_around_a_kernel_is_read_as_the_kernel_is(library: str, way: str) -> None:
    """Not every build of torch records what it calls."""
    name = f"_scaled_dot_product_{library}_attention{way}"
    table = figures()["attention_operators"][name]
    shapes = {table["query"] + at: (2, 8, 512, 64) for at in range(3)}
    found = read(name, shapes, {table["causal"]: "True", table["dropout"]: "0.0"})
    assert found is not None
    assert found.shape == (2, 8, 8, 512, 512, 64, 64)
    assert found.variant == f"{library} {'backward' if way else 'forward'} causal"


@given(length=st.integers(1, 20_000), library=st.sampled_from(LIBRARIES), way=st.sampled_from(["forward", "backward"]))
def test_longer_sequences_take_longer(length: int, library: str, way: str) -> None:
    causal, whole = (attention(length, f"{library} {way}{word}") for word in (" causal", ""))
    assert 0 < seconds(causal, H200) <= seconds(whole, H200)
    assert seconds(attention(2 * length, f"{library} {way}"), H200) >= seconds(whole, H200)


@given(length=st.integers(1, 20_000), heads=st.integers(1, 128))
def test_a_faster_card_is_no_slower(length: int, heads: int) -> None:
    quicker = replace(H200, bandwidth_bytes_per_s=2 * H200.bandwidth_bytes_per_s)
    launch = attention(length, "cudnn backward", heads)
    assert modelled(launch, quicker) <= modelled(launch, H200)


def test_what_is_on_costs() -> None:
    plain = seconds(attention(4096, "cudnn forward"), H200)
    assert seconds(attention(4096, "cudnn forward bias"), H200) > plain
    assert seconds(attention(4096, "cudnn forward dropout"), H200) > plain
    assert seconds(attention(4096, "cudnn backward"), H200) > 2 * plain


def test_every_card_has_a_time() -> None:
    for gpu in all_gpus():
        for library in LIBRARIES:
            assert 0 < seconds(attention(512, f"{library} backward causal"), gpu) < 1


@pytest.mark.truth
@pytest.mark.parametrize(("precisions", "median", "p90"), [(("bf16", "fp16"), 0.05, 0.135), (("fp32",), 0.17, 0.41)])
def test_measured_attention_is_told(precisions: tuple[str, ...], median: float, p90: float) -> None:
    off = errors("attention", *precisions)
    assert np.median(off) < median and np.quantile(off, 0.9) < p90


@pytest.mark.truth
def test_the_attention_of_measured_trainings_is_told() -> None:
    off = errors_of_trainings("attention")
    assert np.median(off) < 0.05 and np.quantile(off, 0.9) < 0.15
