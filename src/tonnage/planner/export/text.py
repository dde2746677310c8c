"""Settings as YAML, TOML and JSON: nested tables of plain values, which is all that launchers read.

The standard library writes neither YAML nor TOML, and forty lines do not justify a dependency. Strings are quoted as in
JSON, which both formats read.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Settings = Mapping[str, Any]


def to_json(settings: Settings) -> str:
    """Format as JSON with an indent of two."""
    return json.dumps(settings, indent=2) + "\n"


def to_yaml(settings: Settings) -> str:
    """Format as block YAML; an empty table stays on its line."""
    return "".join(f"{line}\n" for line in _yaml_lines(settings, ""))


def to_toml(settings: Settings) -> str:
    """Format as TOML with every table under its full name, values first."""
    return "\n".join(_toml_tables(settings, ())).lstrip("\n") + "\n"


def _yaml_lines(settings: Settings, indent: str) -> Iterator[str]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:"
            yield from _yaml_lines(value, indent + "  ")
        else:
            yield f"{indent}{key}: {_number(value) or json.dumps(value)}"


def _toml_tables(settings: Settings, path: tuple[str, ...]) -> Iterator[str]:
    values = {key: value for key, value in settings.items() if not isinstance(value, Mapping)}
    if path and values:
        yield f"\n[{'.'.join(path)}]"
    yield from (f"{key} = {_number(value) or json.dumps(value)}" for key, value in values.items())
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _toml_tables(value, (*path, key))


def _number(value: Any) -> str:
    """Format a float with a decimal point: YAML 1.1 reads 1e-05 as a string."""
    text = f"{value:.12f}".rstrip("0") if isinstance(value, float) else ""
    return text + "0" if text.endswith(".") else text


def template(name: str) -> str:
    """Return the text of a script that is shipped as data, with fields to fill in."""
    return (Path(__file__).parent / "data" / f"{name}.txt").read_text("utf-8")
