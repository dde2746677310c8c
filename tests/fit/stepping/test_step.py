import pytest
import torch
from torch import Tensor, nn

from fit.cases import CASES, assert_same_parameters, build_training
from tonnage.fit.stepping.step import take_step


def test_a_step_is_that_of_a_plain_loop() -> None:
    plain, training = build_training(CASES["llama"], clip_norm=0.3), build_training(CASES["llama"], clip_norm=0.3)
    for _ in range(3):
        plain.optimizer.zero_grad()
        expected = plain.loss(plain.model, plain.sample)
        expected.backward()
        nn.utils.clip_grad_norm_(plain.model.parameters(), 0.3)
        plain.optimizer.step()
        found = take_step(training, training.sample)
        assert not found.requires_grad
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=0)
    assert_same_parameters(plain.model, training.model, 0.0)


def test_a_step_that_raises_changes_neither_parameters_nor_gradients() -> None:
    training = build_training(CASES["llama"])
    before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    head = training.model.lm_head.weight
    head.grad = gradient = torch.ones_like(head)
    plain_loss = training.loss

    def raising(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        plain_loss(model, batch).backward()
        raise KeyboardInterrupt

    training.loss = raising
    with pytest.raises(KeyboardInterrupt):
        take_step(training, training.sample)
    assert head.grad is gradient
    assert torch.equal(gradient, torch.ones_like(head))
    assert all(torch.equal(tensor, before[name]) for name, tensor in training.model.state_dict().items())
