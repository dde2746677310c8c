import pytest

from tonnage.hardware import all_gpus, find_cluster, find_gpu
from tonnage.hardware.hierarchy import LATENCIES_NS, levels_of, pcie_name, reference_precision
from tonnage.units import GIB, KIB


def levels(asked: str):
    return {level.name: level for level in levels_of(find_cluster(asked))}


def test_the_levels_of_an_h200() -> None:
    found = levels("h200")
    assert list(found) == ["registers", "shared", "L2", "memory", "peers", "host", "network", "NVMe"]
    assert found["registers"].capacity_bytes == 132 * 256 * KIB
    assert found["registers"].bytes_per_s == pytest.approx(132 * 128 * 12 * 1.98e9)
    assert found["shared"].bytes_per_s == pytest.approx(132 * 128 * 1.98e9)
    assert found["memory"].bytes_per_s == 4.8e12
    assert found["peers"].capacity_bytes == 7 * 150_109_880_320
    assert found["host"].capacity_bytes == 256 * GIB
    assert found["host"].what == "PCIe 5"


def test_the_ridge_of_an_h200_is_at_206_operations_a_byte() -> None:
    assert levels("h200")["memory"].intensity(989.4e12) == pytest.approx(206.1, abs=0.1)


def test_a_level_of_unknown_speed_has_no_intensity() -> None:
    assert levels("b200")["L2"].intensity(1e15) is None


def test_what_a_card_lacks_is_absent() -> None:
    assert "peers" not in levels("gh200")
    assert "host" not in levels("mi300a")  # one memory for both
    assert "NVMe" not in levels("p5.48xlarge")  # drives, but nobody states how fast
    assert "L3" in levels("mi300x") and "L3" not in levels("h100")


def test_hosts_are_reached_by_the_better_link() -> None:
    assert levels("gh200")["host"].what == "chip to chip"
    assert levels("gh200")["host"].bytes_per_s == 7 * levels("h100")["host"].bytes_per_s + 2e9
    assert levels("p5.48xlarge")["host"].what == "PCIe 4"
    assert pcie_name(find_cluster("dgx-b300")) == "PCIe 5"  # the card has 6


@pytest.mark.parametrize("card", all_gpus(), ids=lambda card: card.key)
def test_farther_levels_are_slower(card) -> None:
    found = [level for level in levels_of(find_cluster(card.key)) if level.bytes_per_s]
    near = [level.bytes_per_s for level in found if level.name in ("registers", "shared", "L2", "L3", "memory")]
    assert near == sorted(near, reverse=True)
    assert all(level.bytes_per_s < near[-1] for level in found[len(near) :])
    latencies = [level.latency_ns for level in found]
    assert latencies == sorted(latencies)
    assert {level.name for level in found} <= set(LATENCIES_NS)


def test_published_microbenchmarks_of_l2_are_met() -> None:
    # TB/s as published; the model has one figure for each architecture and the boost clock.
    for asked, published in {"v100-16": 2.155, "t4": 1.27, "h100": 6.65, "a100": 4.96, "p100": 1.624}.items():
        assert levels(asked)["L2"].bytes_per_s / 1e12 == pytest.approx(published, rel=0.05)


@pytest.mark.parametrize(("asked", "precision"), [("h100", "bf16"), ("v100-32", "fp16"), ("p100", "fp16")])
def test_models_are_computed_in_what_the_card_has(asked: str, precision: str) -> None:
    assert reference_precision(find_gpu(asked)) == precision
