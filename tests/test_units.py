import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import BadSize
from tonnage.units import format_bytes, parse_bytes, unit_for


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("80GB", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("80 gib", 80 * 2**30),
        ("512 MiB", 2**29),
        ("0.5GiB", 2**29),
        (" 1.5 TiB ", 3 * 2**39),
        ("80e9", 80 * 10**9),
        ("4096", 4096),
        ("4096 B", 4096),
        ("3 KB", 3000),
    ],
)
def test_sizes_are_read(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GB", "80G", "80 GBB", "-1 GB", "1,5 GB", "eighty GB", "1 2 GB"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadSize) as caught:
        parse_bytes(text)
    assert "80GiB" in caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("size_bytes", "words"),
    [
        (0, "0 B"),
        (511, "511 B"),
        (2**10, "1.00 KiB"),
        (99_224_453_120, "92.41 GiB"),
        (2**40, "1.00 TiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_people_read_binary_units(size_bytes: int, words: str) -> None:
    assert format_bytes(size_bytes) == words


def test_a_column_keeps_one_unit() -> None:
    assert format_bytes(2**20, "GiB") == "0.00 GiB"
    assert format_bytes(2**30, "MiB") == "1024.00 MiB"


@given(st.integers(min_value=0, max_value=2**50))
def test_what_is_written_reads_back_within_its_rounding(size_bytes: int) -> None:
    unit = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit_for(size_bytes)]
    assert abs(parse_bytes(format_bytes(size_bytes)) - size_bytes) <= 0.005 * unit + 1


@given(st.integers(min_value=0, max_value=2**62))
def test_whole_bytes_are_read_exactly(size_bytes: int) -> None:
    assert parse_bytes(str(size_bytes)) == size_bytes
