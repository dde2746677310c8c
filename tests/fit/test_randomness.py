import pytest
from torch import nn

from fit.cases import CASES
from tonnage.fit.randomness import active_dropout, dropouts


@pytest.mark.parametrize(
    ("case", "expected"),
    [("llama", None), ("vit", None), ("gpt2", "transformer.drop"), ("dropout", "blocks.0.dropout")],
)
def test_models_that_drop_are_told_from_others(case: str, expected: str | None) -> None:
    model, _, _ = CASES[case]()
    assert active_dropout(model.train()) == expected
    assert active_dropout(model.eval()) is None
    assert bool(dropouts(model)) == (expected is not None)


class Attention(nn.Module):
    """Holds its rate as a number, as transformers' attention does."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.attention_dropout = rate


@pytest.mark.parametrize(
    ("module", "drops"),
    [
        (Attention(0.1), True),
        (Attention(0.0), False),
        (nn.Dropout(0.0), False),
        (nn.Dropout2d(0.5), True),
        (nn.AlphaDropout(0.5), True),
        (nn.MultiheadAttention(8, 2, dropout=0.1), True),
        (nn.MultiheadAttention(8, 2), False),
        (nn.GRU(4, 4, num_layers=2, dropout=0.2), True),
    ],
)
def test_each_kind_of_dropout_is_known(module: nn.Module, drops: bool) -> None:
    assert (active_dropout(module) is not None) == drops
    assert active_dropout(module.eval()) is None
