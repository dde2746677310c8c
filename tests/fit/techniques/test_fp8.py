"""FP8 linear layers: which layers, on which cards, and a training that still learns."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import tonnage
from fit.cases import CASES, build_training, take_step
from fit.virtual_peaks import peaks
from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques.fp8 import FORWARD, GRADIENT, Fp8Linear, InputCopies, fp8_linear, quantise, run_in_fp8
from tonnage.fit.training import Training


def _training() -> Training:
    return build_training(CASES["llama"], dtype=torch.float32)


def test_it_takes_the_large_layers_of_the_blocks_and_never_the_head() -> None:
    model = _training().model
    layers = list(Fp8Linear(minimum_width=32)._layers(model))
    assert len(layers) == 3 * 5  # query, output, gate, up, down; key and value are 16 wide
    assert model.lm_head not in layers
    assert not list(Fp8Linear()._layers(model))


def test_training_in_fp8_learns_and_undo_gives_the_plain_layers_back() -> None:
    plain, fitted = _training(), _training()
    undos = [run_in_fp8(layer) for layer in Fp8Linear(minimum_width=16)._layers(fitted.model)]
    assert len(undos) == 3 * 7
    for step in range(20):
        expected, found = take_step(plain, step), take_step(fitted, step)
    assert found != expected
    assert abs(found - expected) < 0.1 * expected
    for undo in undos:
        undo()
    assert not any("forward" in module.__dict__ for module in fitted.model.modules())


def test_a_cpu_is_refused_by_name() -> None:
    training = _training()
    with pytest.raises(NotApplicable, match="the model is on the CPU"):
        Fp8Linear(minimum_width=32).apply(training)


def test_a_card_without_fp8_is_refused_by_name() -> None:
    with tonnage.virtual_gpu("a100"):
        training = _training()
        training.device = torch.device("cuda")
        with pytest.raises(NotApplicable, match=r"A100.*capability 8\.0"):
            Fp8Linear(minimum_width=32).apply(training)


def test_a_step_runs_on_a_virtual_h200() -> None:
    assert peaks("fp8-linear")["types"] == ["torch.bfloat16"]


def test_a_model_without_such_layers_is_refused() -> None:
    with tonnage.virtual_gpu("h200"):
        training = _training()
        training.device = torch.device("cuda")
        with pytest.raises(NotApplicable, match="1024 wide"):
            Fp8Linear().apply(training)
        training.model = nn.Linear(2048, 2048)
        assert Fp8Linear().why_not(training) is not None


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
