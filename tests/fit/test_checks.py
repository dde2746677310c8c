"""What is wrong with a request is said before anything is touched."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tonnage
from fit.cases import CASES, build_training
from tonnage.errors import RequestError
from tonnage.fit.checks import check_clip_norm, check_finite, check_loss, check_request, check_sample, check_steppable
from tonnage.fit.training import Training

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def training() -> Training:
    return build_training(CASES["dropout"])


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def _sum_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).sum()


def _fit(training: Training, **changed: Any) -> Any:
    given = {name: getattr(training, name) for name in ("model", "optimizer", "loss", "sample")}
    return tonnage.fit(**(given | changed))


@pytest.mark.usefixtures("process_group")
def test_a_distributed_model_is_refused(training: Training) -> None:
    wrapped = nn.parallel.DistributedDataParallel(build_training(CASES["dropout"]).model)
    with pytest.raises(RequestError, match=r"wrapped already.*DistributedDataParallel") as caught:
        _fit(training, model=wrapped)
    assert "plain module" in str(caught.value.hint)


def test_a_wrapped_model_is_refused(training: Training) -> None:
    with pytest.raises(RequestError, match=r"wrapped already.*DataParallel"):
        _fit(training, model=nn.DataParallel(training.model))


def test_a_compiled_model_is_refused_with_what_to_give_instead(training: Training) -> None:
    with pytest.raises(RequestError, match="compiled already") as caught:
        _fit(training, model=torch.compile(training.model))
    assert "model._orig_mod" in caught.value.hint
    check_request(torch.compile(training.model)._orig_mod, training.optimizer, training.loss, training.sample)


def test_what_is_no_model_or_optimizer_is_refused(training: Training) -> None:
    with pytest.raises(RequestError, match=r"wants a torch\.nn\.Module, and got function"):
        _fit(training, model=lambda x: x)
    scheduler = torch.optim.lr_scheduler.ConstantLR(training.optimizer)
    with pytest.raises(RequestError, match="wants a torch optimizer, and got ConstantLR"):
        _fit(training, optimizer=scheduler)
    with pytest.raises(RequestError, match="wants a torch optimizer, and got a GradScaler") as caught:
        _fit(training, optimizer=torch.amp.GradScaler("cpu"))
    assert "BF16" in caught.value.hint
    with pytest.raises(RequestError, match="no parameters"):
        _fit(training, model=nn.Identity())


def test_arguments_in_the_wrong_place_are_refused_with_what_to_give_instead(training: Training) -> None:
    with pytest.raises(RequestError, match=r"wants a torch\.nn\.Module, and got AdamW") as caught:
        _fit(training, model=training.optimizer, optimizer=training.model)
    assert "The model comes first" in caught.value.hint
    for optimizer, words in ((None, "None"), (torch.optim.AdamW, "the class AdamW")):
        with pytest.raises(RequestError, match=f"wants a torch optimizer, and got {words}") as caught:
            _fit(training, optimizer=optimizer)
        assert "model.parameters()" in caught.value.hint


def _of_a_batch(batch: Any) -> Tensor:
    return batch["x"].sum()


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (None, "takes a function, and got None"),
        (torch.ones(()), "takes a function, and got Tensor"),
        (nn.CrossEntropyLoss, "takes a function, and got the class CrossEntropyLoss"),
        (nn.CrossEntropyLoss(), "CrossEntropyLoss takes outputs and targets"),
        (_of_a_batch, r"_of_a_batch\(batch: Any\) -> torch.Tensor does not take that: too many positional arguments"),
    ],
)
def test_a_loss_that_is_not_called_with_model_and_batch_is_refused(training: Training, loss: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        _fit(training, loss=loss)
    assert "loss=lambda model, batch: " in caught.value.hint


def test_a_plan_that_is_none_is_refused(training: Training) -> None:
    with pytest.raises(RequestError, match="takes a plan or the file that holds it, and got dict") as caught:
        _fit(training, plan={"techniques": []})
    assert "fitted.save" in caught.value.hint


def test_an_optimizer_of_another_model_is_refused(training: Training) -> None:
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(RequestError, match="steps 2 parameters that are not the model's"):
        _fit(training, optimizer=other)


def test_parameters_on_several_devices_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(RequestError, match="spread over cpu, meta"):
        check_request(model, torch.optim.SGD(model.parameters(), lr=0.1), _sum_of, torch.ones(1, 2))


def test_a_sample_elsewhere_or_empty_is_refused(training: Training) -> None:
    with pytest.raises(RequestError, match="sample is on meta and the model on cpu"):
        _fit(training, sample={"x": torch.ones(2, 8, device="meta")})
    with pytest.raises(RequestError, match="holds no tensor"):
        _fit(training, sample={"x": "text"})


@pytest.mark.parametrize("sample", [None, {}, [], iter([torch.ones(2)]), ["text"]])
def test_a_sample_without_a_tensor_is_refused(sample: Any) -> None:
    with pytest.raises(RequestError, match=f"The sample \\({type(sample).__name__}\\) holds no tensor") as caught:
        check_sample(sample, CPU)
    assert "next(iter(loader))" in caught.value.hint


@pytest.mark.parametrize("shape", [(0,), (0, 512), (4, 0)])
def test_an_empty_sample_is_refused(shape: tuple[int, ...]) -> None:
    words = re.escape(f"The sample is empty: its tensors are of {list(shape)}, [0].")
    with pytest.raises(RequestError, match=words):
        check_sample({"x": torch.ones(shape), "y": torch.ones(0)}, CPU)


def test_lengths_may_stay_on_the_cpu(training: Training) -> None:
    away = torch.ones(4, 8, device="meta")
    lengths = torch.tensor([8, 5, 3, 2])
    check_sample({"x": away, "lengths": lengths}, away.device)
    check_sample((away, lengths), away.device)


@pytest.mark.parametrize(
    "on_cpu",
    [
        {"labels": torch.tensor([0, 1])},
        {"x": torch.ones(2, 8, dtype=torch.long)},
        {"weights": torch.ones(2)},
    ],
    ids=["labels", "tokens", "numbers"],
)
def test_nothing_else_may(on_cpu: dict[str, Tensor]) -> None:
    away = torch.ones(2, 8, device="meta")
    with pytest.raises(RequestError, match="The sample is on cpu and the model on meta"):
        check_sample({"images": away, **on_cpu}, away.device)
    with pytest.raises(RequestError, match="The sample is on cpu and the model on meta"):
        check_sample(torch.tensor([1, 2]), away.device)


def test_a_model_on_the_cpu_needs_a_plan(training: Training) -> None:
    with pytest.raises(RequestError, match="measures GPU memory") as caught:
        _fit(training)
    assert "virtual_gpu" in str(caught.value.hint)
    files = [frame.path.name for frame in caught.traceback]
    assert files == ["test_checks.py", "test_checks.py", "__init__.py", "__init__.py"]  # none of those that measure


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


def test_one_number_of_any_shape_can_be_stepped() -> None:
    check_steppable(torch.ones(1, requires_grad=True))
    for loss in (torch.ones(2, requires_grad=True), torch.ones(1), 1.5, None):
        with pytest.raises(RequestError, match=r"not a scalar|does not depend"):
            check_steppable(loss)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_refused(loss: float) -> None:
    for batch in (torch.ones(2, 3), {"labels": torch.tensor([[-100, 1]])}):
        with pytest.raises(RequestError, match=f"The loss of the sample is {loss}") as caught:
            check_finite(torch.tensor(loss), batch)
        assert "a sample that trains" in caught.value.hint


def test_a_mean_over_no_labels_is_no_mistake() -> None:
    check_finite(torch.tensor(math.nan), {"labels": torch.full((2, 3), -100)})
    check_finite(torch.tensor(1.5), torch.ones(2, 3))


@pytest.mark.parametrize("clip_norm", [0, -1.0, math.nan, True, "1.0", (0.5, 1.0)])
def test_a_norm_that_is_none_is_refused(clip_norm: Any) -> None:
    with pytest.raises(RequestError, match="a number above 0") as caught:
        check_clip_norm(clip_norm)
    assert "register_step_pre_hook" in caught.value.hint


@pytest.mark.parametrize("clip_norm", [None, 1, 0.5, math.inf])
def test_norms_are_accepted(clip_norm: float | None) -> None:
    check_clip_norm(clip_norm)
