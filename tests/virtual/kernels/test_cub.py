"""CUB's temporary storage as measured on an H200 with torch 2.11 (CUDA 13.0)."""

import pytest

from tonnage.hardware import find_gpu
from tonnage.virtual.kernels import cub


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cub, "_gpu", lambda: find_gpu("h200"))


@pytest.mark.parametrize(
    ("count", "key", "value", "bits", "expected"),
    [
        (2000, 4, 8, None, 1),
        (5000, 4, 8, None, 70_143),
        (1_000_003, 4, 8, None, 12_200_703),
        (5000, 2, 8, None, 56_063),
        (262_208, 8, 0, 6, 49_663),
        (100_000, 8, 8, None, 1_639_423),
        (100_000, 8, 8, 35, 1_633_279),
        (5000, 4, 4, None, 50_175),
        (1_000_003, 4, 0, None, 4_150_271),
    ],
)
def test_radix_sort(count: int, key: int, value: int, bits: int | None, expected: int) -> None:
    assert cub.radix_sort_bytes(count, key, value, bits) == expected


def test_float_keys_alone_have_smaller_tiles() -> None:
    assert cub.radix_sort_bytes(1_000_003, 4, floating=True) == 4_157_439


@pytest.mark.parametrize(("count", "expected"), [(4096, 1), (5000, 21_503), (16_777_216, 21_503)])
def test_reduce(count: int, expected: int) -> None:
    assert cub.reduce_bytes(count, 4) == expected


@pytest.mark.parametrize(("count", "expected"), [(7, 1023), (1_000_003, 2815), (16_777_216, 32_767)])
def test_select_flagged(count: int, expected: int) -> None:
    assert cub.select_flagged_bytes(count, 8) == expected


def test_scans() -> None:
    assert cub.scan_bytes(1_000_003, 4) == 5119
    assert cub.scan_bytes(1_000_003, 4, plus=True) == 3583
    assert cub.scan_bytes(1_000_003, 2, primitive=False) == 3327
    assert cub.scan_bytes(1_000_003, 8) == 18_943


def test_runs_and_uniques() -> None:
    assert cub.run_length_bytes(1_000_003) == 21_759
    assert cub.select_unique_bytes(1_000_003, 4) == 2047
    assert cub.unique_by_key_bytes(65_536, 8) == 1279


@pytest.mark.parametrize("name", ["a100-80", "rtx-4090", "l4", "h100"])
def test_other_cards_sort_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cub, "_gpu", lambda: find_gpu(name))
    for key in (2, 4, 8):
        assert cub.radix_sort_bytes(100_000, key, 8) > 100_000 * (key + 8)
