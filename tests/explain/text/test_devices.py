import pytest

from tonnage.explain.text import TextDiagnosis, explain_text
from tonnage.explain.text.devices import unified_device
from tonnage.units import GIB


def message(total: str, free: str, process: str, asked: str = "2.00 GiB") -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total "
        f"capacity of {total} of which {free} is free. Including non-PyTorch memory, this process "
        f"has {process} memory in use. Of the allocated memory {process} is allocated by PyTorch, "
        "and 900.00 MiB is reserved by PyTorch but unallocated."
    )


def explained(text: str, above: str = "") -> TextDiagnosis:
    return explain_text([above, text])


@pytest.mark.parametrize("total", [119.18, 119.61, 119.70, 121.63, 121.69])
def test_a_gb10_is_known_by_its_capacity(total: float) -> None:
    assert "GB10" in unified_device("", int(total * GIB))


@pytest.mark.parametrize("total", [23.64, 79.14, 94.97, 139.8, 178.36])
def test_cards_with_memory_of_their_own_are_none(total: float) -> None:
    assert unified_device("NVIDIA H100", int(total * GIB)) == ""
    assert unified_device("", None) == ""


@pytest.mark.parametrize("words", ["NVIDIA GB10", "on my DGX Spark", "Jetson AGX Orin", "gfx1151"])
def test_devices_are_known_by_name(words: str) -> None:
    assert unified_device(words, None)


def test_what_the_host_holds_is_the_cause_on_a_gb10_and_not_a_page_file() -> None:
    found = explained(message("119.70 GiB", "9.45 GiB", "48.01 GiB"))
    assert (found.first.cause, found.first.certainty) == ("unified-memory", "likely")
    assert "62.2" in found.first.sentence and "GPU and host share one memory" in found.first.sentence
    assert any("drop_caches" in step for step in found.steps)
    said = " ".join([*found.steps, *(cause.sentence for cause in found.causes), *found.proves])
    assert "page file" not in said and "not the card's memory that was short" not in said


def test_a_full_gb10_is_capacity_first() -> None:
    found = explained(message("121.69 GiB", "2.09 GiB", "115.29 GiB"))
    assert found.first.cause == "capacity"
    assert {one.cause: one.certainty for one in found.causes}["unified-memory"] == "possible"


@pytest.mark.parametrize(
    ("path", "has_page_file"), [("/home/me/train.py", False), ("C:\\me\\train.py", True), ("train.py", True)]
)
def test_a_page_file_is_advised_only_where_it_may_be_windows(path: str, has_page_file: bool) -> None:
    trace = f'  File "{path}", line 3, in f'
    found = explained(message("23.64 GiB", "9.45 GiB", "12.01 GiB"), trace)
    assert found.first.cause == "refused"
    assert any("page file" in step for step in found.steps) == has_page_file
