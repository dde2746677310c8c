"""Find which attention a model runs, and switch transformers models from one implementation to another.

Only their configurations are read and written, without importing transformers. It does not know how attention is
computed.
"""

from contextlib import ExitStack
from typing import Any

from torch import nn

from tonnage.fit.technique import NotApplicable
from tonnage.fit.training import Undo

_DROPOUTS = (
    "attention_dropout attention_probs_dropout_prob attn_pdrop attn_dropout attn_drop_rate attention_drop_rate".split()
)
DROPOUT_SETTINGS = ("same", "resampled")


def attention_models(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost transformers models by name: the model itself, or those that it holds."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(outer == "" or name.startswith(outer + ".") for outer in found)
        if not inside and hasattr(module, "set_attn_implementation"):
            found[name] = module
    return found


def configs_of(model: nn.Module) -> list[Any]:
    """Return every configuration of a transformers model and its parts, once each."""
    configs = [part.config for part in _parts(model)]
    for config in configs:  # which grows, for those of parts have parts again
        parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", ()))
        configs += [part for part in parts if part is not None]
    return list({id(config): config for config in configs}.values())


def _parts(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "set_attn_implementation")]


def eager_configs(model: nn.Module) -> list[Any]:
    """Return the configurations of parts with eager attention."""
    return [config for config in configs_of(model) if config._attn_implementation == "eager"]


def has_soft_cap(config: Any) -> bool:
    """Return whether attention scores are capped (Gemma 2), not only the model's logits."""
    caps = [value for name, value in vars(config).items() if name.startswith("att") and "cap" in name and value]
    return bool(caps) and isinstance(caps[0], int | float)


def dropout_of(model: nn.Module) -> float:
    """Return the highest active dropout rate of attention weights in a transformers model."""
    if not model.training:
        return 0.0
    rates = [getattr(config, name, 0.0) for config in configs_of(model) for name in _DROPOUTS]
    for module in model.modules():
        if "Attention" in type(module).__name__:  # T5 has one rate for all its dropouts
            dropout = getattr(module, "dropout", 0.0)
            rates.append(dropout.p if isinstance(dropout, nn.Dropout) else dropout)
    return max((float(rate) for rate in rates if isinstance(rate, int | float)), default=0.0)


def why_not_dropout(rate: float, setting: str) -> str | None:
    if setting not in DROPOUT_SETTINGS:
        return f'dropout={setting!r} is neither "same" nor "resampled".'
    if rate == 0 or setting == "resampled":
        return None
    return (
        f"Attention drops weights at a rate of {rate:g}: this attention draws other random numbers than the plain one. "
        'dropout="resampled" accepts that.'
    )


def set_implementation(model: nn.Module, implementation: str) -> Undo:
    """Switch a transformers model to another attention; raises NotApplicable if it cannot."""
    before = [(config, config._attn_implementation) for config in configs_of(model)]

    def undo() -> None:
        for config, had in before:
            config._attn_implementation_internal = had

    with ExitStack() as stack:
        stack.callback(undo)
        try:
            # Parts may hold a copy of the configuration (T5); transformers sets only the model's own.
            for part in _parts(model):
                if part.config._attn_implementation != implementation:
                    part.set_attn_implementation(implementation)
        except (ValueError, ImportError) as error:
            raise NotApplicable(f"transformers refuses {implementation!r} attention: {error}") from error
        if not any(config._attn_implementation == implementation for config, _ in before):
            raise NotApplicable(f"{type(model).__name__} cannot change its attention while it lives.")
        stack.pop_all()
    return undo
