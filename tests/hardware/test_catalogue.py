import pytest

from tonnage.errors import UnknownGpu
from tonnage.hardware import all_gpus, find_gpu


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        ("h100", "h100"),
        ("H100", "h100"),
        ("h100-80GB", "h100"),
        ("a100-80", "a100-80"),
        ("a100 80gb", "a100-80"),
        ("a100-40", "a100-40"),
        ("rtx-4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA H200", "h200"),
        ("l40s", "l40s"),
        ("L4", "l4"),
        ("t4", "t4"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("a6000", "rtx-a6000"),
        ("6000 Ada", "rtx-6000-ada"),
        ("b200", "b200"),
        ("gh200", "gh200"),
    ],
)
def test_cards_answer_to_their_obvious_names(asked: str, key: str) -> None:
    assert find_gpu(asked).key == key


@pytest.mark.parametrize("card", all_gpus(), ids=lambda card: card.key)
def test_every_card_answers_to_all_its_names(card) -> None:
    assert all(find_gpu(name) is card for name in (card.key, card.name, *card.aliases, card.name.upper()))


@pytest.mark.parametrize("card", all_gpus(), ids=lambda card: card.key)
def test_every_card_is_plausible(card) -> None:
    assert 14 * 2**30 < card.memory_bytes < 200 * 2**30
    assert card.memory_source.split()[0] in {"measured", "known", "derived"}
    # A double data rate interface cannot move more than bus width times twice its clock.
    ceiling = card.memory_bus_bits / 8 * 2 * card.memory_clock_mhz * 1e6
    assert card.bandwidth_bytes_per_s < 1.05 * ceiling
    assert card.shared_memory_per_block_bytes <= card.shared_memory_per_block_optin_bytes
    assert card.shared_memory_per_block_optin_bytes <= card.shared_memory_per_sm_bytes
    assert card.rates["fp16"] >= card.rates["fp32"]
    assert set(card.overheads) >= {"context", "cublas", "cudnn"}
    assert all(overhead.size_bytes >= 0 and overhead.source for overhead in card.overheads.values())


def test_the_measured_card_has_the_measured_memory() -> None:
    assert find_gpu("h200").memory_bytes == 150_109_880_320
    assert find_gpu("h200").compute_capability == (9, 0)


def test_an_unknown_card_names_close_ones() -> None:
    with pytest.raises(UnknownGpu) as caught:
        find_gpu("h300")
    assert "'h300'" in str(caught.value)
    assert "h200" in caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("asked", ["", "quantum"])
def test_a_card_like_none_lists_all(asked: str) -> None:
    with pytest.raises(UnknownGpu) as caught:
        find_gpu(asked)
    assert all(card.key in caught.value.hint for card in all_gpus())
