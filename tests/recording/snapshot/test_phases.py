"""What stacks say, as the versions of PyTorch write them."""

import pytest

from snapshots import BACKWARD, FORWARD, INIT, MAIN, MODULE, MOVE, TORCH, UPDATE, frame
from tonnage.recording.snapshot.phases import Origin, origin_of
from tonnage.recording.snapshot.schema import Frame

CPP = "??"
EMPTY = frame("at::_ops::empty_memory_format::call(c10::ArrayRef<long>)", CPP, 0)
ADDMM = frame("at::_ops::addmm::redispatch(c10::DispatchKeySet, at::Tensor const&)", CPP, 0)
LINEAR = frame("at::_ops::linear::call(at::Tensor const&)", CPP, 0)
ENGINE = frame("torch::autograd::Engine::evaluate_function(...)", CPP, 0)
HUB = "/usr/lib/python3.12/site-packages/transformers/"


def origin(*frames: dict) -> Origin:
    return origin_of(tuple(Frame(**f) for f in frames))


@pytest.mark.parametrize(
    ("frames", "about"),
    [
        (FORWARD, "forward"),
        (MOVE, "model"),
        (BACKWARD, "backward"),
        (INIT, "optimizer"),
        (UPDATE, "optimizer"),
        ([MAIN], "script"),
        ([], "engine"),
        ([EMPTY, ADDMM], "engine"),
        ([EMPTY, ENGINE], "backward"),
        ([frame("update", HUB + "cache_utils.py", 5), frame("_call_impl", MODULE, 1), MAIN], "cache"),
        ([frame("__init__", TORCH + "nn/modules/linear.py", 5), MAIN], "model"),
        ([frame("from_pretrained", HUB + "modeling_utils.py", 5), MAIN], "model"),
        ([frame("forward", "/m.py", 5), frame("unpack_hook", TORCH + "utils/checkpoint.py", 5)], "backward"),
        ([frame("backward", "/m.py", 5), frame("apply", TORCH + "autograd/function.py", 5)], "backward"),
        ([frame("zero_grad", TORCH + "optim/optimizer.py", 5), MAIN], "script"),
        ([frame("step", TORCH + "optim/lr_scheduler.py", 5), MAIN], "script"),
        ([frame("step", "/home/me/my_optimizers.py", 5), MAIN], "optimizer"),
        ([frame("step", "/home/me/optimistic/loop.py", 5), MAIN], "script"),
    ],
)
def test_what_the_program_was_about(frames: list[dict], about: str) -> None:
    assert origin(*frames).about == about


def test_the_line_is_the_innermost_of_the_script() -> None:
    model = frame("forward", "/home/me/model.py", 7)
    found = origin(*FORWARD[:2], model, FORWARD[1], MAIN, frame("run_path", "<frozen runpy>", 286))
    assert found.line == "model.py:7"
    assert found.stack == ("model.py:7", "train.py:88")


def test_where_all_is_installed_the_innermost_that_is_not_pytorch_s() -> None:
    assert origin(*FORWARD[:2], frame("train", HUB + "trainer.py", 9)).line == "trainer.py:9"


@pytest.mark.parametrize("path", ["C:\\me\\train.py", "/tmp/ipykernel_7/train.py", "train.py"])
def test_scripts_are_found_wherever_they_are(path: str) -> None:
    assert origin(FORWARD[0], frame("<module>", path, 4)).line == "train.py:4"


@pytest.mark.parametrize(
    ("frames", "operator"),
    [
        ([EMPTY, ADDMM, LINEAR, *FORWARD], "addmm"),
        ([EMPTY, *FORWARD], "empty_memory_format"),
        (FORWARD, "linear"),
        ([frame("layer_norm", TORCH + "nn/functional.py", 5), *FORWARD], "layer_norm"),
        (MOVE, "to"),
        ([MAIN], ""),
        ([], ""),
    ],
)
def test_the_operator_is_the_one_that_computes(frames: list[dict], operator: str) -> None:
    assert origin(*frames).operator == operator
