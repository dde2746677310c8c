"""xformers' attention and SwiGLU, on a machine that does not have xformers: prints what each one allocates."""
import torch
import xformers
import xformers.ops as xops
from xformers.ops.fmha.attn_bias import (BlockDiagonalCausalMask, BlockDiagonalCausalWithOffsetPaddedKeysMask, BlockDiagonalMask,
                                         LowerTriangularFromBottomRightMask)

print(xformers.__version__)


def told(name, function):
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    print(name, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before)
    return result


def half(*shape, grad=True, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=grad)


def both_ways(name, function):
    out = told(name, function)
    grad = torch.randn_like(out)
    told(f"{name}-backward", lambda: out.backward(grad))


attend = xops.memory_efficient_attention
q, k, v = (half(8, 1024, 16, 64) for _ in range(3))
both_ways("causal", lambda: attend(q, k, v, attn_bias=xops.LowerTriangularMask()))
both_ways("plain", lambda: attend(q, k, v, p=0.1, op=xops.MemoryEfficientAttentionFlashAttentionOp))
both_ways("cutlass", lambda: attend(q, k, v, attn_bias=LowerTriangularFromBottomRightMask(), op=xops.MemoryEfficientAttentionCutlassOp))
bias = half(8, 16, 1024, 1024)
both_ways("bias", lambda: attend(q, k, v, attn_bias=bias))
row = half(1, 4096, 16, 64)
both_ways("documents", lambda: attend(row, row, row, attn_bias=BlockDiagonalCausalMask.from_seqlens([1024, 2048, 1024])))
mask, joined = BlockDiagonalMask.from_tensor_list([half(2, 512, 16, 64), half(1, 1024, 16, 64)])
print("split", [tuple(part.shape) for part in mask.split(attend(joined, joined, joined, attn_bias=mask))])
single = [half(8, 1024, 16, 64, dtype=torch.float32) for _ in range(3)]
both_ways("single precision", lambda: attend(*single, attn_bias=xops.LowerTriangularMask()))
shared = half(8, 1024, 4, 1, 64, grad=False).expand(-1, -1, -1, 4, -1)
told("groups", lambda: attend(half(8, 1024, 4, 4, 64, grad=False), shared, shared))
layer = xops.SwiGLU(1024, 2048).to("cuda", torch.bfloat16)
print("swiglu", tuple(layer(half(64, 1024)).shape))
a, b, c = xops.unbind(half(64, 3, 1024), 1)
norm = xops.RMSNorm(1024).to("cuda", torch.bfloat16)
with torch.no_grad():
    told("norm", lambda: norm(half(8192, 1024, grad=False)))
    cache, fresh = half(1, 8192, 4, 64), half(1, 600, 4, 64)
    padded = BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([300, 300], 4096, [400, 500])
    rotated = xops.rope_padded(fresh, fresh, fresh, cache, cache, padded)
    print("decoded", tuple(xops.memory_efficient_attention_forward(rotated, cache, cache, attn_bias=padded).shape))

for name, wrong in {
    "groups": lambda: attend(half(1, 8, 4, 4, 64), half(1, 8, 4, 4, 64), half(1, 8, 4, 4, 64)),
    "norm": lambda: norm(half(8, 1024)),
    "types": lambda: attend(q, k, v.half()),
    "shapes": lambda: attend(q, k[:, :, :3], v[:, :, :3]),
    "lengths": lambda: attend(row, row, row, attn_bias=BlockDiagonalMask.from_seqlens([5])),
}.items():
    try:
        wrong()
    except (ValueError, NotImplementedError) as error:
        print(f"{name}: {error}")
