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
from tonnage.fit.layers import attention
from tonnage.fit.modules import replace_forward
from tonnage.fit.technique import Technique
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
        reasons = [part.why_not or attention.why_not_dropout(part.dropout, self.dropout) for part in found]
        return None if None in reasons else reasons[0]

    def place(self, training: Training, stack: ExitStack) -> None:
        for part in _unfused(training.model):
            if part.why_not is None and attention.why_not_dropout(part.dropout, self.dropout) is None:
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
    for part in attention.attention_models(model).values():
        if attention.eager_configs(part):
            kind, eager = type(part).__name__, attention.eager_configs(part)
            reason = None
            if any(map(attention.has_soft_cap, eager)):
                reason = f"{kind} caps its attention scores, which fused kernels would leave out."
            elif any(name.rpartition(".")[2] == "sinks" for name, _ in part.named_parameters()):  # gpt-oss
                reason = f"{kind} has attention sinks, which fused kernels do not know."
            elif any(getattr(config, "output_attentions", False) for config in eager):
                reason = f"{kind} is configured to return its attention weights (output_attentions), which are then not made."
            elif not getattr(part, "_supports_sdpa", False):
                reason = f"transformers has no fused attention for {kind}."
            yield _Part(reason, attention.dropout_of(part), partial(attention.set_implementation, part, "sdpa"))
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
