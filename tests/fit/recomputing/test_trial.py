"""What is found out about a block before it is recomputed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fit.cases import Case, build_training
from tonnage.fit.recomputing import trial
from tonnage.fit.recomputing.trial import find_out

Loss = Callable[[nn.Module, Any], Tensor]


class Block(nn.Module):
    """Stores, reads or changes something beside its output, as it is told."""

    aside: Tensor
    lent: Callable[[], Tensor] = staticmethod(lambda: torch.zeros(()))
    shared: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x).tanh()
        self.aside = hidden.mean()
        return x + hidden + self.lent()


def _training(loss: Loss | None = None) -> Any:
    def build() -> Case:
        model = nn.Sequential(nn.Linear(4, 4), Block(), Block())
        return model, torch.randn(5, 4, dtype=torch.float64), loss or (lambda model, x: model(x).square().mean())

    return build_training(build)


def test_an_attribute_that_nobody_reads_is_no_matter() -> None:
    findings = find_out(_training(), ["1", "2"])
    assert [finding.beside for finding in findings.values()] == [None, None]
    assert {slot.key for slot in findings["1"].slots} == {"aside"}


def test_only_the_block_that_the_loss_reads_from_keeps_its_graph() -> None:
    findings = find_out(_training(lambda model, x: model(x).mean() + model[2].aside), ["1", "2"])
    assert findings["1"].beside is None
    assert "does not return" in str(findings["2"].beside)


def test_a_tensor_of_another_block_is_noticed_at_both_ends() -> None:
    training = _training()
    training.model[2].lent = lambda: training.model[1].aside
    findings = find_out(training, ["1", "2"])
    assert "does not return" in str(findings["1"].beside)
    assert "neither its argument" in str(findings["2"].beside)


def _collecting(module: str, take: Callable[[list[Tensor]], Tensor]) -> Any:
    """A hook on this module collects its outputs, and the loss takes from them."""
    outputs: list[Tensor] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).mean() + take(outputs)

    training = _training(loss)
    training.model.get_submodule(module).register_forward_hook(lambda module, args, output: outputs.append(output))
    return training


def _all_of(outputs: list[Tensor]) -> Tensor:
    total = sum(output.mean() for output in outputs)
    outputs.clear()
    return total


@pytest.mark.parametrize("take", [_all_of, lambda outputs: outputs.pop(0).mean()], ids=["all", "one"])
def test_a_hook_matters_to_the_blocks_around_its_module_alone(take: Callable[[list[Tensor]], Tensor]) -> None:
    assert [f.reason or f.beside for f in find_out(_collecting("1", take), ["1", "2"]).values()] == [None, None]
    findings = find_out(_collecting("1.linear", take), ["1", "1.linear", "2"])
    assert "something outside" in str(findings["1"].reason)
    assert [findings[name].reason or findings[name].beside for name in ("1.linear", "2")] == [None, None]


def test_a_training_is_tried_once_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[list[str]] = []
    plain = trial.try_blocks
    monkeypatch.setattr(trial, "try_blocks", lambda t, names: tried.append(list(names)) or plain(t, names))
    training = _training()
    for names in (["1"], ["1"], ["1", "2"], ["2"]):
        find_out(training, names)
    assert tried == [["1"], ["2"]]
    training.model[1].register_forward_hook(lambda *_: None)
    find_out(training, ["2"])
    assert tried[2:] == [["2"]]


def test_a_loss_that_needs_the_whole_batch_is_tried_on_it() -> None:
    rows: list[int] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        rows.append(len(x))
        return model(x.view(5, 4)).mean()

    assert find_out(_training(loss), ["1"])["1"].reason is None


def test_a_loss_that_differentiates_by_itself_can_be_tried() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).mean(), x)
        return model(x + gradient.sign()).mean()

    finding = find_out(_training(loss), ["1"])["1"]
    assert (finding.reason, finding.beside) == (None, None)
