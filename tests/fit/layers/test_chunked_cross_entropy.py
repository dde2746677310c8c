"""Linear head and cross-entropy in chunks, against PyTorch's own two."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from fit.observed import Largest
from tonnage.fit.layers import chunked_cross_entropy as chunked
from tonnage.fit.layers.chunked_cross_entropy import CrossEntropy, Head, add_product, chunked_cross_entropy, divide_rows

_CAP = 3.0
_OPERATIONS = {
    "none": (),
    "scale": (("mul", 0.5),),
    "soft cap": (("div", _CAP), ("tanh", None), ("mul", _CAP)),
}


def _leaves(rows: int, classes: int, *, bias: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = [(rows, 6), (classes, 6), (classes,)][: 3 if bias else 2]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def _plain_logits(leaves: list[Tensor], operations: tuple[Any, ...]) -> Tensor:
    logits = functional.linear(*leaves)
    for name, argument in operations:
        logits = getattr(logits, name)(*([] if argument is None else [argument]))
    return logits


def _chunked(leaves: list[Tensor], operations: tuple[Any, ...], chunk_bytes: int, **loss: Any) -> Tensor:
    hidden, weight, *bias = leaves
    head = Head(hidden=hidden, weight=weight, bias=bias[0] if bias else None, dtype=hidden.dtype, operations=operations)
    return chunked_cross_entropy(head, CrossEntropy(**loss), chunk_bytes=chunk_bytes)


@settings(max_examples=80)
@given(
    rows=st.integers(1, 200),
    classes=st.integers(1, 30),
    chunk_bytes=st.sampled_from([1, 700, 20_000, 1 << 30]),
    bias=st.booleans(),
    soft=st.booleans(),
    weighted=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    operations=st.sampled_from(sorted(_OPERATIONS)),
    seed=st.integers(0, 1000),
)
def test_loss_and_gradients_are_those_of_the_plain_pair(
    rows: int,
    classes: int,
    chunk_bytes: int,
    bias: bool,
    soft: bool,
    weighted: bool,
    smoothing: float,
    reduction: str,
    operations: str,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    leaves = _leaves(rows, classes, bias=bias)
    target = torch.randint(0, classes, (rows,))
    target[1::3] = -100
    if soft:
        target = torch.softmax(torch.randn(rows, classes, dtype=torch.float64), -1)
    weight = torch.rand(classes, dtype=torch.float64) + 0.1 if weighted else None
    chain = _OPERATIONS[operations]
    expected = functional.cross_entropy(
        _plain_logits(leaves, chain), target, weight=weight, reduction=reduction, label_smoothing=smoothing
    )
    found = _chunked(
        leaves,
        chain,
        chunk_bytes,
        target=target,
        class_weight=weight,
        reduction=reduction,
        label_smoothing=smoothing,
    )
    upstream = torch.randn_like(expected)
    _close(found, expected)
    _close(torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(expected, leaves, upstream))


def _close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_nothing_counted_is_no_number_and_no_gradient_as_in_pytorch() -> None:
    leaves = _leaves(5, 7, bias=False)
    target = torch.full((5,), -100)
    expected, found = (
        functional.cross_entropy(functional.linear(*leaves), target),
        _chunked(leaves, (), 100, target=target),
    )
    assert found.isnan() and expected.isnan()
    for loss in (expected, found):
        assert all(gradient.count_nonzero() == 0 for gradient in torch.autograd.grad(loss, leaves))


def test_a_retained_graph_gives_the_same_gradients_twice() -> None:
    leaves = _leaves(50, 9, bias=True)
    loss = _chunked(leaves, (), 400, target=torch.randint(0, 9, (50,)))
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    _close(torch.autograd.grad(3 * loss, leaves), [3 * gradient for gradient in first])


def test_only_what_is_trained_gets_a_gradient() -> None:
    hidden, weight = _leaves(20, 9, bias=False)
    weight.requires_grad_(False)
    loss = _chunked([hidden, weight], (), 400, target=torch.randint(0, 9, (20,)))
    loss.backward()
    assert hidden.grad is not None and weight.grad is None


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_tensor_is_larger_than_a_chunk(reduction: str) -> None:
    leaves = _leaves(1024, 300, bias=True, dtype=torch.float32)
    chunk_bytes = 64 * 300 * 4
    with Largest() as largest:
        _chunked(leaves, (), chunk_bytes, target=torch.randint(0, 300, (1024,)), reduction=reduction).sum().backward()
    assert largest.elements <= chunk_bytes // 4


def test_sums_over_many_chunks_of_bf16_are_kept_in_fp32() -> None:
    """64 chunks summed in BF16 would be off by more than one of its roundings."""
    torch.manual_seed(0)
    wide = _leaves(4096, 40, bias=False, dtype=torch.float32)
    leaves = [leaf.detach().bfloat16().requires_grad_() for leaf in wide]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    target = torch.randint(0, 40, (4096,))
    casts = (("to", torch.float32),)
    _chunked(leaves, casts, 64 * 40 * 2, target=target).backward()
    functional.cross_entropy(functional.linear(*exact), target).backward()
    error = (leaves[1].grad.double() - exact[1].grad).norm() / exact[1].grad.norm()
    assert leaves[1].grad.dtype == torch.bfloat16
    assert error < 2**-8


def test_a_scale_reaches_fp16_gradients_before_they_are_rounded_to_nothing() -> None:
    """A mean over 8192 rows divides by 8192: in FP16 that would be zero before the scaler could help."""
    torch.manual_seed(0)
    exact = _leaves(8192, 40, bias=False, dtype=torch.float32)
    leaves = [leaf.detach().half().requires_grad_() for leaf in exact]
    target = torch.randint(0, 40, (8192,))
    (_chunked(leaves, (("to", torch.float32),), 1 << 20, target=target) * 4096).backward()
    (functional.cross_entropy(functional.linear(*exact), target) * 4096).backward()
    torch.testing.assert_close(leaves[0].grad.float(), exact[0].grad, rtol=0.02, atol=0.002)


@given(rows=st.integers(0, 5000), row_bytes=st.integers(1, 10_000), chunk_bytes=st.integers(1, 1 << 22))
def test_chunks_cover_every_row_once_and_are_within_their_bytes(rows: int, row_bytes: int, chunk_bytes: int) -> None:
    chunks = divide_rows(rows, row_bytes, chunk_bytes)
    assert [row for chunk in chunks for row in range(chunk.start, chunk.stop)] == list(range(rows))
    largest = max(chunk.stop - chunk.start for chunk in chunks)
    assert largest <= 1 or largest * row_bytes <= chunk_bytes


def test_products_are_added_in_the_type_of_the_total() -> None:
    left, right = torch.full((9000, 3), 1.0).bfloat16(), torch.full((3, 2), 1.0).bfloat16()
    total = torch.full((9000, 2), 256.0)
    add_product(total, left, right, first=False)
    assert (total == 259).all()  # 259 is no BF16 number
    add_product(total, left, right, first=True)
    assert (total == 3).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("operations", sorted(_OPERATIONS))
def test_classes_that_are_added_for_tensor_cores_change_nothing(
    monkeypatch: pytest.MonkeyPatch, bias: bool, operations: str
) -> None:
    leaves, target = _leaves(9, 7, bias=bias), torch.tensor([0, 6, -100, 3, 2, 5, 6, 0, 1])
    plain = _chunked(leaves, _OPERATIONS[operations], 100, target=target)
    expected = torch.autograd.grad(plain, leaves)
    monkeypatch.setattr(chunked, "_padding", lambda *_: 5)
    padded = _chunked(leaves, _OPERATIONS[operations], 100, target=target)
    torch.testing.assert_close(padded, plain)
    torch.testing.assert_close(torch.autograd.grad(padded, leaves), expected)


@pytest.mark.parametrize(("classes", "added"), [(50257, 7), (30522, 6), (128256, 0)])
def test_a_row_of_logits_begins_where_a_card_reads_fast(classes: int, added: int) -> None:
    weight = torch.empty(classes, 4, dtype=torch.bfloat16, device="meta")
    hidden = Mock(device=torch.device("cuda"))
    head = Mock(hidden=hidden, weight=weight, dtype=torch.bfloat16)
    assert chunked._padding(head, CrossEntropy(target=torch.zeros(1))) == added
    assert chunked._padding(head, CrossEntropy(target=torch.zeros(1), label_smoothing=0.1)) == 0
