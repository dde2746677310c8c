"""Wrappers around kernels of torch's dispatcher, in the place of a kernel and, as before torch 2.9, above all of them."""

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_build import TONNAGE, needs_cuda_build
from tonnage.virtual.builds import preload
from tonnage.virtual.driver.following import Follower

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(scope="module", autouse=True)
def virtual_device() -> None:
    """Autograd counts the devices once in a process, and tests after these may want one."""
    preload()


@pytest.fixture(params=["in place", "above"])
def follower(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Follower]:
    if request.param == "above":
        monkeypatch.delattr(torch.library, "get_kernel")
    elif not hasattr(torch.library, "get_kernel"):
        pytest.skip("this torch hands out no kernels")
    follower = Follower(torch)
    yield follower
    follower.release()


def test_the_wrapper_is_called_and_calls_the_kernel(follower: Follower) -> None:
    calls = []

    def wrapper(operator: Any, call: Any, arguments: Any, keywords: Any) -> Any:
        calls.append((operator, len(arguments), keywords))
        return call()

    follower.follow("aten", "cumsum", "CPU", wrapper)
    assert torch.cumsum(torch.ones(3), 0, dtype=torch.float64).tolist() == [1, 2, 3]
    assert calls == [(torch.ops.aten.cumsum.default, 2, {"dtype": torch.float64})]
    follower.release()
    torch.cumsum(torch.ones(3), 0)
    assert len(calls) == 1


def test_each_key_has_its_wrapper_and_others_have_none(follower: Follower) -> None:
    called = []
    for key in ("CPU", "Meta"):
        follower.follow("aten", "neg", key, lambda operator, call, *_, key=key: (called.append(key), call())[1])
    torch.ones(2).neg()
    torch.ones(2, device="meta").neg()
    torch.ones(2).to_sparse().neg()
    assert called == ["CPU", "Meta"]


def test_numbers_arrive_as_tensors_that_keep_the_type_of_the_result(follower: Follower) -> None:
    seen = []

    def wrapper(operator: Any, call: Any, arguments: Any, keywords: Any) -> Any:
        seen.append(type(arguments[1]))
        return call()

    follower.follow("aten", "mul.Tensor", "CPU", wrapper)
    assert (torch.ones(2, dtype=torch.float16) * 2.5).dtype is torch.float16
    assert (torch.ones(2, dtype=torch.int32) * 2.5).dtype is torch.float32
    assert (torch.tensor([True]) * 2).dtype is torch.int64
    assert seen == [torch.Tensor] * 3


def test_backward_other_threads_and_writes_in_place_are_followed(follower: Follower) -> None:
    threads = []

    def wrapper(operator: Any, call: Any, arguments: Any, keywords: Any) -> Any:
        threads.append(threading.current_thread().name)
        return call()

    follower.follow("aten", "sin_", "CPU", wrapper)
    follower.follow("aten", "cos", "CPU", wrapper)
    x = torch.zeros(2, requires_grad=True)
    x.clone().sin_().sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, 1] and len(threads) == 2
    thread = threading.Thread(target=lambda: torch.ones(2).cos(), name="another")
    thread.start()
    thread.join()
    with torch.inference_mode():
        torch.ones(2).sin_()
    assert threads[2:] == ["another", "MainThread"]


@needs_cuda_build
@pytest.mark.parametrize(
    ("script", "words"), [("values.py", "all as it should be"), ("accumulates.py", "allocations 8")]
)
def test_values_are_followed_without_kernels(script: str, words: str) -> None:
    command = [str(TONNAGE.with_name("python")), str(SCRIPTS / "older_torch.py"), str(SCRIPTS / script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert words in done.stdout, done.stderr[-2000:]
