"""Every function of flash-attn, on a machine that does not have it: prints what each one allocates and leaves allocated."""
import importlib.metadata
import importlib.util

import torch

assert importlib.util.find_spec("flash_attn") is None  # a look does not put the stand-in in place
import flash_attn
from flash_attn import (flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_func,
                        flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func, flash_attn_with_kvcache)
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.ops.rms_norm import rms_norm
from flash_attn.ops.triton.layer_norm import RMSNorm, layer_norm_fn

assert flash_attn.__version__ == importlib.metadata.version("flash-attn") == importlib.metadata.version("flash_attn")
assert importlib.util.find_spec("flash_attn") is not None and importlib.util.find_spec("flash_attn.cute") is None


def told(name, function):
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    print(name, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before)
    return result


def half(*shape, grad=True):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)


def both_ways(name, function):
    out = told(name, function)
    grad = torch.randn_like(out)
    told(f"{name}-backward", lambda: out.backward(grad))


q, k, v, kv, qkv = half(8, 1024, 16, 64), half(8, 1024, 4, 64), half(8, 1024, 4, 64), half(8, 1024, 2, 16, 64), half(8, 1024, 3, 16, 64)
ends = torch.tensor([0, 512, 2560, 3072, 4096], dtype=torch.int32, device="cuda")
both_ways("dense", lambda: flash_attn_func(q, q, q, causal=True))
both_ways("shared", lambda: flash_attn_func(q, k, v, causal=True))
both_ways("deterministic", lambda: flash_attn_func(q, q, q, deterministic=True))
both_ways("packed", lambda: flash_attn_qkvpacked_func(qkv))
both_ways("keys-packed", lambda: flash_attn_kvpacked_func(q, kv, dropout_p=0.1))
r, s, t = half(4096, 16, 64), half(4096, 2, 16, 64), half(4096, 3, 16, 64)
both_ways("ragged", lambda: flash_attn_varlen_func(r, r, r, ends, ends, 2048, 2048, causal=True))
both_ways("ragged-keys-packed", lambda: flash_attn_varlen_kvpacked_func(r, s, ends, ends, 2048, 2048))
both_ways("ragged-packed", lambda: flash_attn_varlen_qkvpacked_func(t, ends, 2048))
narrow = half(8, 2048, 16, 60)
both_ways("padded", lambda: flash_attn_func(narrow, narrow, narrow))
print("probabilities", [tuple(x.shape) for x in flash_attn_func(q, q, q, dropout_p=0.1, return_attn_probs=True)])
one, cache = half(2, 1, 16, 64, grad=False), half(2, 8192, 4, 64, grad=False)
told("cache", lambda: flash_attn_with_kvcache(one, cache, cache, cache_seqlens=100))
told("split", lambda: flash_attn_func(one, cache, cache))

mask = torch.ones(8, 1024, dtype=torch.bool, device="cuda")
mask[0, :24] = False
rows, indices, ends, longest, used = unpad_input(q, mask)
print("unpadded", tuple(rows.shape), longest, tuple(pad_input(rows, indices, 8, 1024).shape), tuple(index_first_axis(r, indices[:5]).shape))
print("rotated", tuple(RotaryEmbedding(64, device="cuda")(qkv).shape))
cos = torch.randn(1024, 32, device="cuda")
both_ways("rotary", lambda: apply_rotary_emb(q, cos, cos))
x, residual = half(8192, 1024), half(8192, 1024)
norm = RMSNorm(1024, device="cuda", dtype=torch.bfloat16)
both_ways("rms", lambda: norm(x))
print("sum kept", [tuple(t.shape) for t in norm(x, residual, prenorm=True)], tuple(rms_norm(x, norm.weight, 1e-6).shape))
print("layer norm", tuple(layer_norm_fn(x, norm.weight, norm.weight).shape))
logits, labels = half(4096, 32768), torch.randint(0, 32768, (4096,), device="cuda")
told("loss", lambda: CrossEntropyLoss(inplace_backward=True, reduction="none")(logits, labels)[0])

for name, wrong in {
    "type": lambda: flash_attn_func(q.float(), q.float(), q.float()),
    "device": lambda: flash_attn_func(q.cpu(), q.cpu(), q.cpu()),
    "width": lambda: flash_attn_func(*[half(1, 8, 2, 264)] * 3),
    "heads": lambda: flash_attn_func(q, half(8, 1024, 3, 64), half(8, 1024, 3, 64)),
    "ends": lambda: flash_attn_varlen_func(r, r, r, ends.long(), ends.long(), 2048, 2048),
}.items():
    try:
        wrong()
    except (RuntimeError, NotImplementedError) as error:
        print(f"{name}: {error}")
try:
    import flash_attn.modules.mha
except ModuleNotFoundError as error:
    print(error)
