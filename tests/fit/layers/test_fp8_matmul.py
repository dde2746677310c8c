"""FP8 products: within the rounding of their types, in each direction, for any number of rows."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tonnage.fit.layers.fp8_matmul import FORWARD, GRADIENT, InputCopies, fp8_linear, quantise


@given(scale=st.floats(2.0**-60, 2.0**60), seed=st.integers(0, 2**31), dtype=st.sampled_from([FORWARD, GRADIENT]))
def test_rounding_is_within_the_type_at_any_scale(scale: float, seed: int, dtype: torch.dtype) -> None:
    matrix = scale * torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
    found = quantise(matrix, dtype)
    error = (found.values.float() * found.scale - matrix).abs()
    # Half a spacing of the number itself, or of the smallest numbers of the type.
    half, smallest = torch.finfo(dtype).eps / 2, torch.finfo(dtype).tiny * torch.finfo(dtype).eps * found.scale
    assert (error <= 1.01 * (half * matrix.abs() + smallest)).all()


def test_a_matrix_of_zeros_stays_one() -> None:
    found = quantise(torch.zeros(16, 16), FORWARD)
    assert (found.values.float() * found.scale == 0).all()


def _relative(found: Tensor, expected: Tensor) -> float:
    return (torch.linalg.vector_norm(found.float() - expected) / torch.linalg.vector_norm(expected)).item()


@pytest.mark.parametrize("rows", [(2, 16), (3, 7), (1,), ()])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_near_the_plain_ones(rows: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 48, bias=bias)
    x, slope = torch.randn(*rows, 64, requires_grad=True), torch.randn(*rows, 48)
    expected = torch.autograd.grad(layer(x), [x, *layer.parameters()], slope)
    y = fp8_linear(x, layer.weight, layer.bias)
    found = torch.autograd.grad(y, [x, *layer.parameters()], slope)
    assert y.shape == (*rows, 48)
    assert 0 < _relative(y, layer(x).detach()) < 0.06
    assert all(f.shape == e.shape and _relative(f, e) < 0.12 for f, e in zip(found, expected, strict=True))


def test_types_are_those_of_the_plain_layer_also_under_autocast() -> None:
    layer, x = nn.Linear(32, 32), torch.randn(4, 32, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = fp8_linear(x, layer.weight, layer.bias)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert (x.grad.dtype, layer.weight.grad.dtype, layer.bias.grad.dtype) == (torch.float32,) * 3


def test_backward_keeps_one_byte_an_element_and_layers_share_it() -> None:
    kept = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.dtype == FORWARD:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(32, 64, requires_grad=True)
    layers = [nn.Linear(64, 16) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = [fp8_linear(x, layer.weight, layer.bias) for layer in layers]
    assert list(kept.values()) == [x.numel()]
    assert len(outputs) == 3


def test_an_input_that_changed_or_died_is_not_taken_for_the_old_one() -> None:
    copies = InputCopies()
    x = torch.ones(16, 16)
    first = copies.copy(x)
    assert copies.copy(x) is first
    x.mul_(2)
    assert copies.copy(x) is not first
    del x
    gc.collect()
    assert copies._copy is None
