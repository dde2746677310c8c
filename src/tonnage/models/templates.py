"""The exact tensors of a known architecture: its templates evaluated with a configuration's numbers.

A template is a name ("layers.*.mlp.up_proj.weight"), an expression per dimension, the loops that repeat it with a rule
over the index `i` that says which iterations have it, and the condition for its existence. `data/architectures.jsonl`
holds one architecture per line (`tools/learn_shapes.py` makes it from transformers itself), with its fields' defaults;
only the requested line is parsed. Its expressions are our own data, but the values are untrusted: there is no attribute
access, no call except of eight numeric functions, and no number larger than a dimension may be.
"""

import ast
import json
import math
import operator
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from tonnage.errors import BadModel
from tonnage.models.fields import LARGEST, truth, whole

Lookup = Callable[[str], Any]

_TOO_LARGE = 2**62
_PAIRS = (
    "Add add Sub sub Mult mul FloorDiv floordiv Div truediv Mod mod Pow pow Eq eq NotEq ne Lt lt LtE le Gt gt GtE ge "
    "Is is_ IsNot is_not"
).split()
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    **{getattr(ast, sign): getattr(operator, name) for sign, name in zip(_PAIRS[::2], _PAIRS[1::2], strict=True)},
    ast.In: lambda item, items: item in (items or ()),
    ast.NotIn: lambda item, items: item not in (items or ()),
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (int, max, min, round, math.ceil, math.floor, abs, len)
}


def evaluate(text: str, lookup: Lookup) -> Any:
    """Return the value of an expression, resolving names with `lookup`."""
    try:
        return _value(_parsed(text), lookup)
    except (TypeError, ValueError, ArithmeticError, IndexError, KeyError) as error:
        if isinstance(error, BadModel):
            raise
        names = ", ".join(f"{name!r} = {reprlib.repr(lookup(name))}" for name in sorted(names_in(text)) if name != "i")
        problem = f"The configuration's fields make no sense together: {names}."
        raise BadModel(problem, hint=f"Needed: {text}.") from None


@cache
def names_in(text: str) -> frozenset[str]:
    """Return the fields that an expression reads."""
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.Name, ast.Attribute)):
            found.add(ast.unparse(node))
            return
        for child in node.args if isinstance(node, ast.Call) else ast.iter_child_nodes(node):
            visit(child)

    visit(_parsed(text))
    return frozenset(found)


@cache
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _value(node: ast.expr, lookup: Lookup) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name() | ast.Attribute():
            return lookup(ast.unparse(node))
        case ast.BinOp(left=left, op=sign, right=right):
            return _number(sign, _value(left, lookup), _value(right, lookup))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, lookup)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, lookup)
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_value(value, lookup) for value in values)
        case ast.BoolOp(values=values):
            return any(_value(value, lookup) for value in values)
        case ast.Compare(left=left, ops=[sign], comparators=[right]):
            return _OPERATORS[type(sign)](_value(left, lookup), _value(right, lookup))
        case ast.Tuple(elts=items):
            return tuple(_value(item, lookup) for item in items)
        case ast.Subscript(value=value, slice=index):
            return _value(value, lookup)[_value(index, lookup)]
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return _FUNCTIONS[name](*(_value(argument, lookup) for argument in arguments))
    raise AssertionError(f"no expression of ours: {ast.dump(node)}")


def _number(sign: ast.operator, left: Any, right: Any) -> Any:
    if type(left) not in (int, float) or type(right) not in (int, float):
        raise TypeError("not numbers")
    if isinstance(sign, ast.Pow) and abs(right) > 16:
        raise ValueError("a power beyond reason")
    result = _OPERATORS[type(sign)](left, right)
    if abs(result) > _TOO_LARGE:
        raise ValueError("a number beyond reason")
    return result


MOST_TURNS = 4_096
_DATA = Path(__file__).parent / "data" / "architectures.jsonl"


@cache
def architecture(model_type: str) -> Mapping[str, Any] | None:
    """Return the row of an architecture; None if unknown."""
    text = _text()
    start = text.find(f'\n{{"model_type": {json.dumps(model_type)}, '.encode())
    if start < 0:
        return None
    return dict(json.loads(text[start : text.find(b"\n", start + 1)]))


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
        self._config, self._row = config, row
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
        is_pair = isinstance(given, list) and len(given) == 2 and given[0] == given[1]
        if is_pair and isinstance(usual, int) and path.rpartition(".")[2] in _SQUARES:
            given = given[0]
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
# Sides may be stated one by one.
_SQUARES = ("image_size", "patch_size")
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
        name, sizes, loops, condition = template
        if number in without or (condition and not evaluate(condition, values)):
            continue
        for count, rule in loops:
            if (count, rule) not in rules:
                indices = range(turns(count, values))
                kept = (index for index in indices if not rule or evaluate(rule, _indexed(values, index)))
                rules[count, rule] = tuple(kept)
        members = [rules[count, rule] for count, rule in loops]
        if all(members):
            shape = tuple(_size(text, evaluate(text, values)) for text in sizes)
            inner = prod(len(turn) for turn in members[1:])
            yield Tensor(name, shape, inner, loops[0][0] if loops else "", members[0] if members else None)


def _size(text: str, size: Any) -> int:
    if isinstance(size, float) and size.is_integer():
        return int(size)
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        problem = f"{text} comes to {size!r}, which is no size."
        raise BadModel(problem, hint="Correct these fields of the configuration.")
    return size
