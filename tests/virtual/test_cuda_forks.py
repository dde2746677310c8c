"""Forked children: data-loader workers go on with their work on the CPU, and cannot use the card."""

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tonnage.hardware import find_gpu
from tonnage.virtual.loading import load
from tonnage.virtual.modelled import ModelledSession as Session

load()
import torch  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session(find_gpu("h200"), "2.11.0")
    session.open()
    yield session
    session.close()


def in_child(work: Callable[[], Any]) -> Any:
    """What the work returns in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # as a worker does: OpenMP's threads do not survive a fork
        try:
            answer = work()
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        return json.load(pipe)


def test_a_child_of_an_initialised_process(session: Session) -> None:
    torch.cuda.init()
    before = len(session.device.allocations)

    def work() -> list[Any]:
        questions = ("_is_in_bad_fork", "is_available", "device_count", "is_initialized", "memory_allocated")
        return [getattr(torch.cuda, question)() for question in questions]

    assert in_child(work) == [True, True, 1, False, 0]
    message = in_child(lambda: torch.empty(1, device="cuda").shape)
    assert message.startswith("RuntimeError: Cannot re-initialize CUDA in forked subprocess.")
    assert in_child(lambda: torch.ones(1000, 1000).sum().item()) == 1e6
    assert not torch.cuda._is_in_bad_fork() and len(session.device.allocations) == before


def test_a_child_may_be_the_first(session: Session) -> None:
    assert in_child(lambda: torch.empty(1, device="cuda").shape[0]) == 1


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        torch.manual_seed(index)
        return torch.full((1024, 1024), float(index)) + torch.rand(1)


@pytest.mark.parametrize("pin", [False, True])
def test_workers_load_data(session: Session, pin: bool) -> None:
    torch.cuda.init()
    loaded = []
    for batch in DataLoader(Rows(), batch_size=4, num_workers=2, pin_memory=pin):
        assert batch.is_pinned() == pin
        loaded.append(batch.to("cuda", non_blocking=True))
        assert batch[0, 0, 0] >= 4 * (len(loaded) - 1)
    assert len(loaded) == 4 and torch.cuda.memory_allocated() == 4 * 4 * 2**22
