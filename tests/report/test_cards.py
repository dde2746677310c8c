from io import StringIO

import pytest

from tonnage.hardware import all_gpus, all_hosts, find_cluster
from tonnage.report.cards import print_cards, print_catalogue, print_hosts
from tonnage.report.lines import cut


def shown(*asked: str) -> list[str]:
    stream = StringIO()
    print_cards([find_cluster(name) for name in asked], stream=stream)
    return stream.getvalue().splitlines()


def row(lines: list[str], label: str) -> list[str]:
    return next(line for line in lines if line.startswith(f"  {label} ")).split()


def test_levels_stand_side_by_side() -> None:
    lines = shown("h200", "rtx-4090")
    assert row(lines, "memory") == "memory 139.8 GiB 4.80 TB/s 500 ns 206 23.6 GiB 1.01 TB/s 500 ns 164".split()
    assert row(lines, "host")[1:9] == "256.0 GiB 64.0 GB/s 1 µs 15459 128.0".split()
    assert row(lines, "bf16") == "bf16 989 206 165 164".split()
    assert row(lines, "fp64") == "fp64 33.5 6.98 –".split()


def test_what_one_card_lacks_is_a_dash() -> None:
    lines = shown("mi300x", "gh200")
    assert row(lines, "L3") == "L3 256.0 MiB 17.2 TB/s 300 ns 76.0 –".split()
    assert row(lines, "peers")[-1] == "–"
    assert "no longer limits bf16." in "\n".join(lines)
    assert "limits bf16/fp16." in "\n".join(shown("h100", "v100-16"))


def test_three_cards_are_shown_two_and_one() -> None:
    lines = shown("h100", "l4", "t4")
    assert sum(line.startswith("  level") for line in lines) == 2


@pytest.mark.parametrize("card", all_gpus(), ids=lambda card: card.key)
def test_every_card_fits_80_columns(card) -> None:
    assert max(map(len, shown(card.key, card.key))) <= 80


@pytest.mark.parametrize("host", [host for host in all_hosts() if host.gpu], ids=lambda host: host.key)
def test_every_host_fits_80_columns(host) -> None:
    lines = shown(host.key)
    assert max(map(len, lines)) <= 80
    assert f"in {cut(host.name, 30)}" in "\n".join(lines)


def test_lists_are_aligned_and_fit_80_columns() -> None:
    for print_list, things in ((print_catalogue, all_gpus()), (print_hosts, all_hosts())):
        stream = StringIO()
        print_list(things, stream=stream)
        lines = stream.getvalue().splitlines()
        assert max(map(len, lines)) <= 80
        rows = [line for line in lines if len(line) > 70 and line.startswith("   ")]
        assert len({len(line) for line in rows}) <= 1
