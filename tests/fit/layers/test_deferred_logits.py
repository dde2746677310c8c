"""Deferred logits are the plain ones to whoever reads them, and never whole on the way to cross_entropy."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fit.observed import Largest
from tonnage.fit.layers.deferred_logits import DeferredLogits, LogitsHidden, LogitsOutdated, defer

BATCH, LENGTH, WIDTH, CLASSES = 3, 40, 6, 50
CHUNK_BYTES = 10 * CLASSES * 8


def _leaves() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = [(BATCH, LENGTH, WIDTH), (CLASSES, WIDTH), (CLASSES,)]
    hidden, weight, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return hidden, weight, bias


def _labels(*shape: int) -> Tensor:
    torch.manual_seed(1)
    labels = torch.randint(0, CLASSES, shape)
    labels[..., ::4] = -100
    return labels


FLAT, SHORT = _labels(BATCH * LENGTH), _labels(BATCH, LENGTH - 1)
MASK = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % 3 == 0

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: functional.cross_entropy(x.view(-1, CLASSES), FLAT),
    "view and its own size": lambda x: functional.cross_entropy(x.view(-1, x.size(-1)), FLAT),
    "view, classes left open": lambda x: functional.cross_entropy(x.view(BATCH * LENGTH, -1), FLAT),
    "reshape of a size": lambda x: functional.cross_entropy(x.reshape((-1, x.shape[-1])), FLAT),
    "module": lambda x: nn.CrossEntropyLoss(label_smoothing=0.1)(x.flatten(0, 1), FLAT),
    "shifted": lambda x: functional.cross_entropy(x[..., :-1, :].contiguous().flatten(0, 1), SHORT.flatten()),
    "shifted by one index": lambda x: functional.cross_entropy(x[:, :-1].flatten(end_dim=-2), SHORT.flatten()),
    "classes second": lambda x: functional.cross_entropy(x.transpose(1, 2), FLAT.view(BATCH, LENGTH)),
    "classes permuted": lambda x: (
        functional.cross_entropy(x[:, 1:].permute(0, 2, 1).double(), SHORT, reduction="none").square().sum()
    ),
    "masked rows": lambda x: functional.cross_entropy(x[MASK], FLAT[MASK.flatten()]),
    "one position": lambda x: functional.cross_entropy(x[:, -1], FLAT[1:4]),
    "rows by number": lambda x: functional.cross_entropy(x[:, torch.tensor([2, 5, 5])].flatten(0, 1), FLAT[:9]),
    "fewer classes": lambda x: functional.cross_entropy(x[..., : CLASSES - 2].flatten(0, 1), FLAT % (CLASSES - 2)),
    "soft cap": lambda x: functional.cross_entropy((torch.tanh(x / 3) * 3).view(-1, CLASSES), FLAT),
    "scaled": lambda x: functional.cross_entropy((2 * x).double().view(-1, CLASSES) / 4, FLAT, reduction="sum") / 7,
    "named arguments": lambda x: functional.cross_entropy(
        input=x.reshape(-1, CLASSES), target=FLAT, weight=torch.arange(1.0, CLASSES + 1, dtype=torch.float64)
    ),
    "soft targets": lambda x: functional.cross_entropy(
        x.view(-1, CLASSES), torch.softmax(torch.arange(1.0 * FLAT.numel() * CLASSES).view(-1, CLASSES).sin(), -1)
    ),
    "cloned": lambda x: functional.cross_entropy(x.clone().to(torch.float64).to("cpu").view(-1, CLASSES), FLAT),
    "two losses": lambda x: (
        functional.cross_entropy(x.view(-1, CLASSES), FLAT)
        + functional.cross_entropy(x[:, :-1].flatten(0, 1), SHORT.flatten())
    ),
}

WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "log softmax": lambda x: -torch.log_softmax(x, -1)[..., 0].mean(),
    "normaliser": lambda x: functional.cross_entropy(x.view(-1, CLASSES), FLAT) + x.logsumexp(-1).square().mean(),
    "changed in place": lambda x: functional.cross_entropy(x.mul_(2).view(-1, CLASSES), FLAT),
    "joined": lambda x: torch.cat([x, x], 1).sin().sum(),
    "classes gathered": lambda x: x[:, :, torch.tensor([1, 2])].sum(),
    "an odd view": lambda x: x.view(-1, 2).sin().sum(),
    "iterated": lambda x: sum(row.sin().sum() for row in x),
    "other operand": lambda x: (torch.ones(CLASSES, dtype=torch.float64) * x).sin().sum(),
}


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_loss_by_cross_entropy_is_the_plain_one_in_chunks(loss: Callable[[Tensor], Tensor]) -> None:
    leaves = _leaves()
    with Largest() as largest:
        found = loss(defer(*leaves, chunk_bytes=CHUNK_BYTES))
        gradients = torch.autograd.grad(found, leaves)
    if loss is not LOSSES["soft targets"]:
        assert largest.elements < BATCH * LENGTH * CLASSES / 4
    _assert_plain(loss, leaves, found, gradients)


@pytest.mark.parametrize("loss", WHOLE.values(), ids=WHOLE)
def test_any_other_loss_is_the_plain_one_with_a_warning(loss: Callable[[Tensor], Tensor]) -> None:
    leaves = _leaves()
    with pytest.warns(UserWarning, match="computed whole"):
        found = loss(defer(*leaves, chunk_bytes=CHUNK_BYTES))
    _assert_plain(loss, leaves, found, torch.autograd.grad(found, leaves))


def _assert_plain(loss: Callable[[Tensor], Tensor], leaves: Any, found: Tensor, gradients: Any) -> None:
    expected = loss(functional.linear(*leaves))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, leaves), rtol=1e-10, atol=1e-10)


def test_reading_without_gradients_gives_the_logits_and_no_warning() -> None:
    leaves = _leaves()
    plain, logits = functional.linear(*leaves), defer(*leaves, chunk_bytes=CHUNK_BYTES)
    assert torch.equal(logits.argmax(-1), plain.argmax(-1))
    assert torch.equal(logits.argmax(dim=-1, keepdim=True), plain.argmax(-1, keepdim=True))
    assert torch.equal(logits.detach().cpu() + 0, plain.detach())
    assert str(logits.detach()) == str(plain.detach())
    assert torch.equal(torch.from_numpy(logits.detach().numpy()), plain.detach())
    assert torch.equal(copy.deepcopy(logits.detach()), plain.detach())
    with torch.no_grad():
        # A product of fewer rows may be summed in another order, so these are equal up to rounding.
        torch.testing.assert_close(logits[:, -1].softmax(-1), plain[:, -1].softmax(-1), rtol=1e-12, atol=1e-12)


def test_a_metric_before_the_loss_leaves_it_its_gradients_and_its_chunks() -> None:
    leaves = _leaves()
    logits = defer(*leaves, chunk_bytes=CHUNK_BYTES)
    with torch.no_grad():
        assert torch.equal(logits.softmax(-1), functional.linear(*leaves).softmax(-1))
    with Largest() as largest:
        loss = LOSSES["view"](logits)
        gradients = torch.autograd.grad(loss, leaves)
    assert largest.elements < BATCH * LENGTH * CLASSES / 4
    _assert_plain(LOSSES["view"], leaves, loss, gradients)


def test_a_change_in_place_without_gradients_is_kept() -> None:
    leaves = _leaves()
    plain, logits = functional.linear(*leaves).detach(), defer(*(leaf.detach() for leaf in leaves), chunk_bytes=1)
    with torch.no_grad():
        for each in (plain, logits):
            each[..., 3] = float("-inf")
    assert torch.equal(logits.softmax(-1), plain.softmax(-1))


def test_what_is_asked_of_the_outside_is_answered_without_computing() -> None:
    logits = defer(*_leaves(), chunk_bytes=CHUNK_BYTES)
    assert isinstance(logits, Tensor) and torch.is_tensor(logits)
    assert logits.shape == (BATCH, LENGTH, CLASSES) and logits.ndim == 3 and len(logits) == BATCH
    assert logits.requires_grad and logits.dtype == torch.float64 and logits.float().dtype == torch.float32
    assert logits.transpose(1, 2).shape == (BATCH, CLASSES, LENGTH)
    assert isinstance(logits, DeferredLogits) and logits.computed is None


def test_logits_of_older_weights_are_not_made_of_newer_ones() -> None:
    leaves = _leaves()
    logits = defer(*leaves, chunk_bytes=CHUNK_BYTES)
    with torch.no_grad():
        leaves[1].add_(1)
    for read in (lambda: logits.detach() + 0, lambda: functional.cross_entropy(logits.view(-1, CLASSES), FLAT)):
        with pytest.raises(LogitsOutdated, match="weights had changed"):
            read()


def test_what_cannot_be_seen_raises() -> None:
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.ops.aten.sin(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    logits = defer(*_leaves(), chunk_bytes=CHUNK_BYTES)
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(LogitsHidden, match="aten"):
        Through.apply(logits)


def test_a_gradient_that_would_be_lost_in_a_function_is_an_error() -> None:
    class Sines(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor) -> Tensor:
            return logits.sin()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    sines = Sines.apply(defer(*_leaves(), chunk_bytes=CHUNK_BYTES))
    with pytest.raises(LogitsHidden, match="would not reach the head"):
        sines.sum().backward()


def test_errors_of_cross_entropy_are_its_own() -> None:
    logits = defer(*_leaves(), chunk_bytes=CHUNK_BYTES).detach()
    with pytest.raises(ValueError, match="batch_size"):
        functional.cross_entropy(logits.view(-1, CLASSES), FLAT[:-1])


def test_autocast_narrows_the_head_as_it_would_the_plain_one() -> None:
    hidden, weight, bias = (leaf.detach().float().requires_grad_() for leaf in _leaves())
    losses, logits = [], []
    for head in (functional.linear, lambda *leaves: defer(*leaves, chunk_bytes=CHUNK_BYTES)):
        with torch.autocast("cpu", torch.bfloat16):
            output = head(hidden, weight, bias)
            losses.append(functional.cross_entropy(output.view(-1, CLASSES), FLAT))
            logits.append(output.detach())
    assert losses[1].dtype == losses[0].dtype == torch.float32
    assert torch.equal(logits[1] + 0, logits[0]) and logits[1].dtype == torch.bfloat16
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)
    exact = functional.cross_entropy(functional.linear(hidden, weight, bias).view(-1, CLASSES), FLAT)
    wide, plain, chunked = (torch.autograd.grad(loss, (hidden, weight, bias)) for loss in (exact, *losses))
    for expected, by_plain, found in zip(wide, plain, chunked, strict=True):
        assert found.dtype == torch.float32
        assert (found - expected).norm() <= 1.2 * (by_plain - expected).norm()


# Writing into views ----------------------------------------------------------------------------------------------------

TARGETS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])


def _through_a_view(logits: Tensor) -> Tensor:
    rows = logits.view(-1, 20)
    rows[:, 3] = 5.0
    rows.mul_(100)
    return functional.cross_entropy(logits.flatten(0, 1), TARGETS.flatten())


def _through_an_index(logits: Tensor) -> Tensor:
    logits[:, :, 0].mul_(3.0)
    return functional.cross_entropy(logits.flatten(0, 1), TARGETS.flatten())


def _after_a_view_was_made(logits: Tensor) -> Tensor:
    shifted = logits[:, :-1]
    logits.mul_(2.0)
    return functional.cross_entropy(shifted.flatten(0, 1), TARGETS[:, 1:].flatten())


def _through_a_view_of_a_view(logits: Tensor) -> Tensor:
    rows = logits.flatten(0, 1)
    later = rows[2:]
    later *= 7
    return functional.cross_entropy(rows, TARGETS.flatten())


WRITES = [_through_a_view, _through_an_index, _after_a_view_was_made, _through_a_view_of_a_view]


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_into_a_view_is_in_the_logits(write: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(*shape, 8, dtype=torch.float64, requires_grad=True) for shape in ((2, 5), (20,)))
    plain = write(functional.linear(hidden, weight) * 1)
    expected = torch.autograd.grad(plain, (hidden, weight))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are computed whole
        found = write(defer(hidden, weight, None, chunk_bytes=100))
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.autograd.grad(found, (hidden, weight)), expected, rtol=1e-12, atol=1e-14)
