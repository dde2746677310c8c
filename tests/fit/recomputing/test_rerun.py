"""What a module that runs again in backward reads beyond its arguments."""

import torch
from torch import Tensor, nn

from tonnage.fit.recomputing.replay import Replayer
from tonnage.fit.recomputing.rerun import Rerun, Surroundings

CPU = torch.device("cpu")


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.modes: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return self.linear(x).relu()


def test_it_runs_once_without_gradients_and_once_with() -> None:
    module = Counting()
    rerun = Rerun(module, module.forward, Replayer({}))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = rerun(torch.ones(2, 3))
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert module.modes == [(False, True), (True, True)]
    assert module.linear.weight.grad is not None


def test_casts_made_without_gradients_are_not_remembered() -> None:
    """Autocast remembers the casts of weights; those of the first pass could not be differentiated through."""
    module = Counting()
    rerun = Rerun(module, module.forward, Replayer({}))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = module.linear(rerun(torch.ones(2, 3)).detach())
    again.float().sum().backward()
    assert module.linear.weight.grad is not None


def test_frozen_modules_and_inputs_run_plainly() -> None:
    module = Counting().requires_grad_(False)
    rerun = Rerun(module, module.forward, Replayer({}))
    assert not rerun(torch.ones(2, 3)).requires_grad
    assert len(module.modes) == 1


def test_a_frozen_module_still_passes_the_gradient_on() -> None:
    module = Counting().requires_grad_(False)
    rerun = Rerun(module, module.forward, Replayer({}))
    x = torch.ones(2, 3, requires_grad=True)
    rerun(x).sum().backward()
    expected = torch.autograd.grad(module.forward(x).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)


def test_generators_that_did_not_move_are_not_kept() -> None:
    before = Surroundings.now([], [], [])
    assert before.without_unused_random().random == ()
    torch.rand(1)
    assert before.without_unused_random() is before


def test_random_numbers_are_the_same_again_and_go_on_after() -> None:
    surroundings = Surroundings.now([], [], [])
    drawn = torch.rand(2)
    state = torch.get_rng_state()
    with surroundings.again():
        assert torch.equal(torch.rand(2), drawn)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_gradient_of_a_parameter_is_given_away_not_copied() -> None:
    """Autograd takes a gradient that nobody else holds as it is."""
    module = Counting()
    rerun = Rerun(module, module.forward, Replayer({}))
    made: list[int] = []
    gradients = rerun.gradients
    rerun.gradients = lambda *a: [made.append(g.data_ptr()) or g for g in gradients(*a)]  # type: ignore[assignment, func-returns-value]
    rerun(torch.ones(2, 3)).sum().backward()
    assert {p.grad.data_ptr() for p in module.parameters()} == set(made)
