import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tonnage.fit.layers.tiles import mixes_rows, tile_forward
from tonnage.fit.stepping.batches import row_slices


class Gated(nn.Module):
    """A feed-forward layer, with an unused parameter and a frozen one."""

    def __init__(self, width: int = 6, inside: int = 20) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inside), nn.Linear(width, inside)
        self.down = nn.Linear(inside, width, bias=False)
        self.unused = nn.Parameter(torch.zeros(3))
        self.up.bias.requires_grad_(False)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return scale * self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def _made() -> Gated:
    torch.manual_seed(0)
    return Gated().double()


def _gradients(
    module: nn.Module, x: Tensor, *, trained_input: bool = True, **keywords: Any
) -> dict[str, Tensor | None]:
    module.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_(trained_input)
    output = module(x, **keywords)
    output.square().sum().backward()
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {**found, "input": x.grad, "output": output.detach()}


def _assert_equal(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] is None) == (tensor is None), name
        if tensor is not None:
            torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)


def test_what_comes_out_may_be_written_into() -> None:
    module, x = _made(), torch.randn(5, 6, dtype=torch.float64)
    expected = module(x) + x
    tile_forward(module, 3)
    found = module(x)
    found += x
    torch.testing.assert_close(found, expected)
    found.sum().backward()


@settings(max_examples=40)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    tiles=st.integers(1, 9),
    trained_input=st.booleans(),
    transposed=st.booleans(),
)
def test_values_and_gradients_are_those_of_the_whole(
    shape: list[int], tiles: int, trained_input: bool, transposed: bool
) -> None:
    x = torch.randn(*shape, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    if transposed and len(shape) > 1:
        x = x.transpose(0, 1)
    expected = _gradients(_made(), x, trained_input=trained_input)
    module = _made()
    undo = tile_forward(module, tiles)
    _assert_equal(_gradients(module, x, trained_input=trained_input), expected)
    undo()
    assert "forward" not in module.__dict__
    assert not hasattr(module, "_tonnage_tiles")


@given(rows=st.integers(0, 100), tiles=st.integers(1, 20))
def test_pieces_cover_all_rows_once_and_evenly(rows: int, tiles: int) -> None:
    found = row_slices(rows, tiles)
    assert [row for part in found for row in range(rows)[part]] == list(range(rows))
    sizes = [part.stop - part.start for part in found]
    assert len(sizes) == min(rows, tiles)
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_each_parameter_gets_one_gradient_and_it_is_complete() -> None:
    x = torch.randn(2, 8, 6, dtype=torch.float64)
    expected = _gradients(_made(), x)
    module = _made()
    tile_forward(module, 4)
    seen: list[tuple[str, Tensor]] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and name != "unused":
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: seen.append((name, p.grad.clone()))  # type: ignore[misc]
            )
    _gradients(module, x)
    assert sorted(name for name, _ in seen) == ["down.weight", "gate.bias", "gate.weight", "up.weight"]
    for name, gradient in seen:
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)


class LargestTensor(TorchDispatchMode):
    """Counts elements of what operators make, and products."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return result


def test_the_inside_never_exists_whole() -> None:
    module = _made()
    x = torch.randn(1, 400, 6, dtype=torch.float64)
    with LargestTensor() as plain:
        _gradients(module, x)
    tile_forward(module, 8)
    with LargestTensor() as tiled:
        _gradients(module, x)
    assert plain.elements == 400 * 20
    assert tiled.elements == 400 * 6


def test_only_the_input_is_kept() -> None:
    module = _made()
    tile_forward(module, 4)
    kept: list[Tensor] = []
    x = torch.randn(1, 8, 6, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        module(x)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]


def test_a_checkpoint_around_it_does_not_run_the_tiles_a_third_time() -> None:
    module = _made()
    x = torch.randn(1, 8, 6, dtype=torch.float64, requires_grad=True)
    expected = _gradients(_made(), x.detach())
    tile_forward(module, 4)
    with LargestTensor() as counted:
        output = checkpoint(lambda x: x + 0 * module(x.sin()) + module(x), x, use_reentrant=False)
        del output
        forward = counted.products
        checkpoint(module, x, use_reentrant=False).square().sum().backward()
    # Three products forward, three again, six for gradients, for each of four tiles.
    assert forward == 2 * 3 * 4
    assert counted.products - forward == 12 * 4
    _assert_equal({"input": x.grad}, {"input": expected["input"]})


def test_the_input_is_freed_with_the_graph() -> None:
    module = _made()
    tile_forward(module, 2)
    x = torch.randn(1, 8, 6, dtype=torch.float64)
    middle = x.requires_grad_() * 2
    freed = weakref.ref(middle)
    loss = module(middle).sum()
    del middle
    loss.backward()
    del loss
    assert freed() is None


def test_autocast_holds_in_backward() -> None:
    x = torch.randn(2, 8, 6)
    results = []
    for tiles in (None, 4):
        module = _made().float()
        if tiles:
            tile_forward(module, tiles)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = module(x)
        y.float().square().sum().backward()
        assert y.dtype == torch.bfloat16
        results.append([parameter.grad for parameter in module.parameters() if parameter.grad is not None])
    for plain, tiled in zip(*results, strict=True):
        assert tiled.dtype == torch.float32
        torch.testing.assert_close(tiled, plain, rtol=2e-2, atol=2e-2)


def test_a_call_with_more_arguments_runs_whole() -> None:
    x = torch.randn(2, 8, 6, dtype=torch.float64)
    module = _made()
    tile_forward(module, 4)
    _assert_equal(_gradients(module, x, scale=3.0), _gradients(_made(), x, scale=3.0))


def test_without_gradients_it_only_runs() -> None:
    module = _made()
    x = torch.randn(2, 8, 6, dtype=torch.float64)
    expected = module(x)
    tile_forward(module, 4)
    with torch.no_grad():
        found = module(x)
    assert not found.requires_grad
    torch.testing.assert_close(found, expected)


def test_a_dropout_switched_on_later_is_not_tiled() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).double().eval()
    tile_forward(module, 4)
    module.train()
    x = torch.randn(1, 8, 6, dtype=torch.float64)
    torch.manual_seed(1)
    found = _gradients(module, x)
    del module.__dict__["forward"]
    torch.manual_seed(1)
    _assert_equal(found, _gradients(module, x))


def test_a_backward_that_raises_leaves_no_half_gradients() -> None:
    module = _made()
    calls = []

    def raising(x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) == 6:
            raise ArithmeticError("in the second tile of backward")
        return Gated.forward(module, x)

    module.forward = raising  # type: ignore[method-assign]
    tile_forward(module, 4)
    with pytest.raises(ArithmeticError):
        module(torch.randn(1, 8, 6, dtype=torch.float64)).sum().backward()
    assert all(parameter.grad is None for parameter in module.parameters())


class Mixing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - 0.01 * x.mean(dim=1, keepdim=True)


def test_mixing_rows_is_found() -> None:
    assert mixes_rows(_made(), 6) is None
    assert mixes_rows(nn.Linear(6, 6), 6) is None
    assert "beside it" in (mixes_rows(Mixing(6, 6), 6) or "")
    assert "one tensor" in (mixes_rows(nn.GRU(6, 6, batch_first=True), 6) or "")
    assert "does not run" in (mixes_rows(nn.Linear(5, 6), 6) or "")
