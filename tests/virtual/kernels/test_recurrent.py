"""Recurrent networks against rows measured on an H200 with torch 2.11 and cuDNN 9.19."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tonnage.ledger import Category
from tonnage.virtual.modelled import ModelledSession as Session

pytestmark = pytest.mark.usefixtures("gpu")
Events = Callable[[Callable[[], object]], str]


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=True)


def test_an_lstm_s_forward_and_backward(events: Events) -> None:
    layer, x = nn.LSTM(32, 48).cuda(), _empty(20, 4, 32)
    assert events(lambda: layer(x)) == "+768 +768 +15360 +768 +768 +8789280 +77056 -5"
    y, (h, c) = layer(x)
    gradients = [torch.empty_like(t) for t in (y, h, c)]
    got = events(lambda: torch.autograd.grad((y, h, c), [x, *layer.parameters()], gradients))
    assert got.startswith("+10240 +768 +768 +8789280 -3 +62976 +8789280 -5")


def test_batch_first_copies_the_input(events: Events) -> None:
    layer, x = nn.LSTM(64, 128, 2, batch_first=True).cuda(), _empty(4, 30, 64)
    state = _empty(2, 4, 128), _empty(2, 4, 128)
    assert events(lambda: layer(x, state)) == "+30720 +61440 +4096 +4096 +19048736 +676096 -4 -0"


def test_bfloat16_weights_are_gathered_at_each_call(events: Events) -> None:
    layer, x = nn.GRU(32, 48).cuda().bfloat16(), _empty(128, 32, 32, dtype=torch.bfloat16)
    assert events(lambda: layer(x)) == "+3072 +393216 +3072 +23616 +10524672 +2359552 -4"


def test_moving_a_network_makes_its_weights_views_of_one_buffer(events: Events) -> None:
    layer = nn.LSTM(64, 128)
    assert events(layer.cuda) == "+131072 +262144 +2048 +2048 +397312 -0 -1 -2 -3"
    assert len({p.untyped_storage().data_ptr() for p in layer.parameters()}) == 1
    assert [p.shape for p in layer.parameters()] == [p.shape for p in nn.LSTM(64, 128).parameters()]


def test_dropout_s_state_is_made_once(gpu: Session) -> None:
    layer, x = nn.LSTM(64, 128, 2, dropout=0.2).cuda(), _empty(20, 4, 64)
    layer(x)
    state_bytes = gpu.gpu.sm_count * 2048 * 24
    layer(x)
    states = [a for a in gpu.device.allocations if a.requested_bytes == state_bytes and a.died is None]
    assert [state.category for state in states] == [Category.WORKSPACE]


@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_train(make: Any) -> None:
    cell, x = make(32, 48).cuda(), _empty(4, 32)
    out = cell(x)
    state = out[0] if isinstance(out, tuple) else out
    assert state.shape == (4, 48)
    state.sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in cell.parameters())


def test_a_gru_cell_keeps_five_gates(events: Events) -> None:
    cell, x, h = nn.GRUCell(32, 48).cuda(), _empty(4, 32), _empty(4, 48)
    assert events(lambda: cell(x, h)) == "+2304 +2304 +3840 +768"


def test_packed_sequences_take_part_by_their_lengths(events: Events) -> None:
    layer, x = nn.LSTM(64, 128, 2, batch_first=True).cuda(), _empty(4, 30, 64)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([30, 20, 10, 5]), batch_first=True)
    assert "+17852672 +366336" in events(lambda: layer(packed))


def test_a_gradient_without_biases_is_a_copy() -> None:
    layer, x = nn.LSTM(32, 48, bias=False).cuda(), _empty(20, 4, 32)
    layer(x)[0].sum().backward()
    assert all(p.grad.untyped_storage().nbytes() == p.numel() * 4 for p in layer.parameters() if p.grad is not None)


def test_autocast_runs_in_fp16_on_a_flat_copy_of_the_weights(events: Events) -> None:
    layer, x = nn.GRU(64, 128).cuda(), _empty(30, 4, 64)
    weights = sum(p.numel() for p in layer.parameters())
    with torch.autocast("cuda", torch.bfloat16):
        made = events(lambda: layer(x)).split()
        y, _ = layer(x)
    assert f"+{2 * weights}" in made
    assert y.dtype == torch.float16
    gradients = torch.autograd.grad(y, [x, *layer.parameters()], torch.empty_like(y))
    assert {g.dtype for g in gradients} == {torch.float32}
    assert [g.shape for g in gradients[1:]] == [p.shape for p in layer.parameters()]
