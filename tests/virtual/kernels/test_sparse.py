"""Sparse gradients: what coalescing and sums allocate, and the optimizers that take them."""

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("gpu")
ROWS, WIDTH, TOKENS = 1000, 64, 4096


def gradient(width: int = WIDTH) -> torch.Tensor:
    table = nn.Embedding(ROWS, width, sparse=True, device="cuda")
    table(torch.arange(TOKENS, device="cuda") % 300).sum().backward()
    assert table.weight.grad is not None
    return table.weight.grad


def test_a_gradient_has_a_row_for_each_token() -> None:
    grad = gradient()
    assert grad.is_sparse and not grad.is_coalesced()
    assert grad._indices().shape == (1, TOKENS) and grad._values().shape == (TOKENS, WIDTH)


def test_coalescing_keeps_one_of_each_index() -> None:
    merged = gradient().coalesce()
    assert merged.indices().tolist() == [list(range(300))]
    assert merged.values().shape == (300, WIDTH)
    assert merged.indices().untyped_storage().nbytes() == TOKENS * 8  # in the memory of all


def test_coalescing_two_dimensions() -> None:
    places = torch.tensor([[0, 1, 0], [2, 0, 2]], device="cuda")
    merged = torch.sparse_coo_tensor(places, torch.ones(3, device="cuda"), (2, 3)).coalesce()
    assert merged.indices().tolist() == [[0, 1], [2, 0]]


def test_the_peak_of_coalescing() -> None:
    grad = gradient(width=4)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grad.coalesce()
    held = 3 * TOKENS * 8  # flat indices, places and offsets
    sort = 512 + 2 * TOKENS * 8  # partitions, and keys and places once more
    assert torch.cuda.max_memory_allocated() - before == held + sort


def test_indices_that_nobody_knows_repeat_as_expected() -> None:
    table = nn.Embedding(ROWS, 4, sparse=True, device="cuda")
    table(torch.randint(0, ROWS, (2_000_000,), device="cuda")).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.coalesce()._nnz() == ROWS


def test_two_gradients_are_put_one_after_the_other() -> None:
    both = gradient() + gradient()
    assert both._nnz() == 2 * TOKENS
    dense = torch.zeros(ROWS, WIDTH, device="cuda")
    assert (dense + both).layout is torch.strided


@pytest.mark.parametrize(
    ("kind", "options", "states"),
    [
        (torch.optim.SGD, {"lr": 0.1}, 0),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, None),
        (torch.optim.SparseAdam, {}, 2 * ROWS * WIDTH * 4),
        (torch.optim.Adagrad, {}, ROWS * WIDTH * 4),
    ],
)
def test_optimizers_step(kind: type[torch.optim.Optimizer], options: dict[str, float], states: int | None) -> None:
    table = nn.Embedding(ROWS, WIDTH, sparse=True, device="cuda")
    before = torch.cuda.memory_allocated()
    optimizer = kind(table.parameters(), **options)
    for _ in range(2):
        table(torch.arange(TOKENS, device="cuda") % 300).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if states is not None:
        assert torch.cuda.memory_allocated() - before == pytest.approx(states, abs=2048)
