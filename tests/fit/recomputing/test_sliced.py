"""How a batch is cut into slices, and what a block is asked before."""

import pytest
import torch
from torch import Tensor, nn

from tonnage.fit.recomputing.replay import Replayer
from tonnage.fit.recomputing.sliced import SlicedRerun, has_rows


def test_masks_of_one_row_and_vectors_are_shared() -> None:
    assert has_rows(torch.ones(4, 2), 4)
    assert not has_rows(torch.ones(1, 2), 4)
    assert not has_rows(torch.ones(4), 4)
    assert not has_rows("four", 4)


class Biased(nn.Module):
    """A block with a bias that all rows share, one for each row, and several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.sizes: list[int] = []

    def forward(self, x: Tensor, *, shared: Tensor, own: Tensor, scale: float) -> dict[str, object]:
        self.sizes.append(len(x))
        y = self.linear(x + shared) * own * scale
        return {"y": y.tanh(), "rows": x.argmax(-1), "note": "kept", "pair": (y, None)}


@pytest.mark.parametrize("slices", [1, 2, 3, 8])
def test_arguments_and_outputs_of_all_kinds(slices: int) -> None:
    torch.manual_seed(0)
    block = Biased().double()
    tensors = {
        "x": torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True),
        "shared": torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True),
        "own": torch.randn(5, 1, 1, dtype=torch.float64),
    }
    sliced = SlicedRerun(block, block.forward, Replayer({}), slices)
    wanted = [tensors["x"], tensors["shared"], *block.parameters()]
    found = []
    for forward in (block.forward, sliced):
        outputs = forward(tensors["x"], shared=tensors["shared"], own=tensors["own"], scale=0.5)
        assert outputs["note"] == "kept" and outputs["pair"][1] is None
        assert not outputs["rows"].requires_grad
        loss = (outputs["y"] * outputs["pair"][0]).sum()
        found.append([outputs["rows"].double(), loss, *torch.autograd.grad(loss, wanted)])
    for plain, fitted in zip(*found, strict=True):
        torch.testing.assert_close(fitted, plain, rtol=1e-12, atol=1e-12)
    assert max(block.sizes[1:]) == -(-5 // slices)


def test_an_output_without_a_gradient_costs_none() -> None:
    block = Biased()
    sliced = SlicedRerun(block, block.forward, None, 2)
    x = torch.randn(4, 2, 3, requires_grad=True)
    outputs = sliced(x, shared=torch.zeros(1, 2, 3), own=torch.ones(4, 1, 1), scale=1.0)
    outputs["y"].sum().backward()
    assert x.grad is not None and block.linear.weight.grad is not None
