"""The fast path of PyTorch's own transformer modules in evaluation."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("gpu")
Events = Callable[[Callable[[], object]], str]


def test_an_encoder_layer_projects_once_and_reuses_its_residual(events: Events) -> None:
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True).cuda().eval()
    x = torch.empty(4, 50, 128, device="cuda")
    with torch.no_grad():
        layer(x)
        made = events(lambda: layer(x))
    packed, context, hidden = 4 * 50 * 384 * 4, 4 * 50 * 128 * 4, 4 * 50 * 512 * 4
    assert made.startswith(f"+{packed} +{context} +{context}")
    assert made.count(f"+{hidden}") == 1


def test_attention_weights_take_the_unfused_way() -> None:
    attention = nn.MultiheadAttention(256, 8, batch_first=True).cuda().eval()
    x = torch.empty(33, 20, 256, device="cuda")
    with torch.no_grad():
        out, weights = attention(x, x, x)
        assert out.shape == (33, 20, 256) and weights.shape == (33, 20, 20)
        padding = torch.zeros(33, 20, dtype=torch.bool, device="cuda")
        assert attention(x, x, x, key_padding_mask=padding, need_weights=False)[0].shape == x.shape


def test_a_padded_batch_stays_padded() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True), 2).cuda().eval()
    x, padding = torch.empty(4, 50, 128, device="cuda"), torch.zeros(4, 50, dtype=torch.bool, device="cuda")
    with torch.no_grad():
        assert encoder(x, src_key_padding_mask=padding).shape == x.shape
