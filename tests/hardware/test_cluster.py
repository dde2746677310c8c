import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import BadGpu, UnknownGpu
from tonnage.hardware import all_gpus, all_hosts, find_cluster, find_gpu
from tonnage.hardware.catalogue import gpu_tables
from tonnage.hardware.cluster import homes_of, host_tables
from tonnage.units import GIB, TIB

HOSTS = [host for host in all_hosts() if host.gpu]


@pytest.mark.parametrize(
    ("asked", "key", "hosts", "gpus_per_host", "host"),
    [
        ("h200", "h200", 1, 1, "hgx-h200"),
        ("8xh200", "h200", 1, 8, "hgx-h200"),
        ("8 x H200", "h200", 1, 8, "hgx-h200"),
        ("8×h200", "h200", 1, 8, "hgx-h200"),
        ("2x8xh100", "h100", 2, 8, "hgx-h100"),
        ("2x6xh100", "h100", 2, 6, "hgx-h100"),
        ("1024xh100", "h100", 128, 8, "hgx-h100"),
        ("dgx-h100", "h100", 1, 8, "hgx-h100"),
        ("4xdgx-h100", "h100", 4, 8, "hgx-h100"),
        ("p5.48xlarge", "h100", 1, 8, "p5.48xlarge"),
        ("2xp5.48xlarge", "h100", 2, 8, "p5.48xlarge"),
        ("g5.12xlarge", "a10g", 1, 4, "g5.12xlarge"),
        ("a3-megagpu-8g", "h100", 1, 8, "a3-megagpu-8g"),
        ("Standard_ND96isr_H100_v5", "h100", 1, 8, "Standard_ND96isr_H100_v5"),
        ("gb200-nvl72", "gb200", 1, 72, "gb200-nvl72"),
        ("144xgb200", "gb200", 2, 72, "gb200-nvl72"),
        ("4090", "rtx-4090", 1, 1, "workstation"),
        ("4xrtx-4090", "rtx-4090", 1, 4, "server-4"),
        ("8xl40s", "l40s", 1, 8, "server-8"),
        ("16xl40s", "l40s", 2, 8, "server-8"),
        ("4xgh200", "gh200", 4, 1, "gh200-node"),
        ("8xmi300x", "mi300x", 1, 8, "mi300x-8"),
    ],
)
def test_words_for_clusters(asked: str, key: str, hosts: int, gpus_per_host: int, host: str) -> None:
    found = find_cluster(asked)
    assert (found.gpu, found.hosts, found.gpus_per_host) == (find_gpu(key), hosts, gpus_per_host)
    assert found.host.key == host
    assert found.gpus == hosts * gpus_per_host


@pytest.mark.parametrize(
    ("asked", "said", "hint"),
    [
        ("h300", "no GPU or host called 'h300'", "h200"),
        ("8xh300", "no GPU or host called 'h300'", "h200"),
        ("p5.49xlarge", "no GPU or host", "p5.48xlarge"),
        ("0xh100", "asks for 0 GPUs", "1 to"),
        ("99999999999xh100", "asks for 99,999,999,999 GPUs", "1 to"),
        ("12xh100", "does not fill hosts of 8", "16xh100, or 2x6xh100"),
        ("13xh100", "does not fill hosts of 8", "16xh100, or 13x1xh100"),
        ("2x16xh100", "puts 16 cards into one host", "32xh100"),
        ("2x8xdgx-h100", "counts the cards of a host", "Write 2xhgx-h100"),
        ("server-8", "can hold any card", "Name the card"),
        ("2x2x2xh100", "does not name GPUs", "8xh200"),
        ("", "does not name GPUs", "8xh200"),
        ("8x", "no GPU or host", "8xh200"),
        ("quantum", "no GPU or host", "tonnage gpu"),
        ("-8xh100", "no GPU or host", "h100"),
    ],
)
def test_a_wrong_request_is_told_what_to_write(asked: str, said: str, hint: str) -> None:
    with pytest.raises(UnknownGpu) as caught:
        find_cluster(asked)
    assert said in str(caught.value)
    assert hint in caught.value.hint


def test_what_a_dgx_has() -> None:
    found = find_cluster("2xdgx-h100")
    assert found.host_memory_bytes == 2 * TIB
    assert found.host_memory_per_gpu_bytes == 256 * GIB
    assert found.peer_bytes_per_s == 450e9
    assert found.network_bytes_per_s == 50e9  # 400 Gb/s for each card
    assert found.host_link_bytes_per_s == 64e9
    assert found.words == "16 × h100 in 2 hosts (HGX H100)"


def test_a_part_of_a_host_has_a_part_of_its_memory() -> None:
    assert find_cluster("2xh100").host_memory_bytes == find_cluster("8xh100").host_memory_bytes // 4


