import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tonnage.errors import UnknownGpu
from tonnage.hardware import all_gpus, catalogue, find_cluster, find_cuda_gpu, find_gpu
from tonnage.hardware.catalogue import DataTables, close_keys, part_of, plain
from tonnage.units import GIB

TEXT = """
# What this is.
[first]
name = "The First"
aliases = ["one", "uno"]
sizes = [1, 2]

["second.8x"]  # quoted
# [not a heading]
name = "Second"
"""


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
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("A100 80GB PCIe", "a100-80-pcie"),
        ("AMD Instinct MI300X", "mi300x"),
        ("mi250x", "mi250x"),
        ("RTX 4070 Ti SUPER", "rtx-4070-ti-super"),
        ("rtx pro 6000", "rtx-pro-6000"),
        ("TITAN RTX", "titan-rtx"),
        ("Tesla P100-PCIE-16GB", "p100"),
        ("RTX 2080 Ti", "rtx-2080-ti"),
        ("1080 ti", "gtx-1080-ti"),
        ("4060 Ti 16GB", "rtx-4060-ti"),
        ("4060 Ti 8GB", "rtx-4060-ti-8"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090-laptop"),
        ("RTX PRO 6000 Max-Q", "rtx-pro-6000-max-q"),
        ("NVIDIA GB10", "gb10"),
        ("Apple M4 Max", "m4-max"),
        ("m1", "m1"),
    ],
)
def test_cards_answer_to_their_obvious_names(asked: str, key: str) -> None:
    assert find_gpu(asked).key == key


@pytest.mark.parametrize("card", all_gpus(), ids=lambda card: card.key)
def test_every_card_answers_to_all_its_names(card) -> None:
    assert all(find_gpu(name) is card for name in (card.key, card.name, *card.aliases, card.name.upper()))


@pytest.mark.parametrize("card", all_gpus(), ids=lambda card: card.key)
def test_every_card_is_plausible(card) -> None:
    assert 5 * 2**30 < card.memory_bytes < 400 * 2**30
    assert card.memory_source.split()[0] in {"measured", "known", "derived"}
    # A double data rate interface cannot move more than bus width times twice its clock.
    ceiling = card.memory_bus_bits / 8 * 2 * card.memory_clock_mhz * 1e6
    assert 0.9 * ceiling < card.bandwidth_bytes_per_s < 1.05 * ceiling
    assert card.shared_memory_per_block_bytes <= card.shared_memory_per_block_optin_bytes
    assert card.shared_memory_per_block_optin_bytes <= card.shared_memory_per_sm_bytes
    assert set(card.overheads) >= {"context", "cublas", "cudnn"}
    assert all(overhead.size_bytes >= 0 and overhead.source for overhead in card.overheads.values())


@pytest.mark.parametrize("card", all_gpus(), ids=lambda card: card.key)
def test_rates_agree_with_each_other_and_with_the_lanes(card) -> None:
    # Every lane multiplies and adds once a clock; makers round, and count with a clock of their own.
    lanes = card.sm_count * card.fp32_lanes_per_sm * 2 * card.clock_mhz * 1e6
    assert card.rates["fp32"] == pytest.approx(lanes, rel=0.12)
    assert card.rates.get("fp16", card.rates["fp32"]) >= card.rates["fp32"]
    assert "bf16" not in card.rates or card.rates["bf16"] == card.rates["fp16"]
    halved = [card.rates[name] for name in ("tf32", "fp16", "fp8") if name in card.rates]
    for slower, faster in pairwise(halved):
        assert faster / slower == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize("card", all_gpus(), ids=lambda card: card.key)
def test_links_are_named_where_they_are(card) -> None:
    assert bool(card.link) == (card.nvlink_bytes_per_s > 0)
    if card.maker == "Apple":  # no PCIe: the memory is the CPU's
        return
    lanes = card.pcie_bytes_per_s / (2e9 * 2 ** (card.pcie_generation - 4))
    assert lanes in {8, 16}


def test_the_catalogue_holds_what_people_train_and_serve_on() -> None:
    keys = {card.key for card in all_gpus()}
    assert len(keys) >= 40
    assert keys >= set("b300 gb300 b200 gb200 h200 h200-nvl h100 h100-pcie h100-nvl h100-96 h20 h800 gh200".split())
    assert keys >= set("a100-80 a100-40 a10 a10g a30 a40 a16 a2 l4 l40 l40s v100-16 v100-32 p100 t4".split())
    assert keys >= set("rtx-3060 rtx-3080 rtx-3090 rtx-4080 rtx-4090 rtx-5080 rtx-5090 rtx-pro-6000 titan-rtx".split())
    assert keys >= set("rtx-2080-ti gtx-1080-ti gtx-1660 rtx-3060-ti rtx-3070 rtx-3080-12 rtx-3090-ti rtx-4060".split())
    assert keys >= set("rtx-4060-ti-8 rtx-4070 rtx-4070-super rtx-4070-ti rtx-4080-super rtx-5060-ti rtx-5070".split())
    assert keys >= set(
        "rtx-4090-laptop rtx-4080-laptop rtx-4070-laptop rtx-5090-laptop gb10 m1 m2 m3 m4 m4-max".split()
    )
    assert keys >= set("mi210 mi250x mi300x mi300a mi325x mi350x mi355x".split())


def test_amd_s_cards_are_told_apart() -> None:
    assert find_gpu("mi300x").warp_size == 64
    assert not find_gpu("mi300x").runs_cuda
    with pytest.raises(UnknownGpu, match="MI300X is AMD's"):
        find_cuda_gpu("mi300x")
    assert find_cuda_gpu("h200") is find_gpu("h200")


def test_one_card_is_read_without_the_others() -> None:
    code = "from tonnage.hardware import catalogue as c; c.find_gpu('h200'); print(c._card.cache_info().currsize)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "1\n"


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


@pytest.fixture
def tables(tmp_path: Path) -> DataTables:
    path = tmp_path / "things.toml"
    path.write_text(TEXT)
    return DataTables.read(path)


def test_a_file_is_cut_at_its_headings(tables: DataTables) -> None:
    assert list(tables.texts) == ["first", "second.8x"]
    assert tables.sources["first"] == "things"
    assert tables.table("first") == {"name": "The First", "aliases": ["one", "uno"], "sizes": [1, 2]}
    assert tables.table("second.8x") == {"name": "Second"}


def test_names_are_found_without_parsing(tables: DataTables) -> None:
    assert tables.keys_by_name == {
        "first": "first",
        "thefirst": "first",
        "one": "first",
        "uno": "first",
        "second8x": "second.8x",
        "second": "second.8x",
    }


def test_two_tables_of_one_name_are_our_mistake(tmp_path: Path) -> None:
    path = tmp_path / "twice.toml"
    path.write_text('[a]\nname = "x"\n[b]\nname = "X"\n')
    with pytest.raises(AssertionError, match="two tables answer to 'X'"):
        _ = DataTables.read(path).keys_by_name


@pytest.mark.parametrize(
    ("name", "kept"),
    [("NVIDIA A100-SXM4-80GB", "a100sxm480"), ("rtx 4090", "rtx4090"), ("AMD Instinct MI300X", "mi300x"), ("", "")],
)
def test_plain_names(name: str, kept: str) -> None:
    assert plain(name) == kept


def test_close_names_come_likest_first(tables: DataTables) -> None:
    assert close_keys("frist", tables) == ["first"]
    assert close_keys("zzz", tables) == []


TABLES = DataTables.read(Path(catalogue.__file__).parent / "data" / "mig.toml")
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
