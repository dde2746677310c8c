from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fit.cases import CASES, build_training
from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques.allocator import SetAllocator, with_setting
from tonnage.fit.training import Training
from tonnage.units import GIB
from tonnage.virtual import virtual_gpu


@pytest.fixture
def training() -> Iterator[Training]:
    """On a virtual H200; nothing is run there."""
    made = build_training(CASES["dropout"])
    with virtual_gpu("h200", torch="2.11"):
        made.device = torch.device("cuda:0")
        yield made


def _text() -> str:
    return torch._C._accelerator_getAllocatorSettings()


def test_segments_are_expandable_until_undone(training: Training) -> None:
    undo = SetAllocator().apply(training)
    assert _text() == "expandable_segments:True"
    first = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_snapshot()[0]["is_expandable"]
    del first
    undo()
    assert torch.cuda.memory_reserved() == 0
    assert _text() == "expandable_segments:False"
    second = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    assert not torch.cuda.memory_snapshot()[0]["is_expandable"]
    del second


def test_other_settings_stay(training: Training) -> None:
    before = "garbage_collection_threshold:0.8,roundup_power2_divisions:[256:1,512:2,>:4]"
    torch._C._accelerator_setAllocatorSettings(before)
    undo = SetAllocator().apply(training)
    assert _text() == f"{before},expandable_segments:True"
    undo()
    assert _text() == f"{before},expandable_segments:False"


def test_the_limit_holds_and_goes(training: Training) -> None:
    undo = SetAllocator(limit_bytes=8 * GIB).apply(training)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(9 * GIB, dtype=torch.uint8, device="cuda")
    undo()
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    assert torch.empty(9 * GIB, dtype=torch.uint8, device="cuda").numel() == 9 * GIB


def test_a_limit_beyond_the_card_is_refused_and_nothing_changes(training: Training) -> None:
    with pytest.raises(NotApplicable, match=r"limit of 200.00 GiB .* has 139"):
        SetAllocator(limit_bytes=200 * GIB).apply(training)
    assert _text() == ""


def test_the_cpu_has_no_such_allocator() -> None:
    with pytest.raises(NotApplicable, match="Tensors on cpu"):
        SetAllocator().apply(build_training(CASES["dropout"]))


@given(st.dictionaries(st.sampled_from(["max_split_size_mb", "expandable_segments", "backend"]), st.integers(1, 9)))
def test_one_setting_changes_and_the_others_stay(settings: dict[str, int]) -> None:
    text = with_setting(",".join(f"{name}:{value}" for name, value in settings.items()), "expandable_segments", "True")
    found = dict(item.split(":") for item in text.split(","))
    assert found == {name: str(value) for name, value in settings.items()} | {"expandable_segments": "True"}
