"""The exact tensors of a known architecture: its templates evaluated with a configuration's numbers.

A template is a name ("layers.*.mlp.up_proj.weight"), an expression per dimension, the loops that repeat it with a rule
over the index `i` that says which iterations have it, and the condition for its existence. `data/architectures.jsonl`
holds one architecture per line (`tools/learn_shapes.py` makes it from transformers itself), with its fields' defaults;
only the requested line is parsed.
"""

import json
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from tonnage.errors import BadModel
from tonnage.models.expressions import evaluate
from tonnage.models.fields import LARGEST, truth, whole

MOST_TURNS = 4_096
_DATA = Path(__file__).parent / "data" / "architectures.jsonl"


@cache
def architecture(model_type: str) -> Mapping[str, Any] | None:
    """Return the row of an architecture; None if unknown."""
    text = _text()
    start = text.find(f'\n{{"model_type": {json.dumps(model_type)}, '.encode())
    if start < 0:
        return None
    row: dict[str, Any] = json.loads(text[start : text.find(b"\n", start + 1)])
    return row


@cache
def _text() -> bytes:
    return b"\n" + _DATA.read_bytes()


@dataclass(frozen=True, slots=True)
class Tensor:
    """Tensors of one name and form; `members` are the iterations of the outermost loop that have it (None: no loop)."""

    name: str
    shape: tuple[int, ...]
    repeats: int  # in inner loops
    loop: str  # what counts the outermost loop, "" for none
    members: tuple[int, ...] | None

    @property
    def elements(self) -> int:
        """Elements of one member."""
        return self.repeats * prod(self.shape)

    @property
    def total(self) -> int:
        """Elements of all members."""
        return self.elements * (1 if self.members is None else len(self.members))


class ConfigValues:
    """A configuration's fields by path, with the architecture's defaults and derived fields."""

    def __init__(self, config: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        self._config = config
        self._row = row
        self._synonyms: dict[str, list[str]] = {}
        for other, name in row.get("names", {}).items():
            self._synonyms.setdefault(name, []).append(other)
            self._synonyms.setdefault(other, []).append(name)
        self._made: dict[str, Any] = {}

    def __call__(self, path: str) -> Any:
        if path not in self._made:
            self._made[path] = None  # a field derived from itself counts as absent
            self._made[path] = self._find(path)
        return self._made[path]

    def __contains__(self, path: str) -> bool:
        return self._given(path) is not _ABSENT

    def _find(self, path: str) -> Any:
        given = self._given(path)
        if given is _ABSENT:
            given = _at(self._row["defaults"], path)
        if given is _ABSENT or given is None:
            rule = self._row.get("derived", {}).get(path)
            if isinstance(rule, str):
                return evaluate(rule, self)
            return self._words(rule) if rule else None
        usual = _at(self._row["defaults"], path)
        if isinstance(usual, bool):
            truth(given, path)
        checked = _checked(given, path, least=usual if isinstance(usual, int) else 0)
        if self._row.get("old_kinds") and isinstance(checked, list):
            return [_OLD_KINDS.get(item, item) if isinstance(item, str) else item for item in checked]
        return checked

    def _given(self, path: str) -> Any:
        if path == "num_labels":
            return labels(self._config)
        for name in (path, *self._synonyms.get(path, ())):
            value = _at(self._config, name)
            if value is not _ABSENT:
                return value
        return _ABSENT

    def _words(self, rule: Mapping[str, Any]) -> list[Any]:
        count = turns(rule["count"], self)
        if "indices" in rule:
            return [index for index in range(count) if evaluate(rule["indices"], _indexed(self, index))]
        return [
            next((word for word, text in rule["cases"] if not text or evaluate(text, _indexed(self, index))), None)
            for index in range(count)
        ]


_ABSENT: Any = object()
# Names of layer kinds before transformers 5.
_OLD_KINDS = {"conv": "linear_attention", "mamba": "linear_attention", "attention": "full_attention"}


def turned(row: Mapping[str, Any], config: Mapping[str, Any]) -> set[str]:
    """Return the row's switches that differ from their defaults."""
    given, usual = ConfigValues(config, row), ConfigValues({}, row)
    return {text for text in row.get("switches", ()) if _holds(text, given) != _holds(text, usual)}


def _holds(text: str, values: ConfigValues) -> bool:
    try:
        return bool(evaluate(text, values))
    except BadModel:
        return False


def _at(config: Any, path: str) -> Any:
    for part in path.split("."):
        if not isinstance(config, Mapping) or part not in config:
            return _ABSENT
        config = config[part]
    return config


def _checked(value: Any, path: str, least: int) -> Any:
    """Return a valid number; -1 often means none, and less is allowed only if the default is less."""
    if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
        if not min(least, -1) <= value <= LARGEST:  # false for NaN
            raise BadModel(f"{path!r} is {reprlib.repr(value)}.", hint=f"It must lie between 0 and {LARGEST:,}.")
        return int(value) if isinstance(value, float) and value.is_integer() and abs(value) > 64 else value
    if isinstance(value, list) and len(value) > MOST_TURNS:
        raise BadModel(f"{path!r} lists {len(value):,} values.", hint=f"At most {MOST_TURNS:,} make sense.")
    return value


def labels(config: Mapping[str, Any]) -> int:
    """Return the number of classes of a classifier; two by default."""
    if isinstance(config.get("id2label"), Mapping):
        return len(config["id2label"])
    return whole(config["num_labels"], "num_labels") if config.get("num_labels") is not None else 2


def turns(text: str, values: ConfigValues) -> int:
    """Return the number of iterations of a loop."""
    count = evaluate(text, values)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MOST_TURNS:
        raise BadModel(f"{text!r} is {count!r}.", hint=f"It must be a whole number between 0 and {MOST_TURNS:,}.")
    return count


def _indexed(values: ConfigValues, index: int) -> Any:
    return lambda path: index if path == "i" else values(path)


def tensors(row: Mapping[str, Any], values: ConfigValues, head: str) -> Iterator[Tensor]:
    """Yield every tensor of the model with that head."""
    chosen = row["heads"].get(head) or {"without": [], "with": []}
    without = set(chosen["without"])
    rules: dict[tuple[str, str], tuple[int, ...]] = {}
    for number, template in enumerate([*row["tensors"], *chosen["with"]]):
        if number not in without:
            tensor = _tensor(template, values, rules)
            if tensor is not None:
                yield tensor


def _tensor(template: list[Any], values: ConfigValues, rules: dict[tuple[str, str], tuple[int, ...]]) -> Tensor | None:
    name, sizes, loops, condition = template
    if condition and not evaluate(condition, values):
        return None
    members = [_members(count, rule, values, rules) for count, rule in loops]
    if any(not turn for turn in members):
        return None
    shape = []
    for text in sizes:
        size = evaluate(text, values)
        if isinstance(size, float) and size.is_integer():
            size = int(size)
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise BadModel(
                f"{text} comes to {size!r}, which is no size.", hint="Correct these fields of the configuration."
            )
        shape.append(size)
    inner = prod(len(turn) for turn in members[1:])
    return Tensor(name, tuple(shape), inner, loops[0][0] if loops else "", members[0] if members else None)


def _members(
    count: str, rule: str, values: ConfigValues, rules: dict[tuple[str, str], tuple[int, ...]]
) -> tuple[int, ...]:
    if (count, rule) not in rules:
        indices = range(turns(count, values))
        kept = (index for index in indices if not rule or evaluate(rule, _indexed(values, index)))
        rules[count, rule] = tuple(kept)
    return rules[count, rule]
