from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clock.kernels.measured import errors
from tonnage.clock.kernels.recurrent import OPERATORS, modelled, seconds
from tonnage.clock.launch import Launch, Settings
from tonnage.clock.operators import OperatorCall
from tonnage.hardware import all_gpus, find_gpu

H200 = find_gpu("h200")


def read(name: str, mode_at: int, mode: str, *, first: bool) -> Launch | None:
    given_shape = (64, 128, 256) if first else (128, 64, 256)
    cells = (2, 64, 512) if mode == "2" else ()
    shapes = (given_shape, (), (), (1000,), (2, 64, 512), cells)
    types = ("float", "TensorList", "Scalar", "float", "float", "float")
    values = tuple(mode if place == mode_at else "" for place in range(22))
    return OPERATORS[name](OperatorCall(name=name, shapes=shapes, types=types, values=values), Settings())


def recurrent(length: int, hidden: int = 512, variant: str = "forward", batch: int = 32) -> Launch:
    return Launch(
        kind="recurrent", name="_cudnn_rnn", shape=(2, length, batch, 256, hidden, 4), precision="tf32", variant=variant
    )


def test_the_order_of_batch_and_length_is_told_by_the_state() -> None:
    for first in (True, False):
        found = read("_cudnn_rnn", 6, "2", first=first)
        assert found is not None and found.shape == (2, 128, 64, 256, 512, 4) and found.precision == "tf32"


def test_a_gru_has_three_gates_and_a_backward_more_work() -> None:
    forward, backward = read("_cudnn_rnn", 6, "3", first=True), read("_cudnn_rnn_backward", 10, "3", first=True)
    assert forward is not None and backward is not None
    assert forward.shape[-1] == 3 and backward.operations == 2 * forward.operations
    assert seconds(backward, H200) > seconds(forward, H200)


@given(
    length=st.integers(1, 1000),
    hidden=st.sampled_from([64, 256, 1024]),
    variant=st.sampled_from(["forward", "backward"]),
)
def test_longer_sequences_take_longer(length: int, hidden: int, variant: str) -> None:
    launch = recurrent(length, hidden, variant)
    assert 0 < seconds(launch, H200) <= seconds(recurrent(2 * length, hidden, variant), H200)
    quicker = replace(H200, bandwidth_bytes_per_s=2 * H200.bandwidth_bytes_per_s)
    assert modelled(launch, quicker) <= modelled(launch, H200) * 1.000001


def test_every_card_has_a_time() -> None:
    assert all(0 < seconds(recurrent(32), gpu) < 1 for gpu in all_gpus())


@pytest.mark.truth
def test_measured_layers_are_told() -> None:
    off = errors("recurrent")
    assert np.median(off) < 0.112 and np.quantile(off, 0.9) < 0.27
