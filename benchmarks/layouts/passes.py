"""Ways to run a pass that change what it keeps: recomputation of blocks, and a loss of some tokens at a time."""

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutput

CHUNKS = 8  # of torchtune's and torchtitan's chunked losses
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def recompute(model: Any, checkpoint: str, *, offload: bool) -> None:
    """In place, as the exported `train.py` does it; or, where what is kept goes to the host, as accelerate does it."""
    if checkpoint == "none":
        return
    if offload:
        layers = model.model.layers
        for number, block in enumerate(layers):
            layers[number] = offload_wrapper(checkpoint_wrapper(block, preserve_rng_state=False))
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if checkpoint == "selective":
        options["context_fn"] = _keep_some
    model.gradient_checkpointing_enable(options)
    if checkpoint.startswith("every-"):
        for number, block in enumerate(blocks_of(model), start=1):
            block.gradient_checkpointing = number % int(checkpoint.removeprefix("every-")) == 0


def blocks_of(model: nn.Module) -> list[Any]:
    """The decoder's, whoever wraps it."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _keep_some() -> Any:
    """Attention and every other matrix product are kept; the rest of a block is computed again."""
    products = {False: 0, True: 0}  # in the forward pass, in the recomputation

    def policy(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        kept = operator in ATTENTION
        if operator in PRODUCTS:
            products[context.is_recompute] += 1
            kept = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class ChunkedLoss(nn.Module):
    """A causal model whose head sees some of the tokens at a time, and again in the backward pass."""

    def __init__(self, causal: Any) -> None:
        super().__init__()
        self.model, self.lm_head = causal.model, causal.lm_head

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor, **_: Any
    ) -> CausalLMOutput:
        """The mean loss; FSDP2 finds it in there, to gather the head again before its backward pass."""
        hidden = self.model(input_ids=input_ids, position_ids=position_ids).last_hidden_state.flatten(0, 1)
        parts = zip(hidden.chunk(CHUNKS), labels.flatten().chunk(CHUNKS), strict=True)
        losses = [checkpoint(self._of, some, picked, use_reentrant=False) for some, picked in parts]
        return CausalLMOutput(loss=torch.stack(losses).sum() / labels.numel())

    def _of(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.lm_head(hidden).float(), labels, reduction="sum")
