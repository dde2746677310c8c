"""Launches Triton kernels of its own: plain, autotuned, and inside a compiled function."""

import torch
import triton
import triton.language as tl


@triton.jit
def copy(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


configs = [triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})]
tuned = triton.autotune(configs, key=["count"])(triton.jit(copy.fn))


def grid(meta):
    return (triton.cdiv(1024, meta["BLOCK"]),)


x = torch.ones(1024, device="cuda")
y = torch.empty_like(x)
copy[(8,)](x, y, 1024, BLOCK=128)
tuned[grid](x, y, 1024)
print("best", tuned.best_config.kwargs, "peak", torch.cuda.max_memory_allocated())


@torch.compile
def twice(x):
    y = torch.empty_like(x)
    copy[grid](x, y, 1024, BLOCK=128)
    return y * 2


print("compiled", twice(x).shape, triton.runtime.driver.active.get_current_target())