def test_the_slower_end_decides() -> None:
    assert find_cluster("p5.48xlarge").host_link_bytes_per_s == 32e9  # a PCIe 4 host
    assert find_cluster("8xa100").host_link_bytes_per_s == 32e9  # a PCIe 4 card
    assert find_cluster("gh200").host_link_bytes_per_s == 450e9  # chip to chip
    assert find_cluster("8xrtx-4090").peer_bytes_per_s == 32e9  # no link but PCIe


def test_bridges_join_pairs() -> None:
    bridged = find_cluster("8xh100-nvl")
    assert [bridged.link_bytes_per_s(n) for n in (2, 4, 8)] == [300e9, 64e9, 64e9]
    assert bridged.peer_bytes_per_s == 64e9


def test_a_rack_is_one_domain() -> None:
    rack = find_cluster("2xgb200-nvl72")
    assert [rack.link_bytes_per_s(n) for n in (8, 72, 73)] == [900e9, 900e9, 50e9]


CLUSTERS = st.one_of(
    st.sampled_from([host.key for host in all_hosts() if host.gpu]),
    st.builds(
        "{}x{}x{}".format,
        st.integers(1, 64),
        st.integers(1, 8),
        st.sampled_from(["h100", "b200", "l40s", "rtx-4090", "h100-nvl", "mi300x", "v100-32"]),
    ),
)


@given(CLUSTERS, st.lists(st.integers(1, 2000), min_size=1))
def test_larger_groups_are_never_faster_and_arrays_answer_as_numbers_do(asked: str, sizes: list[int]) -> None:
    cluster = find_cluster(asked)
    sizes = sorted(sizes)
    speeds = [cluster.link_bytes_per_s(size) for size in sizes]
    assert speeds == sorted(speeds, reverse=True)
    assert all(speed > 0 for speed in speeds)
    assert cluster.link_bytes_per_s(np.array(sizes)).tolist() == speeds
    assert cluster.link_bytes_per_s(cluster.gpus_per_host) == cluster.peer_bytes_per_s


@given(st.text(max_size=30))
def test_no_text_breaks_it(asked: str) -> None:
    try:
        assert find_cluster(asked).gpus >= 1
    except (UnknownGpu, BadGpu) as error:  # a name may end like a file's
        assert error.hint


def test_every_card_has_a_home() -> None:
    for card in all_gpus():
        assert find_cluster(card.key).gpu is card


def test_a_card_alone_in_a_workstation_has_all_of_it() -> None:
    alone, pair = find_cluster("rtx-4090"), find_cluster("2xrtx-4090")
    assert alone.host_memory_per_gpu_bytes == 2 * pair.host_memory_per_gpu_bytes == alone.host.memory_bytes
    assert alone.nvme_bytes_per_s == 2 * pair.nvme_bytes_per_s
    assert find_cluster("h100").host_memory_per_gpu_bytes == find_cluster("8xh100").host_memory_per_gpu_bytes


def test_a_host_can_have_other_memory_and_drives() -> None:
    cluster = find_cluster("4xh100")
    more = cluster.with_host(memory_bytes=400)
    assert more.host_memory_per_gpu_bytes == 100
    assert more.nvme_bytes_per_s == cluster.nvme_bytes_per_s
    assert cluster.with_host(nvme_bytes_per_s=8e9).nvme_bytes_per_s == 2e9


def test_a_part_of_a_host_has_a_part_of_its_bandwidth() -> None:
    assert (
        find_cluster("8xh100").host_memory_bytes_per_s == 8 * find_cluster("h100").host_memory_bytes_per_s == 6.144e11
    )
    assert find_cluster("rtx-4090").host_memory_bytes_per_s == 8.96e10
    assert all(host.memory_bytes_per_s > 0 for host in all_hosts())


@pytest.mark.parametrize("host", all_hosts(), ids=lambda host: host.key)
def test_every_host_is_plausible(host) -> None:
    assert 1 <= host.gpus <= 72
    assert host.link_gpus in {0, *range(2, host.gpus + 1)}
    assert 1e8 < host.network_bytes_per_s < 2e11
    assert host.pcie_bytes_per_s in {1.6e10, 3.2e10, 3.6e10, 6.4e10}


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.key)
def test_every_host_s_card_exists_and_can_be_linked(host) -> None:
    card = find_gpu(host.gpu)
    assert card.key == host.gpu
    assert not host.link_gpus or card.nvlink_bytes_per_s


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.key)
def test_every_host_has_more_than_a_gigabyte_for_a_card_or_shares_it(host) -> None:
    assert host.memory_bytes // host.gpus > 2**30 or host.gpu == "mi300a" or host.link == "unified memory"


def test_no_host_is_called_as_a_card_is() -> None:
    assert not set(host_tables().keys_by_name) & set(gpu_tables().keys_by_name)


@pytest.mark.parametrize("card", all_gpus(), ids=lambda card: card.key)
def test_homes_hold_their_cards_the_smallest_first(card) -> None:
    homes = homes_of(card)
    assert [home.gpus for home in homes] == sorted(home.gpus for home in homes)
    assert all(home.gpu in {"", card.key} for home in homes)
