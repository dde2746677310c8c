"""What is wrong with a request is said before anything is touched."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tonnage
from fit.cases import CASES, build_training
from tonnage.errors import RequestError
from tonnage.fit.checks import check_loss, check_request
from tonnage.fit.training import Training


@pytest.fixture(scope="module")
def training() -> Training:
    return build_training(CASES["dropout"])


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def _fit(training: Training, **changed: Any) -> Any:
    arguments = {"model": training.model, "optimizer": training.optimizer, "sample": training.sample, **changed}
    return tonnage.fit(arguments.pop("model"), arguments.pop("optimizer"), loss=training.loss, **arguments)


@pytest.mark.usefixtures("process_group")
def test_a_distributed_model_is_refused(training: Training) -> None:
    wrapped = nn.parallel.DistributedDataParallel(build_training(CASES["dropout"]).model)
    with pytest.raises(RequestError, match=r"wrapped already.*DistributedDataParallel") as caught:
        _fit(training, model=wrapped)
    assert "plain module" in str(caught.value.hint)


def test_a_wrapped_model_is_refused(training: Training) -> None:
    with pytest.raises(RequestError, match=r"wrapped already.*DataParallel"):
        _fit(training, model=nn.DataParallel(training.model))
    with pytest.raises(RequestError, match="wrapped already"):
        _fit(training, model=torch.compile(training.model))


def test_what_is_no_model_or_optimizer_is_refused(training: Training) -> None:
    with pytest.raises(RequestError, match=r"wants a torch\.nn\.Module, and got function"):
        _fit(training, model=lambda x: x)
    scheduler = torch.optim.lr_scheduler.ConstantLR(training.optimizer)
    with pytest.raises(RequestError, match="wants a torch optimizer, and got ConstantLR"):
        _fit(training, optimizer=scheduler)
    with pytest.raises(RequestError, match="no parameters"):
        _fit(training, model=nn.Identity())


def test_an_optimizer_of_another_model_is_refused(training: Training) -> None:
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(RequestError, match="steps 2 parameters that are not the model's"):
        _fit(training, optimizer=other)


def test_parameters_on_several_devices_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(RequestError, match="spread over cpu, meta"):
        check_request(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 2))


def test_a_sample_elsewhere_or_empty_is_refused(training: Training) -> None:
    with pytest.raises(RequestError, match="sample is on meta and the model on cpu"):
        _fit(training, sample={"x": torch.ones(2, 8, device="meta")})
    with pytest.raises(RequestError, match="holds no tensor"):
        _fit(training, sample={"x": "text"})


def test_a_model_on_the_cpu_needs_a_plan(training: Training) -> None:
    with pytest.raises(RequestError, match="measures GPU memory") as caught:
        _fit(training)
    assert "virtual_gpu" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (torch.ones(3, requires_grad=True), r"not a scalar: a tensor of shape \[3\]"),
        (1.5, "not a scalar: float"),
        (torch.ones(()), "does not depend on the model's parameters"),
    ],
)
def test_a_loss_that_cannot_be_trained_is_refused(loss: Tensor | float, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        check_loss(loss)
