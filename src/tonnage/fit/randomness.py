"""Where a model draws random numbers, as far as its modules tell. It does not know a dropout inside a plain function."""

from torch import nn

_DROPOUTS = (nn.modules.dropout._DropoutNd, nn.AlphaDropout)
# Rates that attention modules of transformers and timm hold as plain numbers, and drop path.
_RATES = ("attention_dropout", "attn_drop_rate", "dropout_p", "drop_prob", "dropout_prob")


def active_dropout(module: nn.Module) -> str | None:
    """The name of a module that drops values at random as it stands, or None."""
    for name, child in module.named_modules():
        if child.training and _drops(child):
            return name or type(child).__name__
    return None


def dropouts(module: nn.Module) -> list[nn.Module]:
    """The modules in it that drop values at random whenever they train."""
    return [child for child in module.modules() if _drops(child)]


def _drops(module: nn.Module) -> bool:
    if isinstance(module, _DROPOUTS):
        return module.p > 0
    if isinstance(module, nn.MultiheadAttention):
        return module.dropout > 0
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0
    rates = [getattr(module, name, 0) for name in _RATES]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)
