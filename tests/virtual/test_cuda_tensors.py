"""Ways to tensors on the card that a build without CUDA does not have by itself."""

import copy
import io
from collections.abc import Iterator

import pytest

from tonnage.hardware import find_gpu
from tonnage.virtual.loading import load
from tonnage.virtual.modelled import ModelledSession as Session

load()
import torch  # noqa: E402

CARD = torch.device("cuda:0")


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session(find_gpu("h200"), "2.11.0")
    session.open()
    yield session
    session.close()


def test_copies_take_memory_on_the_card(session: Session) -> None:
    model = torch.nn.Linear(1024, 1024).cuda()
    before = torch.cuda.memory_allocated()
    twin = copy.deepcopy(model)
    assert twin.weight.device == CARD and twin.weight.data_ptr() != model.weight.data_ptr()
    assert torch.cuda.memory_allocated() == 2 * before


def test_checkpoints_are_saved_and_loaded(session: Session) -> None:
    file = io.BytesIO()
    torch.save({"weight": torch.ones(1024, device="cuda"), "step": torch.tensor(3)}, file)
    for where, device in ((None, CARD), ("cpu", torch.device("cpu")), ("cuda:0", CARD)):
        file.seek(0)
        assert torch.load(file, map_location=where)["weight"].device == device
    assert torch.cuda.memory_allocated() == 0


def test_storages(session: Session) -> None:
    storage = torch.UntypedStorage(1000, device="cuda")
    assert storage.device == CARD and storage.nbytes() == 1000 and torch.cuda.memory_allocated() == 1024
    assert torch.UntypedStorage(10).device.type == "cpu" and torch.UntypedStorage([1, 2]).tolist() == [1, 2]


def test_the_constructors_of_old(session: Session) -> None:
    assert torch.cuda.FloatTensor(2, 3).shape == (2, 3) and torch.cuda.LongTensor([1, 2]).dtype == torch.int64
    assert isinstance(torch.cuda.HalfTensor(3), torch.cuda.HalfTensor) and torch.cuda.FloatTensor(2).device == CARD
    assert not isinstance(torch.ones(3), torch.cuda.FloatTensor)
    assert torch.ones(3).type(torch.cuda.DoubleTensor).dtype == torch.float64
    assert torch.ones(3).type("torch.cuda.FloatTensor").type() == "torch.cuda.FloatTensor"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_default_of_old(session: Session) -> None:
    torch.set_default_tensor_type(torch.cuda.FloatTensor)
    assert torch.ones(3).device == torch.Tensor(2, 3).device == torch.Tensor([1, 2]).device == CARD
    assert torch.Tensor([1, 2], device="cpu").device.type == "cpu"
    torch.set_default_tensor_type("torch.FloatTensor")
    assert torch.ones(3).device.type == torch.Tensor([1, 2]).device.type == "cpu"


def test_data_parallel_on_one_card(session: Session) -> None:
    model = torch.nn.DataParallel(torch.nn.Linear(4, 2)).cuda()
    output = model(torch.ones(8, 4))
    output.sum().backward()
    assert output.device == CARD and model.module.weight.grad is not None
    pieces = torch.nn.parallel.comm.scatter(torch.ones(8, 4), [0])
    assert torch.nn.parallel.comm.gather(pieces, destination="cpu").shape == (8, 4)
    assert torch.nn.parallel.comm.broadcast_coalesced(pieces, [0])[0][0] is pieces[0]


def test_a_profile_of_both_sides(session: Session, capfd: pytest.CaptureFixture[str]) -> None:
    sides = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=sides) as profile, torch.autograd.profiler.emit_nvtx():
        torch.ones(8, device="cuda") + 1
    assert "aten::add" in profile.key_averages().table()
    assert "Failed to record CUDA event" not in capfd.readouterr().err


def test_a_storage_frees_and_takes_memory_as_it_is_resized(session: Session) -> None:
    tensor = torch.empty(2**20, device="cuda")
    before, storage = torch.cuda.memory_allocated(), tensor.untyped_storage()
    storage.resize_(0)
    assert (storage.size(), torch.cuda.memory_allocated()) == (0, before - 2**22)
    storage.resize_(2**23)
    assert (storage.size(), torch.cuda.memory_allocated()) == (2**23, before + 2**22)
    with pytest.raises(torch.OutOfMemoryError):
        storage.resize_(2**45)
    assert storage.size() == 2**23


def test_a_storage_of_the_host_is_resized_as_ever(session: Session) -> None:
    storage = torch.empty(4).untyped_storage()
    assert storage.resize_(0).size() == 0
