"""The window through which kept storages go to the host and back."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tonnage.fit.moving.host import PinnedSpace
from tonnage.fit.moving.saved_tensors import OffloadWindow, Packed, made_of_a_parameter, saved_by

CPU = torch.device("cpu")
FLOATS = 256  # of each tensor below
SIZE = FLOATS * 8


def window_of(window_bytes: int, limit_bytes: int = 1 << 30) -> OffloadWindow:
    return OffloadWindow(CPU, PinnedSpace(CPU, limit_bytes), window_bytes=window_bytes)


def pinned_bytes_of(window: OffloadWindow) -> int:
    assert isinstance(window.space, PinnedSpace)
    return window.space.pinned_bytes


def leaf() -> Tensor:
    return torch.linspace(-1, 1, FLOATS, dtype=torch.float64, requires_grad=True)


def test_a_kept_storage_leaves_when_the_window_is_full_and_comes_back_equal() -> None:
    window = window_of(2 * SIZE)
    first = torch.arange(FLOATS, dtype=torch.float64)
    packed, storage = window.pack(first), StorageWeakRef(first.untyped_storage())
    expected = first.clone()
    del first
    assert not storage.expired(), "the window still holds it"
    others = [window.pack(torch.zeros(FLOATS, dtype=torch.float64)) for _ in range(2)]
    assert storage.expired()
    assert packed is not None
    assert torch.equal(packed(), expected)
    assert len(others) == 2


def test_views_of_one_storage_are_moved_once_and_keep_their_shape() -> None:
    window = window_of(0)
    whole = torch.arange(24.0).view(4, 6)
    views = [whole, whole.t(), whole[1:3, ::2], whole.view(torch.int32)]
    packed = [window.pack(view) for view in views]
    assert pinned_bytes_of(window) == whole.nbytes
    for view, stored in zip(views, packed, strict=True):
        assert stored is not None
        found = stored()
        assert torch.equal(found, view)
        assert found.stride() == view.stride()


def test_a_storage_changed_between_two_keeps_is_kept_twice() -> None:
    window = window_of(0)
    tensor = torch.zeros(FLOATS)
    before = window.pack(tensor)
    window.pack(torch.zeros(1))  # the first leaves
    tensor.fill_(7)
    after = window.pack(tensor)
    assert before is not None
    assert after is not None
    assert torch.equal(before(), torch.zeros(FLOATS))
    assert torch.equal(after(), torch.full((FLOATS,), 7.0))


def test_a_change_in_place_while_the_copy_may_run_is_an_error() -> None:
    window = window_of(SIZE)
    x = leaf()
    with saved_by(window.pack):
        y = x * 2
        loss = (y * y).sum()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_what_stays_is_checked_for_changes_too() -> None:
    x = leaf()
    with saved_by(lambda tensor: None):
        y = x * 2
        loss = (y * y).sum()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_what_is_declined_goes_to_the_hooks_around() -> None:
    seen: list[Tensor] = []

    def outer(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.detach().clone()

    x = leaf()
    with torch.autograd.graph.saved_tensors_hooks(outer, lambda tensor: tensor), saved_by(lambda tensor: None):
        loss = (x.exp() * 3).sum()
    loss.backward()
    assert len(seen) == 1
    torch.testing.assert_close(x.grad, 3 * x.detach().exp())


def test_an_abandoned_graph_gives_everything_back() -> None:
    window = window_of(4 * SIZE)
    gc.disable()  # it would find cycles through the graph
    try:
        with saved_by(window.pack):
            output = leaf().exp().sigmoid()
        assert window.used_bytes == 2 * SIZE
        del output
    finally:
        gc.enable()
    assert window.used_bytes == 0
    pinned_bytes = pinned_bytes_of(window)
    packed = window.pack(torch.zeros(FLOATS, dtype=torch.float64))
    assert packed is not None
    assert pinned_bytes_of(window) == pinned_bytes, "the host's memory is used again"


def test_a_graph_can_be_walked_twice() -> None:
    window = window_of(SIZE)
    x = leaf()
    with saved_by(window.pack):
        loss = x.exp().sigmoid().tanh().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)


def test_tensors_that_a_storage_does_not_describe_are_declined() -> None:
    window = window_of(0)
    complex_values = torch.ones(4, dtype=torch.complex64)
    for odd in (
        complex_values.conj(),
        complex_values.conj().imag,
        torch.eye(3).to_sparse(),
        torch.ones(2, device="meta"),
    ):
        assert window.pack(odd) is None


def test_casts_and_views_of_parameters_are_recognised() -> None:
    linear = torch.nn.Linear(4, 4)
    x = torch.ones(2, 4, requires_grad=True)
    assert made_of_a_parameter(linear.weight)
    assert made_of_a_parameter(linear.weight.to(torch.bfloat16).t())
    assert not made_of_a_parameter(x.t())
    assert not made_of_a_parameter(linear(x))


@given(
    sizes=st.lists(st.integers(1, 64), min_size=1, max_size=12),
    window_floats=st.integers(0, 128),
    again=st.booleans(),
)
def test_the_window_is_never_overfull_and_gradients_are_the_plain_ones(
    sizes: list[int], window_floats: int, again: bool
) -> None:
    window = window_of(window_floats * 8)
    bound = max(window_floats, *sizes, 64) * 8

    def pack(tensor: Tensor) -> Packed | None:
        packed = window.pack(tensor)
        assert window.used_bytes <= bound
        return packed

    def loss_of(x: Tensor) -> Tensor:
        for size in sizes:
            x = torch.cat([x[:size].exp().tanh(), x[size:].sin()])
        return x.square().sum()

    plain, moved = (torch.linspace(-1, 1, 64, dtype=torch.float64, requires_grad=True) for _ in range(2))
    loss_of(plain).backward()
    for _ in range(1 + again):
        moved.grad = None
        with saved_by(pack):
            loss = loss_of(moved)
        loss.backward()
        del loss
        assert torch.equal(moved.grad, plain.grad)
        assert window.used_bytes == 0
