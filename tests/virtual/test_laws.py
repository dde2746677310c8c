"""Random masks on the virtual GPU: how much of a tensor they select."""

import pytest
import torch

from tonnage.virtual.modelled import ModelledSession as Session

pytestmark = pytest.mark.usefixtures("gpu")
ELEMENTS = 100_000


@pytest.fixture
def uniform() -> torch.Tensor:
    return torch.rand(ELEMENTS, device="cuda")


def test_a_comparison_selects_its_share(uniform: torch.Tensor, gpu: Session) -> None:
    kept = uniform > 0.2
    assert torch.randn(ELEMENTS, 2, device="cuda")[kept].shape == (80_000, 2)
    assert kept.nonzero().shape == (80_000, 1)
    assert kept.sum().item() == 80_000 and kept.any().item() and not kept.all().item()
    assert uniform.masked_select(~kept).shape == (20_000,)
    assert any(note.operator == "nonzero" and "random" in note.text for note in gpu.stand_ins.notes())


def test_copies_and_views_keep_the_share(uniform: torch.Tensor) -> None:
    kept = (uniform.view(100, -1) > 0.2).clone().t().contiguous().float().bool()
    assert kept.nonzero().shape[0] == 80_000
    assert kept[:50].nonzero().shape[0] == pytest.approx(0.8 * kept[:50].numel())


def test_what_is_written_over_is_forgotten(uniform: torch.Tensor) -> None:
    kept = uniform > 0.2
    kept[5:] = uniform[5:] * uniform[5:] > 0.2
    assert kept.nonzero().shape[0] == ELEMENTS
    uniform.mul_(torch.randn_like(uniform))
    assert (uniform > 0.2).nonzero().shape[0] == ELEMENTS


@pytest.mark.parametrize("size", [1000, 1_000_000])
def test_bernoulli(size: int) -> None:
    probabilities = torch.full((size,), 0.15, device="cuda")
    masked = torch.bernoulli(probabilities).bool()
    replaced = torch.bernoulli(torch.full((size,), 0.8, device="cuda")).bool() & masked
    assert masked.nonzero().shape[0] == 0.15 * size
    assert replaced.nonzero().shape[0] == pytest.approx(0.12 * size)
    assert (torch.rand(size, device="cuda") < probabilities).sum().item() == 0.15 * size
    assert torch.bernoulli(torch.rand(size, device="cuda")).bool().sum().item() == 0.5 * size


def test_integers_repeat() -> None:
    drawn = torch.randint(0, 5000, (2_000_000,), device="cuda")
    assert torch.unique(drawn).shape == (5000,)
    assert (drawn.int() < 50).sum().item() == 20_000
    assert torch.unique(torch.rand(2_000_000, device="cuda")).shape == (2_000_000,)


def test_a_mask_too_large_to_keep_is_counted() -> None:
    rows = torch.zeros(4096, dtype=torch.bool)
    rows[:100] = True
    mask = rows.cuda().unsqueeze(-1).expand(-1, 1024)
    x = torch.randn(4096, 1024, device="cuda", requires_grad=True)
    source = torch.randn(100, 1024, device="cuda", requires_grad=True)
    x.masked_scatter(mask, source).sum().backward()
    assert source.grad is not None and source.grad.shape == (100, 1024)
    assert x.masked_select(mask.contiguous()).shape == (102_400,)
