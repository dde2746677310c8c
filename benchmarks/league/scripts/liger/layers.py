"""Embeddings, feed-forward layers, and a mixture of experts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def build(case: dict[str, Any]) -> tuple[Callable, Callable]:
    """What one round calls, forward and backward."""
    builders = {"embedding": embedding, "megatron_swiglu": gated, "relu_squared": squared, "fused_moe": experts}
    return builders.get(case["kernel"], feed_forward)(case)


def random_gradient(output: Tensor, retain: bool = True) -> None:
    output.backward(torch.randn_like(output), retain_graph=retain)


def embedding(case: dict[str, Any]) -> tuple[Callable, Callable]:
    config, vocabulary = case["config"], case["x"]
    plain = nn.Embedding(vocabulary, config["D"]).to(config["dtype"])
    try:
        from liger_kernel.transformers.experimental.embedding import LigerEmbedding as Fused
    except ImportError:
        Fused = nn.Embedding
    fused = Fused(vocabulary, config["D"]).to(config["dtype"])
    compiled = torch.compile(plain)
    tokens = torch.randint(0, vocabulary, (config["B"], config["T"]))
    layer = {"liger": fused, "torch_compile": compiled}.get(case["provider"], plain)
    return lambda: (layer(tokens), fused)[0], partial(random_gradient, retain=False)


def feed_forward(case: dict[str, Any]) -> tuple[Callable, Callable]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    config = case["config"]
    size, inner = config["hidden_size"], config["intermediate_size"]
    settings = LlamaConfig(hidden_size=size, intermediate_size=inner, hidden_act=config["hidden_act"])
    x = torch.randn(config.get("bsz") or config["B"], case["x"], size, dtype=config["dtype"], requires_grad=True)
    provider = case["provider"]
    if provider == "huggingface":
        layer: Any = LlamaMLP(settings)
    elif provider == "deepspeed_tiled":
        layer = Tiled(LlamaMLP(settings), config["num_shards"])
    else:
        from liger_kernel import transformers as liger

        geglu = case["kernel"].endswith("geglu")
        if provider == "liger_tiled":
            made = liger.LigerTiledGEGLUMLP if geglu else liger.LigerTiledSwiGLUMLP
            layer = made(settings, num_shards=config["num_shards"])
        else:
            layer = (liger.LigerGEGLUMLP if geglu else liger.LigerSwiGLUMLP)(settings)
    layer = layer.to(config["dtype"])
    return lambda: layer(x), random_gradient


class InShards(torch.autograd.Function):
    """DeepSpeed's tiled feed-forward layer: shards without a graph, each computed again in the backward pass."""

    @staticmethod
    def forward(context: Any, layer: Callable, x: Tensor, shards: int) -> Tensor:
        context.layer, context.shards = layer, shards
        context.save_for_backward(x)
        pieces = list(torch.chunk(x, chunks=shards, dim=-2))
        with torch.no_grad():
            outputs = [layer(piece) for piece in pieces]
        return torch.cat(outputs, dim=-2)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        (x,) = context.saved_tensors
        x = x.detach().requires_grad_(True)
        shape = x.shape
        x = x.view(-1, shape[-1])
        incoming = gradients[0].view(-1, shape[-1])
        total = torch.zeros_like(x)
        pieces = list(torch.chunk(x, chunks=context.shards, dim=0))
        for number, piece in enumerate(pieces):
            piece.requires_grad_(True)
            offset, rows = number * pieces[0].shape[0], piece.shape[0]
            piece.grad = total.narrow(0, offset, rows).view_as(piece)
            wanted = incoming.narrow(0, offset, rows).view_as(piece)
            with torch.enable_grad():
                output = context.layer(piece)
            torch.autograd.backward(output, wanted)
        return None, total.view(shape), None


class Tiled(nn.Module):
    def __init__(self, layer: nn.Module, shards: int) -> None:
        super().__init__()
        self.layer, self.shards = layer, shards

    def forward(self, x: Tensor) -> Tensor:
        return InShards.apply(self.layer, x, self.shards)


def gated(case: dict[str, Any]) -> tuple[Callable, Callable]:
    config, inner = case["config"], case["x"]

    def plain(both: Tensor) -> Tensor:
        gate, up = torch.chunk(both, 2, -1)
        return functional.silu(gate) * up

    layer: Callable = plain
    if case["provider"].startswith("liger"):
        from liger_kernel.megatron.swiglu import LigerMegatronSwiGLU

        module = LigerMegatronSwiGLU(in_place=case["provider"] == "liger_in_place")
        layer = lambda both: module(both, None, False, False)  # noqa: E731
    x = torch.randn(config["S"], config["B"], 2 * inner, dtype=torch.bfloat16, requires_grad=True)

    def forward() -> Tensor:
        x.grad = None
        return layer(x)

    return forward, lambda output: output.sum().backward()


def squared(case: dict[str, Any]) -> tuple[Callable, Callable]:
    layer: Callable = lambda x: torch.square(functional.relu(x))  # noqa: E731
    if case["provider"] == "liger":
        from liger_kernel.transformers import LigerReLUSquared

        layer = LigerReLUSquared()
    x = torch.randn(case["x"], dtype=case["config"]["dtype"], requires_grad=True)
    return lambda: layer(x), lambda output: output.backward(torch.ones_like(output), retain_graph=True)


def experts(case: dict[str, Any]) -> tuple[Callable, Callable]:
    config = case["config"] | {case["config"]["sweep_dim"]: case["x"]}
    tokens, count, size, inner, chosen, dtype = (
        config[key] for key in ("T", "E", "H", "intermediate_dim", "K", "dtype")
    )
    x = torch.randn(tokens, size, dtype=dtype, requires_grad=True)
    # The scaled weights are what is used: the leaves, with their gradients, stay beside them.
    gate_up = torch.randn(count, 2 * inner, size, dtype=dtype, requires_grad=True) * 0.02
    down = torch.randn(count, size, inner, dtype=dtype, requires_grad=True) * 0.02
    logits = torch.randn(tokens, count)
    index = torch.topk(logits, chosen, dim=-1).indices.to(torch.int32)
    weights = torch.softmax(torch.gather(logits, 1, index.long()), dim=-1).to(dtype).requires_grad_(True)
    del logits
    if case["provider"] == "liger":
        from liger_kernel.ops import LigerFusedMoEFunction

        return lambda: LigerFusedMoEFunction.apply(x, gate_up, down, index, weights), random_gradient
    return lambda: by_expert(x, gate_up, down, index, weights), random_gradient


def by_expert(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """transformers' loop over the experts that got a token."""
    final = torch.zeros_like(x)
    with torch.no_grad():
        mask = functional.one_hot(index.long(), num_classes=gate_up.shape[0])
        mask = mask.permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for row in hit:
        expert = row[0]
        position, token = torch.where(mask[expert])
        current = x[token]
        gate, up = functional.linear(current, gate_up[expert]).chunk(2, dim=-1)
        current = functional.silu(gate) * up
        current = functional.linear(current, down[expert])
        current = current * weights[token, position, None]
        final.index_add_(0, token, current.to(final.dtype))
    return final
