from pathlib import Path

import pytest

from tonnage.hardware.tables import DataTables, close_keys, plain

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
