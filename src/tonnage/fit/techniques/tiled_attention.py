"""Attention in tiles, for transformers models whose attention no fused kernel computes: soft caps, sinks, biases.

It is registered with transformers as another attention implementation, with masks of one line per batch row instead
of a square. Tiles are computed by `tonnage.fit.layers.tiled_softmax`.
"""

import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tonnage.errors import TonnageError
from tonnage.fit.layers.attention import (
    attention_models,
    dropout_of,
    eager_configs,
    set_implementation,
    why_not_dropout,
)
from tonnage.fit.layers.tiled_softmax import Scores, tiled_attention
from tonnage.fit.technique import Technique
from tonnage.fit.training import Training

# Arguments of a model's eager attention that tiles support.
_KNOWN = set(
    "module query key value attention_mask dropout scaling softcap sliding_window s_aux is_causal position_bias "
    "kwargs".split()
)


class WindowMissing(TonnageError, RuntimeError):
    """Raised if a mask has a sliding window but the layer does not say how wide it is."""


class TiledAttention(Technique, name="tiled-attention"):
    """Computes `tile_rows` query rows at a time; `dropout="resampled"` accepts other random numbers."""

    tile_rows: int = 256
    dropout: str = "same"

    def why_not(self, training: Training) -> str | None:
        if self.tile_rows < 1:
            return f"tile_rows={self.tile_rows}: a tile has at least one row."
        models = _eager_models(training.model)
        if not models:
            return "No model of transformers with eager attention was found."
        reasons = (_why_not_model(model) or why_not_dropout(dropout_of(model), self.dropout) for model in models)
        return next(filter(None, reasons), None)

    def place(self, training: Training, stack: ExitStack) -> None:
        name = _register(self.tile_rows)
        for model in _eager_models(training.model):
            stack.callback(set_implementation(model, name))


def _eager_models(model: nn.Module) -> list[nn.Module]:
    return [part for part in attention_models(model).values() if eager_configs(part)]


def _why_not_model(model: nn.Module) -> str | None:
    kind = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        return f"transformers lets {kind} use its own attention only."
    if any(getattr(config, "output_attentions", False) for config in eager_configs(model)):
        return f"{kind} is configured to return its attention weights (output_attentions), which are then not made."
    if any(getattr(module, "reorder_and_upcast_attn", False) for module in model.modules()):
        return f"{kind} computes its attention in another order (reorder_and_upcast_attn), which tiles would leave out."
    # Check the eager attention function of the file that defines each module, if any.
    files = (sys.modules.get(type(module).__module__) for module in model.modules())
    eager = {file.eager_attention_forward for file in files if file and hasattr(file, "eager_attention_forward")}
    unknown = sorted({name for function in eager for name in inspect.signature(function).parameters} - _KNOWN)
    return f"{kind}'s attention takes {', '.join(unknown)}, which tiles would leave out." if unknown else None


def _register(tile_rows: int) -> str:
    from transformers import AttentionInterface, AttentionMaskInterface

    name = f"tonnage_tiled_{tile_rows}"
    AttentionInterface.register(name, partial(attention_forward, tile_rows=tile_rows))
    AttentionMaskInterface.register(name, make_mask)
    return name


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    **settings: Any,
) -> Tensor | None:
    """Return the smallest mask that expresses the rule; the first dimension is the batch:

    2 dimensions    causal, and which keys are not padding
    3 dimensions    the same with the layer's sliding window
    4 dimensions    the whole rule: True where a score counts; one row if all rows are equal
    """
    from transformers import masking_utils

    # Which of three known rules is it?
    kind = None
    if mask_function is masking_utils.causal_mask_function:
        kind = "causal"
    elif mask_function is masking_utils.bidirectional_mask_function:
        kind = "all"
    elif mask_function is not None and getattr(mask_function, "__qualname__", "") == "and_masks.<locals>.and_mask":
        parts = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", ())
        names = {getattr(part, "__qualname__", "") for part in parts}
        if names == {"sliding_window_overlay.<locals>.inner_mask", "causal_mask_function"}:
            kind = "window"
    if kind is None or q_length != kv_length or (int(q_offset), int(kv_offset)) != (0, 0):
        settings |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return masking_utils.sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            device=device,
            **settings,
        )
    keys = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    if attention_mask is not None:
        keys = attention_mask[:, :kv_length].bool()
    return {"causal": keys, "window": keys[:, None], "all": keys[:, None, None]}[kind]


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tile_rows: int,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature that transformers calls."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = Scores(
        scaling=scaling,
        soft_cap=softcap,
        dropout=dropout,
        # From the host's generator, which recomputation in backward restores.
        seed=int(torch.randint(2**62, ())) if dropout else 0,
        **_rules(module, query, attention_mask, sliding_window, is_causal),
    )
    bias = position_bias
    if attention_mask is not None and attention_mask.is_floating_point():  # a user's additive mask
        bias = attention_mask if bias is None else bias + attention_mask
    sinks = getattr(module, "sinks", None) if s_aux is None else s_aux
    mixed = tiled_attention(query, key, value, scores, tile_rows=tile_rows, bias=bias, sinks=sinks)
    return mixed.transpose(1, 2).contiguous(), None


def _rules(
    module: nn.Module, query: Tensor, mask: Tensor | None, window: int | None, is_causal: bool | None
) -> dict[str, Any]:
    """Return which scores count, from a mask of `make_mask`; without one, from the layer's own flag."""
    if mask is None:
        flag = getattr(module, "is_causal", True) if is_causal is None else is_causal
        return {"causal": bool(flag) and query.shape[2] > 1, "window": window if flag else None}
    if mask.dim() == 4:
        return {} if mask.is_floating_point() else {"mask": mask.bool()}
    if mask.dim() == 2:
        return {"causal": True, "keys": mask}
    if window is None:
        raise WindowMissing(
            f"{type(module).__name__} has a mask with a sliding window but does not say how wide it is.",
            hint="Leave tiled-attention out for this model.",
        )
    return {"causal": True, "window": window, "keys": mask[:, 0]}
