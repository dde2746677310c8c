"""MIG instances, and Apple's chips with less memory than the most."""

from pathlib import Path

import pytest

from tonnage.errors import UnknownGpu
from tonnage.hardware import find_cluster, find_gpu, parts
from tonnage.hardware.catalogue import DataTables
from tonnage.hardware.parts import part_of
from tonnage.units import GIB

TABLES = DataTables.read(Path(parts.__file__).parent / "data" / "mig.toml")
PROFILES = [(card, name) for card, table in TABLES.table("cards").items() for name in TABLES.table(table)]


@pytest.mark.parametrize(
    ("asked", "sms", "gib", "share"),
    [
        ("a100-40:1g.5gb", 14, 4.75, 1 / 8),
        ("a100-80:3g.40gb", 42, 39.6, 1 / 2),
        ("h100:3g.40gb", 60, 39.5, 1 / 2),
        ("H200:1g.18GB", 16, 16.0, 1 / 8),
    ],
)
def test_an_instance_has_its_sms_memory_and_bandwidth(asked: str, sms: int, gib: float, share: float) -> None:
    part, card = find_gpu(asked), find_gpu(asked.partition(":")[0])
    assert part.sm_count == sms
    assert part.memory_bytes / GIB == pytest.approx(gib, abs=0.1)
    assert part.bandwidth_bytes_per_s == card.bandwidth_bytes_per_s * share
    assert part.rates["bf16"] == pytest.approx(card.rates["bf16"] * sms / card.sm_count)
    assert not part.nvlink_bytes_per_s
    assert find_gpu(part.key) is part


@pytest.mark.parametrize(("card", "profile"), PROFILES)
def test_every_instance_is_a_part_of_its_card(card: str, profile: str) -> None:
    whole = find_gpu(card)
    part = part_of(whole, profile)
    stated = float(profile.partition(".")[2].removesuffix("gb")) * 1e9
    assert part.sm_count <= whole.sm_count
    assert part.memory_bytes <= whole.memory_bytes
    assert part.memory_bytes == pytest.approx(stated, rel=0.11)


def test_a_cluster_of_instances() -> None:
    cluster = find_cluster("2xh100:3g.40gb")
    assert (cluster.gpus, cluster.gpu.key) == (2, "h100:3g.40gb")


def test_what_metal_gives_a_process() -> None:
    assert find_gpu("m4-max").memory_bytes == 96 * GIB
    assert find_gpu("m4-max:64gb").memory_bytes == 48 * GIB
    assert find_gpu("m1-max:32").memory_bytes == pytest.approx(64 / 3 * GIB)


@pytest.mark.parametrize(
    ("asked", "said"), [("h200:9g", "h200:1g.18gb"), ("rtx-4090:1g.5gb", "rtx-4090"), ("m4-max:256gb", "8 to 128")]
)
def test_what_there_is_not(asked: str, said: str) -> None:
    with pytest.raises(UnknownGpu) as caught:
        find_cluster(asked)
    assert said in caught.value.hint
