"""Linear head and cross-entropy in chunks on a real GPU: FP32 sums of BF16 products, and the peak that was planned."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tonnage.fit.layers.chunked_cross_entropy import CrossEntropy, Head, add_product, chunked_cross_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

ROWS, WIDTH, CLASSES, CHUNK_BYTES = 8192, 1024, 32000, 64 << 20


def _leaves() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(CLASSES, WIDTH, device="cuda") / WIDTH**0.5).bfloat16().requires_grad_()
    return hidden, weight, torch.randint(0, CLASSES, (ROWS,), device="cuda")


def _chunked(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    head = Head(hidden=hidden, weight=weight, dtype=torch.bfloat16, operations=(("to", torch.float32),))
    return chunked_cross_entropy(head, CrossEntropy(target=target), chunk_bytes=CHUNK_BYTES)


def test_products_of_bf16_are_added_to_fp32_in_place() -> None:
    total = torch.full((512, 256), 256.0, device="cuda")
    left = torch.ones(48, 512, device="cuda", dtype=torch.bfloat16).t()
    right = torch.ones(48, 256, device="cuda", dtype=torch.bfloat16)
    add_product(total, left, right, first=False)
    add_product(total, left[:, :3], right[:3], first=False)
    assert (total == 307).all()  # no BF16 number
    add_product(total, left, right, first=True)
    assert (total == 48).all()


def test_gradients_are_as_near_to_the_truth_as_the_plain_ones() -> None:
    hidden, weight, target = _leaves()
    wide = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    truth = torch.autograd.grad(functional.cross_entropy(functional.linear(*wide), target), wide)
    plain = functional.cross_entropy(functional.linear(hidden, weight).float(), target)
    losses = (plain, _chunked(hidden, weight, target))
    by_plain, by_chunks = (torch.autograd.grad(loss, (hidden, weight)) for loss in losses)
    for expected, first, second in zip(truth, by_plain, by_chunks, strict=True):
        assert (second - expected).norm() <= 1.1 * (first - expected).norm()


def test_the_peak_is_a_chunk_and_the_heads_gradient() -> None:
    hidden, weight, target = _leaves()
    _chunked(hidden, weight, target).backward()  # libraries take their workspace
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _chunked(hidden, weight, target).backward()
    head_bytes = weight.numel() * 2
    planned_bytes = max(CHUNK_BYTES + 2 * head_bytes, 3 * head_bytes) + hidden.numel() * 2
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(planned_bytes, rel=0.03)
