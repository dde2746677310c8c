"""What training loops do around operators: checkpoints, hooks, saved tensors on the host, accumulation, double backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from .spec import BF16, F16, F32, Case, Made, case, ints, module, t


def block(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(dropout), nn.Linear(256, 64))


def cases() -> Iterator[Case]:
    for dtype in (F32, BF16):
        x = t(32, 64, dtype=dtype)
        for dropout in (0.0, 0.1):
            for reentrant in (True, False):
                for keep in (True, False):
                    yield case("checkpoint", lambda m, x, r, k: checkpoint(m, x, use_reentrant=r, preserve_rng_state=k), module(lambda p=dropout: block(p), dtype), x, reentrant, keep,
                               backward=not reentrant, note=f"reentrant={reentrant} keep rng={keep} dropout={dropout}")  # fmt: skip
                    yield case("checkpoint and backward", _checkpoint_backward, module(lambda p=dropout: block(p), dtype), x, reentrant, keep, backward=False)
        yield case("checkpoint_sequential", lambda m, x: checkpoint_sequential(m, 2, x, use_reentrant=False), module(block, dtype), x)
        for zero in (True, False):
            yield case("train step", _train_step, module(block, dtype), x, zero, backward=False, note=f"set_to_none={zero}")
        yield case("accumulate", _accumulate, module(block, dtype), x, backward=False)
        yield case("save_on_cpu", _save_on_cpu, module(block, dtype), x, False, backward=False)
        yield case("save_on_cpu", _save_on_cpu, module(block, dtype), x, True, backward=False, note="pinned")
        yield case("gradient penalty", _penalty, module(lambda: nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1)), dtype), x, backward=False)
        yield case("jacobian", lambda x: torch.autograd.functional.jacobian(lambda y: (y**2).sum(-1), x), t(8, 4, dtype=dtype), backward=False)
        yield case("func.grad", lambda x: torch.func.grad(lambda y: (y**2).sum())(x), t(8, 4, dtype=dtype, grad=False))
        yield case("vmap", lambda x: torch.vmap(lambda y: y @ y)(x), t(8, 4, dtype=dtype, grad=False))
        yield case("tied weights", _tied, Made(lambda d, y=dtype: nn.Embedding(100, 16).to(d, y)), ints(100, 4, 9), backward=False)
        yield case("expanded gradient", lambda x: x.sum().backward(), x, backward=False)
        yield case("mean backward", lambda x: (x * 2).mean().backward(), x, backward=False)
        yield case("residual", lambda x, w: x + (x @ w) + x, x, t(64, 64, dtype=dtype))
        yield case("detach clone", lambda x: x.detach().clone().requires_grad_(), x, backward=False)
        yield case("retain_grad", _retain, x, backward=False)
    for dtype in (BF16, F16):
        for size in (1, 3):
            yield case("autocast train step", _autocast_step, module(block), t(32, 64, grad=False), dtype, size, backward=False)
    try:
        yield from library_models()
    except ImportError:
        return


def library_models() -> Iterator[Case]:
    import transformers

    small = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000}
    for dtype in (F32, BF16):
        for attention in ("sdpa", "eager"):
            yield case("Llama", _loss, module(lambda a=attention: transformers.LlamaForCausalLM(transformers.LlamaConfig(attn_implementation=a, **small)), dtype), ints(1000, 2, 100),
                       note=attention)  # fmt: skip
            gpt = {"n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 1000, "attn_implementation": attention}
            yield case("GPT2", _loss, module(lambda o=gpt: transformers.GPT2LMHeadModel(transformers.GPT2Config(**o)), dtype), ints(1000, 2, 100), note=attention)
            bert = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256, "vocab_size": 1000, "attn_implementation": attention}
            yield case("Bert", _loss, module(lambda o=bert: transformers.BertForMaskedLM(transformers.BertConfig(**o)), dtype), ints(1000, 2, 100), note=attention)


def _loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def _checkpoint_backward(m: nn.Module, x: torch.Tensor, reentrant: bool, keep: bool) -> None:
    m.zero_grad()
    x.grad = None
    checkpoint(m, x, use_reentrant=reentrant, preserve_rng_state=keep).sum().backward()


def _train_step(m: nn.Module, x: torch.Tensor, to_none: bool) -> None:
    m.zero_grad(set_to_none=to_none)
    m(x).square().mean().backward()


def _accumulate(m: nn.Module, x: torch.Tensor) -> None:
    for _ in range(2):
        m(x).square().mean().backward()


def _save_on_cpu(m: nn.Module, x: torch.Tensor, pin: bool) -> None:
    m.zero_grad()
    with torch.autograd.graph.save_on_cpu(pin_memory=pin):
        loss = m(x).square().mean()
    loss.backward()


def _penalty(m: nn.Module, x: torch.Tensor) -> None:
    m.zero_grad()
    (gradient,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
    ((gradient.norm(2, dim=1) - 1) ** 2).mean().backward()


def _tied(e: nn.Embedding, ids: torch.Tensor) -> None:
    e.zero_grad()
    torch.nn.functional.linear(e(ids), e.weight).square().mean().backward()


def _retain(x: torch.Tensor) -> None:
    y = x * 2
    y.retain_grad()
    (y * 3).sum().backward()


def _autocast_step(m: nn.Module, x: torch.Tensor, dtype: torch.dtype, times: int) -> None:
    m.zero_grad()
    with torch.autocast(x.device.type, dtype=dtype):
        loss: Any = sum(m(x).float().square().mean() for _ in range(times))
    loss.backward()
