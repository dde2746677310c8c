"""Chains of operations for fresh processes: what libraries and lazily loaded kernels take beside the caching allocator.

After the bare context and after every operation of a chain the process's bytes as NVML counts them are set
against the bytes that the caching allocator has reserved.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

BF16 = torch.bfloat16


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=grad)


def attention(backend: SDPBackend, dtype: torch.dtype = BF16, width: int = 64) -> None:
    q = randn(2, 8, 256, width, dtype=dtype, grad=True)
    with sdpa_kernel(backend):
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()


def optimizer(name: str, **options: Any) -> None:
    params = [nn.Parameter(randn(64, 64)) for _ in range(4)]
    for p in params:
        p.grad = torch.ones_like(p)
    getattr(torch.optim, name)(params, **options).step()


def backward(make: Callable[[], torch.Tensor]) -> None:
    make().float().sum().backward()


OPERATIONS: dict[str, Callable[[], Any]] = {
    "context": lambda: torch.zeros(1).cuda(),
    "mm fp32": lambda: randn(256, 256) @ randn(256, 256),
    "mm bf16": lambda: randn(256, 256, dtype=BF16) @ randn(256, 256, dtype=BF16),
    "mm bf16 large": lambda: randn(4096, 4096, dtype=BF16) @ randn(4096, 4096, dtype=BF16),
    "mm fp16": lambda: randn(256, 256, dtype=torch.float16) @ randn(256, 256, dtype=torch.float16),
    "bmm bf16": lambda: randn(8, 256, 256, dtype=BF16) @ randn(8, 256, 256, dtype=BF16),
    "addmm fp32": lambda: torch.addmm(randn(256), randn(256, 256), randn(256, 256)),
    "addmm bf16": lambda: torch.addmm(randn(256, dtype=BF16), randn(256, 256, dtype=BF16), randn(256, 256, dtype=BF16)),
    "linear backward bf16": lambda: backward(lambda: F.linear(randn(64, 256, dtype=BF16, grad=True), randn(512, 256, dtype=BF16, grad=True), randn(512, dtype=BF16, grad=True))),
    "linear backward fp32": lambda: backward(lambda: F.linear(randn(64, 256, grad=True), randn(512, 256, grad=True), randn(512, grad=True))),
    "conv fp32": lambda: F.conv2d(randn(8, 16, 32, 32), randn(32, 16, 3, 3)),
    "conv bf16": lambda: F.conv2d(randn(8, 16, 32, 32, dtype=BF16), randn(32, 16, 3, 3, dtype=BF16)),
    "conv backward fp32": lambda: backward(lambda: F.conv2d(randn(8, 16, 32, 32, grad=True), randn(32, 16, 3, 3, grad=True))),
    "conv backward bf16": lambda: backward(lambda: F.conv2d(randn(8, 16, 32, 32, dtype=BF16, grad=True), randn(32, 16, 3, 3, dtype=BF16, grad=True))),
    "conv depthwise": lambda: backward(lambda: F.conv2d(randn(8, 16, 32, 32, grad=True), randn(16, 1, 3, 3, grad=True), groups=16)),
    "batch_norm": lambda: backward(lambda: nn.BatchNorm2d(16).cuda()(randn(8, 16, 32, 32, grad=True))),
    "flash": lambda: attention(SDPBackend.FLASH_ATTENTION),
    "flash 128": lambda: attention(SDPBackend.FLASH_ATTENTION, width=128),
    "efficient": lambda: attention(SDPBackend.EFFICIENT_ATTENTION),
    "efficient fp32": lambda: attention(SDPBackend.EFFICIENT_ATTENTION, torch.float32),
    "cudnn attention": lambda: attention(SDPBackend.CUDNN_ATTENTION),
    "math attention": lambda: attention(SDPBackend.MATH),
    "lstm": lambda: backward(lambda: nn.LSTM(64, 128).cuda()(randn(20, 4, 64, grad=True))[0]),
    "gru": lambda: backward(lambda: nn.GRU(64, 128).cuda()(randn(20, 4, 64, grad=True))[0]),
    "fft": lambda: torch.fft.rfft(randn(4, 1000)),
    "cholesky": lambda: torch.linalg.cholesky(torch.eye(64, device="cuda")),
    "svd": lambda: torch.linalg.svd(randn(64, 64)),
    "inverse": lambda: torch.linalg.inv(torch.eye(64, device="cuda")),
    "sort": lambda: torch.sort(randn(100_000)),
    "topk": lambda: torch.topk(randn(64, 1000), 5),
    "cumsum": lambda: torch.cumsum(randn(100_000), 0),
    "sparse": lambda: torch.sparse.mm(randn(33, 65).to_sparse(), randn(65, 20)),
    "adam fused": lambda: optimizer("Adam", fused=True),
    "adam foreach": lambda: optimizer("Adam", foreach=True),
    "adam loop": lambda: optimizer("Adam", foreach=False),
    "sgd": lambda: optimizer("SGD", lr=0.1, momentum=0.9),
    "index": lambda: backward(lambda: randn(1000, 64, grad=True)[torch.randint(0, 1000, (500,), device="cuda")]),
    "scatter": lambda: torch.zeros(1000, device="cuda").scatter_add_(0, torch.randint(0, 1000, (500,), device="cuda"), randn(500)),
    "embedding": lambda: backward(lambda: F.embedding(torch.randint(0, 1000, (8, 512), device="cuda"), randn(1000, 64, grad=True))),
    "randn": lambda: randn(1000),
    "reductions": lambda: (randn(1000, 64).sum(), randn(1000, 64).mean(0), randn(1000, 64).amax(1), randn(1000, 64).norm()),
    "pointwise": lambda: (randn(1000) * 2 + 1).exp().relu().tanh(),
    "layer_norm": lambda: backward(lambda: nn.LayerNorm(64).cuda()(randn(100, 64, grad=True))),
    "rms_norm": lambda: backward(lambda: nn.RMSNorm(64).cuda()(randn(100, 64, grad=True))),
    "cross_entropy": lambda: backward(lambda: F.cross_entropy(randn(100, 64, grad=True), torch.zeros(100, dtype=torch.long, device="cuda"))),
    "dropout": lambda: backward(lambda: F.dropout(randn(1000, grad=True), 0.1)),
    "gelu": lambda: backward(lambda: F.gelu(randn(1000, grad=True))),
    "max_pool": lambda: backward(lambda: F.max_pool2d(randn(2, 8, 16, 16, grad=True), 2)),
    "interpolate": lambda: backward(lambda: F.interpolate(randn(2, 8, 16, 16, grad=True), scale_factor=2, mode="bilinear")),
    "scaled_mm": lambda: torch._scaled_mm(randn(64, 64).to(torch.float8_e4m3fn), randn(64, 64).to(torch.float8_e4m3fn).t(), *[torch.ones((), device="cuda")] * 2, out_dtype=BF16),
    "int_mm": lambda: torch._int_mm(torch.ones(64, 64, dtype=torch.int8, device="cuda"), torch.ones(64, 64, dtype=torch.int8, device="cuda")),
    "side stream mm": lambda: _on_stream(OPERATIONS["mm fp32"]),
}  # fmt: skip
TRAINING = ["randn", "linear backward bf16", "layer_norm", "gelu", "dropout", "embedding", "cross_entropy", "flash", "reductions", "adam foreach"]
CHAINS: dict[str, list[str]] = {name.replace(" ", "-"): [name] for name in OPERATIONS if name not in ("context", "side stream mm")}
CHAINS |= {
    "training-bf16": TRAINING, "training-fp32": ["randn", "linear backward fp32", "layer_norm", "gelu", "cross_entropy", "efficient fp32", "adam fused"],
    "images-fp32": ["conv fp32", "conv backward fp32", "batch_norm", "max_pool", "linear backward fp32", "cross_entropy", "sgd"],
    "images-bf16": ["conv bf16", "conv backward bf16", "batch_norm", "conv depthwise", "linear backward bf16"],
    "streams": ["mm fp32", "side stream mm", "addmm bf16"], "everything": [name for name in OPERATIONS if name != "context"],
}  # fmt: skip


def _on_stream(call: Callable[[], Any]) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        call()


def process_bytes() -> int | None:
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    used = {p.pid: p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    return used.get(os.getpid())


def measure_chain(chain: str, recorder: Any) -> dict[str, Any]:
    steps = [_step(name, recorder) for name in ["context", *CHAINS[chain]]]
    return {"process": CHAINS[chain], "beyond_reserved_bytes": steps[-1]["beyond_reserved_bytes"], "steps": steps}


def _step(name: str, recorder: Any) -> dict[str, Any]:
    error = None
    try:
        with recorder:
            OPERATIONS[name]()
    except Exception as raised:
        error = f"{type(raised).__name__}: {str(raised)[:200]}"
    used, reserved = process_bytes(), torch.cuda.memory_reserved()
    beyond = None if used is None else used - reserved
    return {"op": name, "process_bytes": used, "reserved_bytes": reserved, "beyond_reserved_bytes": beyond, "events": recorder.events, "error": error}
