"""Two passes of one forward: what is set aside, what is left out, and what is noticed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tonnage.fit.recomputing import replay
from tonnage.fit.recomputing.remembered import Generators
from tonnage.fit.recomputing.replay import Replayer, Stash

GENERATORS = Generators(torch.device("cpu"))


class TwoPasses:
    """A forward over one tensor, run first and then again as often as asked; gradients by the last pass."""

    def __init__(self, forward: Callable[[Tensor], Tensor], kept: dict[int, str | None] | None = None) -> None:
        self.replayer = Replayer(kept or {})
        self.forward = forward
        self.stash = Stash()

    def first(self, x: Tensor) -> Tensor:
        fresh = x.clone().requires_grad_()
        (output,), self.stash = self.replayer.first(lambda: (self.forward(fresh),), GENERATORS.torch_states)
        return output

    def gradient(self, x: Tensor) -> Tensor:
        fresh = x.clone().requires_grad_()
        with torch.enable_grad():
            (output,) = self.replayer.again(lambda: (self.forward(fresh),), x.shape, self.stash, GENERATORS.set)
        (gradient,) = torch.autograd.grad(output.sum(), fresh)
        return gradient


@pytest.fixture(autouse=True)
def _leaves_out_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_WORTHWHILE_OPERATIONS", 0)


def _expected(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    fresh = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(forward(fresh).sum(), fresh)
    return gradient


def test_what_was_kept_is_not_computed_again() -> None:
    runs: list[int] = []

    def forward(x: Tensor) -> Tensor:
        runs.append(1)
        return (x.exp() * len(runs)).sin()

    passes = TwoPasses(forward, {1: "aten.mul.Tensor"})
    x = torch.randn(3)
    passes.first(x)
    # The second pass would multiply by 2; what was kept is multiplied by 1.
    torch.testing.assert_close(passes.gradient(x), x.exp().cos() * x.exp() * 2)


def test_what_is_written_in_place_is_kept_as_it_ended() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x * 3
        y.add_(1)
        return y.square()

    passes = TwoPasses(forward, {0: None})
    x = torch.randn(4)
    passes.first(x)
    for _ in range(2):
        torch.testing.assert_close(passes.gradient(x), _expected(forward, x))


def test_each_draw_is_the_same_whether_or_not_others_are_kept() -> None:
    def forward(x: Tensor) -> Tensor:
        first = torch.bernoulli(torch.full_like(x, 0.5))
        second = torch.bernoulli(torch.full_like(x, 0.5))
        return (x * first).exp() * second

    x = torch.randn(64)
    passes = TwoPasses(forward, {1: None})  # the first draw
    torch.manual_seed(3)
    passes.first(x)
    torch.manual_seed(3)
    expected = _expected(forward, x)
    torch.manual_seed(4)
    for _ in range(2):
        torch.testing.assert_close(passes.gradient(x), expected)


def test_what_nobody_reads_is_left_out_from_the_second_time_on() -> None:
    weight = torch.randn(3, 3)

    def forward(x: Tensor) -> Tensor:
        outputs.append(x.tanh() @ weight + 1)
        return outputs[-1]

    outputs: list[Tensor] = []
    passes, x = TwoPasses(forward), torch.randn(3, 3)
    expected = _expected(forward, x)
    for _ in range(3):
        torch.testing.assert_close(passes.gradient(x), expected)
    (plan,) = passes.replayer._plans.values()
    assert plan is not None
    assert {str(plan.functions[index]) for index in plan.skipped} == {"aten.mm.default", "aten.add.Tensor"}


class _HoldsOnTo(torch.autograd.Function):
    """Keeps its input without telling autograd."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        return 2 * ctx.x * gradient


def test_what_a_function_of_its_own_may_hold_on_to_is_not_left_out() -> None:
    weight = torch.randn(3, 3)

    def forward(x: Tensor) -> Tensor:
        return _HoldsOnTo.apply(x @ weight)

    passes, x = TwoPasses(forward), torch.randn(3, 3)
    for _ in range(3):
        torch.testing.assert_close(passes.gradient(x), _expected(forward, x))


def test_a_pass_that_takes_another_way_is_run_whole() -> None:
    weight, ways = torch.randn(3, 3), ["cos", "sin"]

    def forward(x: Tensor) -> Tensor:
        y = x.tanh() @ weight
        return y if ways[0] == "sin" else y.sigmoid()

    passes, x = TwoPasses(forward), torch.randn(3, 3)
    ways.reverse()
    passes.gradient(x)
    ways.reverse()  # now there is a sigmoid after the product that was left out
    torch.testing.assert_close(passes.gradient(x), _expected(forward, x))
    torch.testing.assert_close(passes.gradient(x), _expected(forward, x))


def test_other_shapes_have_plans_of_their_own_up_to_a_limit() -> None:
    def forward(x: Tensor) -> Tensor:
        return x.tanh() @ x.T.detach()

    passes = TwoPasses(forward)
    for rows in range(1, 15):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(passes.gradient(x), _expected(forward, x))
    assert len(passes.replayer._plans) == replay._MOST_PLANS


def test_an_operator_with_another_name_is_noticed_and_the_pass_goes_on() -> None:
    passes = TwoPasses(torch.exp, {0: "aten.mm.default"})
    torch.testing.assert_close(passes.first(torch.ones(2)), torch.ones(2).exp())
    assert passes.stash.differs == "operator 0 was aten.mm.default when it was chosen and is aten.exp.default now"


def test_an_operator_that_is_not_called_is_noticed() -> None:
    passes = TwoPasses(torch.exp, {7: None})
    passes.first(torch.ones(2))
    assert "only 1 are called" in str(passes.stash.differs)


def test_a_second_pass_with_other_operators_runs_without_what_was_set_aside() -> None:
    functions = [torch.exp, torch.sin, torch.sin]
    passes = TwoPasses(lambda x: functions.pop(0)(x), {0: None})
    passes.first(torch.ones(2))
    torch.testing.assert_close(passes.gradient(torch.ones(2)), torch.ones(2).cos())
