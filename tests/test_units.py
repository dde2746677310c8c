import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import BadSize
from tonnage.units import (
    GIB,
    budget_bytes,
    format_bytes,
    is_size,
    parse_bytes,
    parse_count,
    parse_gib,
    percent,
    unit_for,
)


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


@pytest.mark.parametrize(
    "text", ["", "GB", "80G", "80 GBB", "-1 GB", "1,5 GB", "eighty GB", "1 2 GB", "1e400", "1e308 TiB"]
)
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


@pytest.mark.parametrize(
    ("budget", "size_bytes"),
    [
        ("40 GiB", 40 * GIB),
        (40 * GIB, 40 * GIB),
        (40e9, 40 * 10**9),
        (1.5, 1),
        (np.float32(4096.0), 4096),
        (np.float64(40e9), 40 * 10**9),
        (np.int64(2**62 + 1), 2**62 + 1),
        ("80%", 80 * GIB),
        (" 12.5 % ", 25 * GIB // 2),
        ("100%", 100 * GIB),
    ],
)
def test_a_budget_is_a_size_a_number_or_a_share_of_what_is_free(budget: str | float, size_bytes: int) -> None:
    found = budget_bytes(budget, 100 * GIB)
    assert found == size_bytes
    assert type(found) is int


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("eighty", "'eighty' is not a size in bytes"),
        ("-80%", "'-80%' is not a size in bytes"),
        ("120%", "budget is 120%, which is more than all that is free"),
        ("0%", "budget is 0%; it must be a finite number of bytes, 1 or more"),
        ("0 GiB", "budget is 0 GiB; it must be"),
        (-5, "budget is -5; it must be"),
        (0, "budget is 0; it must be"),
        (0.8, "budget is 0.8; it must be"),
        (math.nan, "budget is nan; it must be a finite number"),
        (math.inf, "budget is inf; it must be a finite number"),
        (np.float32("nan"), "budget is nan; it must be a finite number"),
        (True, "budget is True, which is neither a size nor a number of bytes"),
        (np.True_, "neither a size nor a number of bytes"),
        ([40], r"budget is \[40\], which is neither a size nor a number of bytes"),
        (2j, "neither a size nor a number of bytes"),
    ],
)
def test_what_is_no_budget_is_refused(budget: str | float, words: str) -> None:
    with pytest.raises(BadSize, match=words) as caught:
        budget_bytes(budget, 100 * GIB)
    assert "GiB" in caught.value.hint


def test_none_of_the_host_s_memory_is_a_budget_too() -> None:
    assert budget_bytes(0, GIB, name="host", least_bytes=0) == 0
    with pytest.raises(BadSize, match="host is -1; it must be a finite number of bytes, 0 or more"):
        budget_bytes(-1, GIB, name="host", least_bytes=0)


@pytest.mark.parametrize("text", ["", "k", "-1", "1e3", "nan", "9" * 400])
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(BadSize, match="not a number of tokens"):
        parse_count(text)
    assert parse_count("32k") == 32_768


def test_a_share_in_percent_has_a_space() -> None:
    assert (percent(0.415), percent(0.0041, 2), percent(1, 0)) == ("41.5 %", "0.41 %", "100 %")


def test_what_is_a_size_and_what_is_a_model() -> None:
    assert is_size("6GiB") and is_size("512 mib")
    assert not is_size("qwen3-8b") and not is_size("bge-m3 --users 4")


def test_memory_is_sold_in_gib() -> None:
    assert parse_gib("64g") == parse_gib("64GB") == parse_gib("64GiB") == 64 * GIB
