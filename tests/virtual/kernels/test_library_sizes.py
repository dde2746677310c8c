"""The formulas for cuDNN's recurrent networks against workspaces measured on an H200 (cuDNN 9.19)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.virtual.kernels.library_sizes import GATES, RecurrentNetwork, dropout_state_bytes

BASE = RecurrentNetwork("LSTM", 512, 1024, 1, 1, 128, 32, 4, "float32", True, False)


@pytest.mark.parametrize(
    ("network", "workspace", "reserve"),
    [
        (BASE, 127140352, 83886336),
        (replace(BASE, steps=20, batch=4), 35520800, 1638656),
        (replace(BASE, directions=2), 313524736, 167772416),
        (replace(BASE, kind="GRU"), 111804928, 100663552),
        (replace(BASE, kind="RNN", directions=2), 215745024, 33554688),
        (replace(BASE, kind="GRU", input=100, hidden=200, layers=3, steps=20, batch=4), 28174112, 1280256),
        (replace(BASE, input=64, hidden=128, layers=2), 63046144, 23068928),
        (replace(BASE, element_bytes=2, dtype="float16"), 201851392, 41943296),
    ],
)
def test_measured_networks(network: RecurrentNetwork, workspace: int, reserve: int) -> None:
    assert (network.workspace_bytes(), network.reserve_bytes()) == (workspace, reserve)


def test_dropout_keeps_bits() -> None:
    network = replace(BASE, input=256, hidden=512, layers=2, steps=20, batch=4, dropout=True)
    assert network.reserve_bytes() == 1807616


def test_the_state_of_dropout_follows_the_card() -> None:
    assert dropout_state_bytes(132, 2048) == 6488064


@given(
    kind=st.sampled_from(sorted(GATES)), layers=st.integers(1, 4), directions=st.integers(1, 2),
    steps=st.integers(1, 200), batch=st.integers(1, 64),
)  # fmt: skip
def test_more_steps_never_take_less(kind: str, layers: int, directions: int, steps: int, batch: int) -> None:
    network = replace(BASE, kind=kind, layers=layers, directions=directions, steps=steps, batch=batch)
    longer = replace(network, steps=steps + 1)
    assert longer.workspace_bytes() >= network.workspace_bytes()
    assert longer.reserve_bytes() > network.reserve_bytes()
