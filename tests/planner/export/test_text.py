"""What is written reads back as it was, with the readers that launchers use."""

import json
import tomllib
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from tonnage.planner.export.text import to_json, to_toml, to_yaml

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True).filter(
    lambda name: name not in {"y", "n", "on", "off", "yes", "no", "true", "false", "null"}
)
NUMBERS = st.integers(-(2**62), 2**62) | st.decimals(-1000, 1000, places=8).map(float)
WORDS = st.text(st.characters(codec="ascii"), max_size=20)
VALUES = st.booleans() | NUMBERS | WORDS | st.lists(WORDS, max_size=3)
SETTINGS = st.recursive(
    st.dictionaries(NAMES, VALUES, max_size=4),
    lambda inner: st.dictionaries(NAMES, VALUES | inner, max_size=4),
    max_leaves=8,
)


@given(SETTINGS)
def test_all_formats_keep_everything(settings: dict[str, Any]) -> None:
    assert json.loads(to_json(settings)) == settings
    assert (yaml.safe_load(to_yaml(settings)) or {}) == settings
    assert without_empty(tomllib.loads(to_toml(settings))) == without_empty(settings)


def without_empty(settings: dict[str, Any]) -> dict[str, Any]:
    """TOML leaves out a table that holds nothing."""
    inner = {key: without_empty(value) if isinstance(value, dict) else value for key, value in settings.items()}
    return {key: value for key, value in inner.items() if value != {}}


def test_a_small_fraction_stays_a_number() -> None:
    assert yaml.safe_load(to_yaml({"eps": 1e-8})) == {"eps": 1e-8}
