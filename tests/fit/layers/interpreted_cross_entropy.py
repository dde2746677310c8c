"""The cross-entropy's kernel under Triton's interpreter, held to PyTorch's own. Run by test_cross_entropy_kernel.py."""

import pytest
import torch
from torch.nn import functional

import serve.kernels.interpreting  # noqa: F401  # before a kernel is called
from tonnage.fit.layers.cross_entropy_kernel import losses_and_gradient_

ROWS = 5


@pytest.mark.parametrize("classes", [1, 7, 4096, 9001])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradient(classes: int, padding: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = 4 * torch.randn(ROWS, classes + padding).to(dtype)
    label, upstream = torch.randint(0, classes, (ROWS, 1)), torch.rand(ROWS, 1)
    mass = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0])[:, None]
    wide = logits[:, :classes].float().requires_grad_()
    expected = functional.cross_entropy(wide, label[:, 0], reduction="none") * mass[:, 0]
    (gradient,) = torch.autograd.grad((expected * upstream[:, 0]).sum(), wide)

    losses = torch.empty(ROWS)
    kept = logits.clone()
    losses_and_gradient_(kept, label, mass, None, losses, classes)
    assert torch.equal(kept, logits), "without an upstream nothing is written"
    losses_and_gradient_(logits, label, mass, upstream, losses, classes)
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        logits[:, :classes].float(), gradient, rtol=1e-2, atol=1e-5 if dtype.itemsize > 2 else 2e-3
    )
    assert (logits[:, classes:] == 0).all()


def test_a_row_that_does_not_count_has_no_gradient_even_without_numbers() -> None:
    logits, losses = torch.full((2, 50), torch.nan), torch.empty(2)
    logits[1] = 0.0
    label, mass = torch.zeros(2, 1, dtype=torch.int64), torch.tensor([[0.0], [1.0]])
    losses_and_gradient_(logits, label, mass, torch.ones(2, 1), losses, 50)
    assert losses[0] == 0 and (logits[0] == 0).all()
    assert losses[1] == pytest.approx(torch.tensor(50.0).log().item())


def test_classes_that_are_ruled_out_have_no_part() -> None:
    logits, losses = torch.full((1, 9000), -torch.inf), torch.empty(1)
    logits[0, 8999] = 1.0
    logits[0, 8998] = 1.0
    losses_and_gradient_(logits, torch.tensor([[8999]]), torch.ones(1, 1), torch.ones(1, 1), losses, 9000)
    assert losses[0] == pytest.approx(torch.tensor(2.0).log().item())
    assert logits[0, 8998:].tolist() == pytest.approx([0.5, -0.5]) and (logits[0, :8998] == 0).all()
