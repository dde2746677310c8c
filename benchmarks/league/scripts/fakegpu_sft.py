"""One step of fine-tuning Qwen3.5 on random tokens: the whole model, LoRA, or LoRA over weights in plain PyTorch's NF4.

fakegpu_sft.py OUT MODEL METHOD LENGTH [--accumulation N] [--checkpointing]
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

RANK, ALPHA = 8, 16
SIZES = {"0.8B": (1024, 3584), "2B": (2048, 6144)}


def build(size: str) -> Qwen3_5ForCausalLM:
    hidden, inner = SIZES[size]
    config = Qwen3_5TextConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=2,
        linear_num_key_heads=16, linear_num_value_heads=16, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    # Made on the card, where nothing has to be computed; what was loaded to the host and moved there takes as much.
    with torch.device("cuda"):
        return Qwen3_5ForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")


def delta_rule(query, key, value, g, beta, chunk_size=64, use_qk_l2norm_in_kernel=False, **_):
    """The gated delta rule as transformers 5.12 has it: later ones solve by rows what it solves element by element.

    Each step of that keeps copies for the backward pass.
    """
    dtype = query.dtype
    if use_qk_l2norm_in_kernel:
        query, key = modeling_qwen3_5.l2norm(query), modeling_qwen3_5.l2norm(key)
    query, key, value, beta, g = (
        x.transpose(1, 2).contiguous().to(torch.float32) for x in (query, key, value, beta, g)
    )
    length = key.shape[2]
    missing = -length % chunk_size
    query, key, value = (functional.pad(x, (0, 0, 0, missing)) for x in (query, key, value))
    beta, g = (functional.pad(x, (0, missing)) for x in (beta, g))
    query = query * query.shape[-1] ** -0.5
    v_beta, k_beta = value * beta.unsqueeze(-1), key * beta.unsqueeze(-1)
    query, key, value, k_beta, v_beta = (
        x.reshape(x.shape[0], x.shape[1], -1, chunk_size, x.shape[-1]) for x in (query, key, value, k_beta, v_beta)
    )
    g = g.reshape(g.shape[0], g.shape[1], -1, chunk_size)
    ones = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=query.device)
    upper = torch.triu(ones, diagonal=0)
    g = g.cumsum(dim=-1)
    decay = ((g.unsqueeze(-1) - g.unsqueeze(-2)).tril().exp().float()).tril()
    system = -((k_beta @ key.transpose(-1, -2)) * decay).masked_fill(upper, 0)
    for at in range(1, chunk_size):
        row, above = system[..., at, :at].clone(), system[..., :at, :at].clone()
        system[..., at, :at] = row + (row.unsqueeze(-1) * above).sum(-2)
    system = system + torch.eye(chunk_size, dtype=system.dtype, device=system.device)
    value = system @ v_beta
    faded = system @ (k_beta * g.exp().unsqueeze(-1))
    state = torch.zeros(*value.shape[:2], key.shape[-1], value.shape[-1], device=value.device)
    output = torch.zeros_like(value)
    upper = torch.triu(ones, diagonal=1)
    for at in range(value.shape[2]):
        q, k, v = query[:, :, at], key[:, :, at], value[:, :, at]
        within = (q @ k.transpose(-1, -2) * decay[:, :, at]).masked_fill_(upper, 0)
        new = v - faded[:, :, at] @ state
        before = (q * g[:, :, at, :, None].exp()) @ state
        output[:, :, at] = before + within @ new
        kept = (k * (g[:, :, at, -1, None] - g[:, :, at]).exp()[..., None]).transpose(-1, -2)
        state = state * g[:, :, at, -1, None, None].exp() + kept @ new
    output = output.reshape(output.shape[0], output.shape[1], -1, output.shape[-1])[:, :, :length]
    return output.transpose(1, 2).contiguous().to(dtype), None


def dequantized(
    packed: Tensor, scales: Tensor, lookup: Tensor, nested: tuple[Tensor, ...], shape: tuple[int, int]
) -> Tensor:
    """The matrix again: scales first, then two codes of every byte."""
    dtype = lookup.dtype
    if nested:
        absmax, offset, scale_lookup = nested
        indices = scales.to(torch.int32)
        values = functional.embedding(indices, scale_lookup).reshape(-1)
        del indices
        groups = absmax.repeat_interleave(256)[: scales.numel()]
        values.mul_(groups).add_(offset)
        del groups
        restored = values.to(dtype)
        del values
    else:
        restored = scales.to(dtype)
    indices = packed.to(torch.int32)
    codes = functional.embedding(indices, lookup).reshape(-1)
    del indices
    blocks = codes.view(scales.numel(), 64)
    weight = blocks * restored.unsqueeze(1)
    del codes, blocks, restored
    return weight.reshape(-1)[: math.prod(shape)].view(shape)


class FrozenLinear(torch.autograd.Function):
    """A product with a matrix that is unpacked for the forward pass and again for the backward pass."""

    @staticmethod
    def forward(context, x, shape, packed, scales, lookup, *nested):
        context.save_for_backward(packed, scales, lookup, *nested)
        context.shape = shape
        return functional.linear(x, dequantized(packed, scales, lookup, nested, shape))

    @staticmethod
    def backward(context, gradient):
        packed, scales, lookup, *nested = context.saved_tensors
        result = None
        if context.needs_input_grad[0]:
            weight = dequantized(packed, scales, lookup, tuple(nested), context.shape)
            result = torch.matmul(gradient, weight)
        return result, *[None] * (4 + len(nested))


class PackedLora(nn.Module):
    """A frozen linear layer as bytes of two codes with scales, and its adapter in 32 bits."""

    def __init__(self, linear: nn.Linear, nested: bool) -> None:
        super().__init__()
        self.shape = linear.out_features, linear.in_features
        blocks = math.ceil(math.prod(self.shape) / 64)
        self.register_buffer("packed", torch.empty(blocks * 32, dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(blocks, dtype=torch.uint8 if nested else torch.float32))
        self.register_buffer("lookup", torch.empty(256, 2, dtype=linear.weight.dtype))
        self.nested = nested
        if nested:
            self.register_buffer("absmax", torch.empty(math.ceil(blocks / 256)))
            self.register_buffer("offset", torch.empty(()))
            self.register_buffer("scale_lookup", torch.empty(256, 1))
        self.lora_a = nn.Parameter(torch.empty(RANK, linear.in_features))
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, RANK))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        nested = (self.absmax, self.offset, self.scale_lookup) if self.nested else ()
        base = FrozenLinear.apply(x, self.shape, self.packed, self.scales, self.lookup, *nested)
        given = self.dropout(x).to(self.lora_a.dtype)
        adapter = functional.linear(functional.linear(given, self.lora_a), self.lora_b)
        return base + adapter.to(base.dtype) * (ALPHA / RANK)


def pack(model: nn.Module, nested: bool) -> None:
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and module is not head:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, PackedLora(module, nested))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("model", choices=SIZES)
    parser.add_argument("method", choices=["full", "lora", "qlora", "nested"])
    parser.add_argument("length", type=int)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--checkpointing", action="store_true")
    options = parser.parse_args()

    modeling_qwen3_5.torch_chunk_gated_delta_rule = delta_rule
    model = build(options.model)
    if options.method == "lora":
        from peft import LoraConfig, get_peft_model

        settings = LoraConfig(r=RANK, lora_alpha=ALPHA, bias="none", task_type="CAUSAL_LM", target_modules="all-linear")
        model = get_peft_model(model, settings)
    elif options.method != "full":
        pack(model, options.method == "nested")
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if options.method != "full":
            model.enable_input_require_grads()
    model.train()
    model.to("cuda")

    batches = []
    for _ in range(options.accumulation):
        tokens = torch.randint(100, 248320, (1, options.length))
        labels = tokens.clone()
        labels[:, : options.length // 2] = -100
        positions = torch.arange(options.length).view(1, 1, -1).expand(3, 1, options.length).clone()
        given = {"input_ids": tokens, "labels": labels, "position_ids": positions}
        batches.append({name: tensor.to("cuda") for name, tensor in given.items()})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, foreach=False)
    torch.cuda.reset_peak_memory_stats()
    for number, batch in enumerate(batches, 1):
        outputs = model(**batch, use_cache=False)
        loss = outputs.loss / options.accumulation
        loss.backward()
        loss.item()
        if number < options.accumulation:
            del outputs, loss
    optimizer.step()
    options.out.write_text(str(torch.cuda.max_memory_allocated()))


if __name__ == "__main__":
    main()
