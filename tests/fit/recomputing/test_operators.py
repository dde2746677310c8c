"""What is seen of a forward pass, operator by operator."""

import weakref

import pytest
import torch
from torch import Tensor, nn

from tonnage.fit.recomputing.operators import (
    OperatorRecorder,
    matrix_operations,
    operations_clock,
    profile_operators,
)
from tonnage.fit.survey.profile import OperatorProfile


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


def _by_name(operators: tuple[OperatorProfile, ...], name: str) -> list[OperatorProfile]:
    return [operator for operator in operators if operator.name == f"aten.{name}"]


def _profile(function: object, *tensors: Tensor) -> tuple[OperatorProfile, ...]:
    module = nn.Module()
    module.forward = function  # type: ignore[assignment]
    return profile_operators(module, tensors, {})


def test_each_call_has_its_bytes_and_its_sources() -> None:
    operators = profile_operators(Block(), (torch.randn(3, 4, requires_grad=True),), {}, operations_clock)
    up, down = _by_name(operators, "mm.default")
    (tanh,) = _by_name(operators, "tanh.default")
    (add,) = _by_name(operators, "add.Tensor")
    assert [operator.index for operator in operators] == list(range(len(operators)))
    assert (up.output_bytes, tanh.output_bytes, down.output_bytes) == (96, 96, 48)
    assert (up.kept_bytes, tanh.kept_bytes, down.kept_bytes, add.kept_bytes) == (0, 96, 0, 0)
    assert tanh.inputs == (up.index,) and down.inputs == (tanh.index,) and add.inputs == (down.index,)
    assert up.seconds == 2 * 3 * 4 * 8


def test_views_belong_to_their_base_and_are_no_outputs() -> None:
    def forward(x: Tensor) -> Tensor:
        return (x * 2).view(-1).exp()

    product, view, exp = _profile(forward, torch.ones(2, 2, requires_grad=True))
    assert (view.base, view.output_bytes, view.writes) == (product.index, 0, False)
    assert exp.inputs == (product.index,) and exp.kept_bytes == exp.output_bytes


def test_what_is_written_after_it_was_read_cannot_be_kept() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x * 2
        z = y + 1
        return y.mul_(3) + z

    first, _, write, _ = _profile(forward, torch.ones(2, requires_grad=True))
    assert write.writes and write.base == first.index
    assert not first.keepable


def test_what_is_written_before_it_is_read_can_be_kept() -> None:
    first, write, _ = _profile(lambda x: (x * 2).add_(1).exp(), torch.ones(2, requires_grad=True))
    assert first.keepable and write.base == first.index


def test_writing_to_an_argument_cannot_be_repeated() -> None:
    counter = torch.zeros(2)

    def forward(x: Tensor) -> Tensor:
        counter.add_(1)
        return x * 2

    write, product = _profile(forward, torch.ones(2, requires_grad=True))
    assert not write.repeatable and product.repeatable


def test_nothing_stays_alive_after_a_profile() -> None:
    made: list[weakref.ref[Tensor]] = []

    def forward(x: Tensor) -> Tensor:
        y = x.exp()  # backward keeps it, and its node is the one that keeps it
        made.append(weakref.ref(y))
        return y * 2

    _profile(forward, torch.randn(3, requires_grad=True))
    assert made[0]() is None


def test_hooks_that_hide_what_is_saved_are_noticed() -> None:
    def forward(x: Tensor, hooks: bool) -> Tensor:
        if not hooks:
            return x.exp()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return x.exp()

    for hooks in (False, True):
        recorder = OperatorRecorder()
        with recorder.saving(hold=True), recorder:
            forward(torch.ones(2, requires_grad=True), hooks)
        assert recorder.overlooked == hooks


aten = torch.ops.aten


def test_a_product_counts_two_operations_for_each_pair() -> None:
    left, right = torch.empty(64, 32, device="meta"), torch.empty(32, 16, device="meta")
    assert matrix_operations(aten.mm.default, (left, right), {}, left @ right) == 2 * 64 * 32 * 16


def test_grouped_queries_are_counted_and_a_causal_mask_halves_them() -> None:
    query = torch.empty(2, 8, 128, 64, device="meta")
    key = value = torch.empty(2, 2, 128, 64, device="meta")
    flash = aten._scaled_dot_product_flash_attention.default
    whole = matrix_operations(flash, (query, key, value, 0.0, False), {}, None)
    assert whole == 4 * 2 * 8 * 128 * 128 * 64
    assert matrix_operations(flash, (query, key, value, 0.0, True), {}, None) == whole / 2


def test_backward_of_attention_takes_two_and_a_half_times_as_many() -> None:
    tensors = [torch.empty(2, 8, 128, 64, device="meta") for _ in range(4)]
    forward = matrix_operations(aten._scaled_dot_product_flash_attention.default, tuple(tensors[1:]), {}, None)
    backward = matrix_operations(aten._scaled_dot_product_flash_attention_backward.default, tuple(tensors), {}, None)
    assert backward == pytest.approx(2.5 * forward)


def test_anything_else_has_no_products() -> None:
    tensor = torch.empty(8, device="meta")
    assert matrix_operations(aten.add.Tensor, (tensor, tensor), {}, tensor) == 0
