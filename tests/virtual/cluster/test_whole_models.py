"""Which engine got a model whole."""

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from tonnage.recording.cluster import WholeModel  # noqa: E402
from tonnage.virtual.cluster.engines import WholeModels  # noqa: E402
from tonnage.virtual.cuda.patches import Patches  # noqa: E402

SIZE = 2 * 16 * 16 * 4


@pytest.fixture
def whole() -> Iterator[WholeModels]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found, patches = WholeModels(0, 1), Patches()
    found.watch(patches)
    yield found
    patches.undo()
    dist.destroy_process_group()


def a_model() -> "torch.nn.Module":
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(2)))


def test_each_engine_is_seen(whole: WholeModels) -> None:
    torch.nn.parallel.DistributedDataParallel(a_model())
    assert whole.largest == WholeModel("DDP", SIZE, 1)


def test_fully_shard_gets_its_model_piece_by_piece(whole: WholeModels) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (1,))
    model = a_model()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    assert whole.largest == WholeModel("fully_shard", SIZE, 1)


def test_deepspeed_is_known_by_its_engine_and_what_it_split_is_no_whole(whole: WholeModels) -> None:
    class DeepSpeedEngine(torch.nn.Module):
        def __init__(self, model: "torch.nn.Module") -> None:
            super().__init__()
            self.module = model

    split = a_model()
    for parameter in split.parameters():
        parameter.ds_id = 1
    DeepSpeedEngine(split)
    assert not whole.largest.size_bytes
    DeepSpeedEngine(a_model())
    assert whole.largest == WholeModel("DeepSpeed", SIZE, 1)


def test_copies_are_those_of_its_own_host() -> None:
    found = WholeModels(9, 8)
    found._see("DDP", 1, range(16))
    assert found.largest.copies == 8
    found._see("DDP", 2, range(1, 16, 4))  # one stage of a pipeline of four
    assert found.largest.copies == 2
