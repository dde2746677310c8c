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
