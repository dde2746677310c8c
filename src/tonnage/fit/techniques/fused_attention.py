"""Fused attention for models that compute it step by step: the score matrix is never written to memory.

Models of transformers are switched from "eager" to "sdpa", modules of timm by their own flag, and
`nn.MultiheadAttention` stops returning unused weights. PyTorch chooses the kernel, or `backend` does. Handwritten
attention is not detected; for what fused kernels cannot do, see tiled-attention.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tonnage.errors import TonnageError
from tonnage.fit.modules import replace_forward
from tonnage.fit.technique import NotApplicable, Technique
from tonnage.fit.training import Training, Undo, set_attributes

# The chosen one is tried first; the others handle what it cannot.
_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_CHOICES = ("default", "cudnn", "flash", "efficient")


class AttentionWeightsNotMade(TonnageError, AttributeError):
    """Raised if attention weights are read, which fused attention does not compute."""


class FusedAttention(Technique, name="fused-attention"):
    """Fuses attention; `backend` is the kernel to try first, `dropout="resampled"` accepts other random numbers."""

    backend: str = "default"
    dropout: str = "same"

    def why_not(self, training: Training) -> str | None:
        if self.backend not in _CHOICES:
            return f"backend={self.backend!r} is none of {', '.join(_CHOICES)}."
        if self.backend != "default" and training.device.type != "cuda":
            return f"backend={self.backend!r} names a kernel for CUDA; this training is on {training.device.type}."
        found = list(_unfused(training.model))
        if not found:
            return None if self.backend != "default" else "No attention was found that is not fused already."
        reasons = [part.why_not or why_not_dropout(part.dropout, self.dropout) for part in found]
        return None if None in reasons else reasons[0]

    def place(self, training: Training, stack: ExitStack) -> None:
        for part in _unfused(training.model):
            if part.why_not is None and why_not_dropout(part.dropout, self.dropout) is None:
                stack.callback(part.fuse())
        if self.backend != "default":
            # Process-wide in PyTorch, so that recomputation in backward sees it too; only speed depends on it.
            first = _BACKENDS[self.backend]
            rest = [backend for backend in _BACKENDS.values() if backend != first]
            stack.enter_context(sdpa_kernel([first, *rest], set_priority=True))


@dataclass(frozen=True)
class _Part:
    why_not: str | None
    dropout: float  # the current rate
    fuse: Callable[[], Undo]


def _unfused(model: nn.Module) -> Iterator[_Part]:
    for part in attention_models(model).values():
        if eager_configs(part):
            kind, eager = type(part).__name__, eager_configs(part)
            reason = None
            if any(map(has_soft_cap, eager)):
                reason = f"{kind} caps its attention scores, which fused kernels would leave out."
            elif any(name.rpartition(".")[2] == "sinks" for name, _ in part.named_parameters()):  # gpt-oss
                reason = f"{kind} has attention sinks, which fused kernels do not know."
            elif any(getattr(config, "output_attentions", False) for config in eager):
                reason = f"{kind} is configured to return its attention weights (output_attentions), which are then not made."
            elif not getattr(part, "_supports_sdpa", False):
                reason = f"transformers has no fused attention for {kind}."
            yield _Part(reason, dropout_of(part), partial(set_implementation, part, "sdpa"))
    layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)  # these request no weights
    asked_by_layers = {child for layer in model.modules() if isinstance(layer, layers) for child in layer.children()}
    for module in model.modules():
        if getattr(module, "fused_attn", None) is False:  # a timm module, whose forward checks the flag
            dropout = getattr(module, "attn_drop", None)
            rate = dropout.p if isinstance(dropout, nn.Dropout) and module.training else 0.0
            yield _Part(None, rate, partial(set_attributes, module, fused_attn=True))
        elif isinstance(module, nn.MultiheadAttention) and module not in asked_by_layers:
            rate = module.dropout if module.training else 0.0
            yield _Part(None, rate, partial(_drop_weights, module))


class _NoWeights:
    """A placeholder for attention weights that raises when it is read."""

    def __getattr__(self, name: str) -> Any:
        raise AttentionWeightsNotMade(
            f"The attention weights of an nn.MultiheadAttention were read ({name}); fused attention does not make them.",
            hint="Leave fused-attention out for this model.",
        )


def _drop_weights(module: nn.MultiheadAttention) -> Undo:
    plain = module.forward

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Any]:
        output, _ = plain(query, key, value, key_padding_mask, False, attn_mask, is_causal=is_causal)
        return output, _NoWeights() if need_weights else None

    return replace_forward(module, forward)


# Which attention a model of transformers runs, read from its configurations and set there -----------------------------

_DROPOUTS = (
    "attention_dropout attention_probs_dropout_prob attn_pdrop attn_dropout attn_drop_rate attention_drop_rate".split()
)


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
    if setting not in ("same", "resampled"):
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
