import pytest

from tonnage.hardware import all_gpus, all_hosts, find_gpu
from tonnage.hardware.catalogue import gpu_tables
from tonnage.hardware.host import homes_of, host_tables

HOSTS = [host for host in all_hosts() if host.gpu]


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
