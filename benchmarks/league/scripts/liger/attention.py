"""Rotary embeddings, softmaxes, and attention over scores."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def build(case: dict[str, Any]) -> tuple[Callable, Callable]:
    """What one round calls, forward and backward."""
    kernel = case["kernel"]
    if "rope" in kernel:
        return rotary(case)
    if kernel in ("softmax", "sparsemax"):
        return normalised(case)
    return neighbourhood(case) if kernel == "fused_neighborhood_attention" else multi_token(case)


def rotary(case: dict[str, Any]) -> tuple[Callable, Callable]:
    config, late, kernel = case["config"], case["late"], case["kernel"]
    heads = config["num_attention_heads"] if late else config["num_q_heads"]
    groups = config["num_key_value_heads"] if late else config["num_kv_heads"]
    size = config.get("hidden_size") or case["x"]
    length = case["x"] if late or "seq_len" not in config else config["seq_len"]
    width = size // heads
    query, key = (
        torch.randn((1, length, count, width), dtype=config["dtype"], requires_grad=True) for count in (heads, groups)
    )
    if kernel != "llama4_rope":
        query, key = query.transpose(1, 2), key.transpose(1, 2)
    if not late:
        gradients = torch.randn_like(query), torch.randn_like(key)
    positions = torch.arange(length, dtype=torch.long).unsqueeze(0)
    rotate = {"rope": llama, "llama4_rope": llama4, "qwen2vl_mrope": qwen2_vl}[kernel](
        case, query, key, positions, size, heads, groups
    )
    if late:
        return lambda: rotate()[0], None
    both = lambda outputs: torch.autograd.grad(  # noqa: E731
        outputs, (query, key), gradients, allow_unused=True, retain_graph=True
    )
    return rotate, both


def llama(case: dict, query: Tensor, key: Tensor, positions: Tensor, size: int, heads: int, groups: int) -> Callable:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    angles = LlamaRotaryEmbedding(LlamaConfig(head_dim=size // heads), device="cuda")
    cosine, sine = angles(key, positions)
    if case["provider"] == "liger":
        from liger_kernel.transformers import liger_rotary_pos_emb

        return lambda: (liger_rotary_pos_emb(query, key, cosine, sine, positions), angles)[0]
    return lambda: (apply_rotary_pos_emb(query, key, cosine, sine), angles, positions)[0]


def llama4(case: dict, query: Tensor, key: Tensor, positions: Tensor, size: int, heads: int, groups: int) -> Callable:
    from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextRotaryEmbedding, apply_rotary_emb

    settings = Llama4TextConfig(
        hidden_size=size, num_attention_heads=heads, num_key_value_heads=groups, head_dim=size // heads,
        max_position_embeddings=positions.shape[-1],
    )  # fmt: skip
    embedding = Llama4TextRotaryEmbedding(config=settings, device="cuda")
    angles = embedding(query, positions)
    if case["provider"] == "liger":
        from liger_kernel.transformers import liger_llama4_text_rotary_pos_emb as rotate
    else:
        rotate = apply_rotary_emb
    return lambda: (rotate(query, key, angles), embedding, positions)[0]


def qwen2_vl(case: dict, query: Tensor, key: Tensor, positions: Tensor, size: int, heads: int, groups: int) -> Callable:
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding, apply_multimodal_rotary_pos_emb

    width = size // heads
    sides = width * 3 // 16
    sections = [width // 2 - 2 * sides, sides, sides]
    settings = Qwen2VLTextConfig(hidden_size=size, num_attention_heads=heads, num_key_value_heads=groups)
    embedding = Qwen2VLRotaryEmbedding(settings, device="cuda")
    positions = torch.arange(positions.shape[-1] * 3, dtype=torch.long).view(3, 1, -1)
    cosine, sine = embedding(key, positions)
    if case["provider"] == "liger":
        from liger_kernel.transformers.qwen2vl_mrope import liger_multimodal_rotary_pos_emb as rotate
    else:
        rotate = apply_multimodal_rotary_pos_emb
    return lambda: (rotate(query, key, cosine, sine, sections), embedding, positions)[0]


def normalised(case: dict[str, Any]) -> tuple[Callable, Callable]:
    config, sparse = case["config"], case["kernel"] == "sparsemax"
    layer: Callable = sparsemax if sparse else nn.Softmax(dim=-1)
    if case["provider"] == "liger":
        from liger_kernel.transformers import LigerSoftmax, LigerSparsemax

        layer = LigerSparsemax(dim=-1) if sparse else LigerSoftmax()
    if case["late"]:
        x = torch.randn(case["x"], config["hidden_size"], dtype=config["dtype"], requires_grad=True)
        return lambda: layer(x), None
    if sparse:
        x = torch.randn(config["B"] * config["T"], case["x"], dtype=config["dtype"])
        gradient = torch.randn_like(x)
        x.requires_grad_(True)
        return lambda: layer(x), lambda output: output.backward(gradient, retain_graph=True)
    # The number that was swept is the whole shape: one row.
    x = torch.randn(case["x"], dtype=config["dtype"], requires_grad=True)
    return lambda: layer(x), lambda output: output.backward(torch.ones_like(output), retain_graph=True)


def sparsemax(x: Tensor) -> Tensor:
    size = x.size(-1)
    ordered, _ = torch.sort(x, dim=-1, descending=True)
    summed = torch.cumsum(ordered, dim=-1)
    ranks = torch.arange(1, size + 1, device=x.device, dtype=x.dtype).view([1] * (x.dim() - 1) + [size])
    bound = 1 + ranks * ordered
    support = bound > summed
    count = support.sum(dim=-1, keepdim=True).clamp(min=1)
    total = (ordered * support).sum(dim=-1, keepdim=True)
    threshold = (total - 1) / count
    return torch.clamp(x - threshold, min=0)


class MultiToken(nn.Module):
    """Masked scores, their softmax or sparsemax, and a convolution over it."""

    def __init__(self, config: dict[str, Any], sparse: bool) -> None:
        super().__init__()
        size, dtype = config["K"], config["dtype"]
        self.weight = nn.Parameter(
            torch.empty(config["C_out"], config["C_in"] // config["groups"], size, size, dtype=dtype)
        )
        self.bias = nn.Parameter(torch.empty(config["C_out"], dtype=dtype))
        self.padding, self.groups, self.sparse = size // 2, config["groups"], sparse

    def forward(self, scores: Tensor) -> Tensor:
        length = scores.shape[-1]
        mask = torch.tril(torch.ones(length, length, dtype=torch.bool, device=scores.device)).view(1, 1, length, length)
        least, zero = (torch.tensor(value, dtype=scores.dtype, device=scores.device) for value in (-1e9, 0.0))
        masked = scores.masked_fill(~mask, least)
        likely = self.sparse_rows(masked) if self.sparse else functional.softmax(masked, dim=-1)
        output = functional.conv2d(likely, self.weight, self.bias, stride=1, padding=self.padding, groups=self.groups)
        return output.masked_fill(~mask, zero)

    def sparse_rows(self, x: Tensor) -> Tensor:
        ordered, _ = torch.sort(x, dim=-1, descending=True)
        summed = torch.cumsum(ordered, dim=-1)
        ranks = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype).view(1, 1, 1, -1)
        positive = ordered > -1e8
        condition = (1 + ranks * ordered > summed) & positive
        count = torch.sum(condition, dim=-1, keepdim=True)
        safe = torch.max(count, torch.ones_like(count))
        total = torch.gather(summed, dim=-1, index=safe.long() - 1)
        threshold = (total - 1) / safe.to(x.dtype)
        threshold = torch.where(count == 0, torch.full_like(threshold, float("inf")), threshold)
        return torch.clamp(x - threshold, min=0)


def multi_token(case: dict[str, Any]) -> tuple[Callable, Callable]:
    config, sparse = case["config"], case["kernel"].startswith("sparse")
    plain = MultiToken(config, sparse)
    fused: Any = None
    try:
        from liger_kernel.transformers import LigerMultiTokenAttention

        fused = LigerMultiTokenAttention(
            config["C_in"], config["C_out"], config["K"], stride=1, padding=config["K"] // 2, dilation=1,
            groups=config["groups"], bias=config["bias"], sparse=sparse,
        ).to(config["dtype"])  # fmt: skip
    except ImportError:
        fused = MultiToken(config, sparse)
    layer = fused if case["provider"] == "liger" else plain
    x = torch.randn(config["B"], config["C_in"], case["x"], case["x"], dtype=config["dtype"])
    gradient = torch.randn_like(x)
    x.requires_grad_(True)

    def backward(output: Tensor) -> None:
        output.backward(gradient, retain_graph=True)

    return lambda: (layer(x), plain, fused)[0], backward


class Neighbourhood(nn.Module):
    """Attention whose mask leaves each token its neighbours."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(size, size) for _ in range(4))
        self.heads, self.width = heads, size // heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = (
            part.view(batch, length, self.heads, self.width).transpose(1, 2) for part in (query, key, value)
        )
        scores = torch.matmul(query, key.transpose(-2, -1)) * self.width**-0.5
        # Its neighbours are marked one by one, which takes no memory.
        mask = torch.zeros(length, length, dtype=torch.bool, device=x.device)
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        mixed = torch.matmul(weights, value)
        mixed = mixed.transpose(1, 2).contiguous().view(batch, length, size)
        return self.out(mixed)


def neighbourhood(case: dict[str, Any]) -> tuple[Callable, Callable]:
    config = case["config"]
    size, heads = config["hidden_size"], config["num_heads"]
    plain = Neighbourhood(size, heads).to(config["dtype"])
    fused: Any = None
    try:
        from liger_kernel.transformers.fused_neighborhood_attention import LigerFusedNeighborhoodAttention

        fused = LigerFusedNeighborhoodAttention(
            hidden_size=size, num_heads=heads, kernel_size=config["kernel_size"], dilation=config["dilation"],
            bias=config["bias"], dropout=0.0,
        ).to(config["dtype"])  # fmt: skip
    except ImportError:
        fused = Neighbourhood(size, heads).to(config["dtype"])
    layer = fused if case["provider"] == "liger" else plain
    x = torch.randn(config["batch_size"], case["x"], size, dtype=config["dtype"])
    gradient = torch.randn_like(x)
    x.requires_grad_(True)
    return lambda: (layer(x), plain, fused)[0], lambda output: output.backward(gradient, retain_graph=True)
