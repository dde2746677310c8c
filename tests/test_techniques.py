"""The table of techniques is complete: whoever reads a row finds what it asks for."""

import pytest

from tonnage.techniques import asked_by_flag, change_of, techniques

VALUES = dict.fromkeys(("dtype", "count", "rank"), "7")


@pytest.mark.parametrize("name", techniques())
def test_a_row_says_what_its_readers_ask_for(name: str) -> None:
    row = techniques()[name]
    if "costs" in row:
        change, costs = change_of(name, **VALUES)
        assert change and costs and "{" not in change
    if "flag" in row:
        change, flag, _ = asked_by_flag(name, **VALUES)
        assert change and flag.startswith("--") and "{" not in flag
    assert "title" in row or "change" in row
    assert ("class" in row or name == "shard") == ("title" in row)
