"""Numbers and words that remember where they came from.

A `Whole` is an int that carries the expression that made it ("hidden_size // num_attention_heads"), a `Real` a float, a
`Text` a str. Ordinary code computes with them as with any other; every comparison that it makes is kept in
`comparisons`, so that whoever watches knows what was decided and on what grounds.
"""

import builtins
import operator
import re
from collections.abc import Callable, Iterable
from typing import Any

comparisons: dict[str, bool] = {}
# The number of turns of a loop → what counted it, in the order seen.
ranges: dict[int, dict[str, None]] = {}
# A number that was computed → how it first was.
computed: dict[int, str] = {}
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "pow": "**", "truediv": "/"}
_TESTS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def expression(value: Any) -> str:
    """What made a value; a plain value is itself."""
    return getattr(value, "expression", None) or repr(value)


def _wrapped(text: str) -> str:
    return text if re.fullmatch(r"[\w.\[\]]+", text) or re.fullmatch(r"\w+\([^()]*\)", text) else f"({text})"


class Whole(int):
    """A traced int."""

    expression: str

    def __new__(cls, value: int, text: str) -> "Whole":
        made = super().__new__(cls, value)
        made.expression = text
        return made

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __bool__(self) -> bool:
        return _noted(int.__ne__(self, 0), f"{_wrapped(self.expression)} != 0")

    def __neg__(self) -> "Whole":
        return Whole(-int(self), f"-{_wrapped(self.expression)}")

    def __deepcopy__(self, memo: object) -> "Whole":
        return self

    __copy__ = __round__ = __ceil__ = __floor__ = __trunc__ = __abs__ = lambda self, *_: self

    def is_integer(self) -> bool:
        return True


class Real(float):
    """A traced float."""

    expression: str

    def __new__(cls, value: float, text: str) -> "Real":
        made = super().__new__(cls, value)
        made.expression = text
        return made

    def __hash__(self) -> int:
        return float.__hash__(self)

    def __deepcopy__(self, memo: object) -> "Real":
        return self

    def __copy__(self) -> "Real":
        return self

    def __bool__(self) -> bool:
        return _noted(float.__ne__(self, 0.0), f"{_wrapped(self.expression)} != 0")

    def __round__(self, digits: int | None = None) -> Any:
        return Whole(round(float(self)), f"round({self.expression})") if digits is None else round(float(self), digits)

    def __ceil__(self) -> Whole:
        import math

        return Whole(math.ceil(float(self)), f"ceil({self.expression})")

    def __floor__(self) -> Whole:
        import math

        return Whole(math.floor(float(self)), f"floor({self.expression})")

    def is_integer(self) -> bool:
        return _noted(float.is_integer(self), f"{_wrapped(self.expression)} % 1 == 0")


class Text(str):
    """A traced str: it keeps what it was compared with."""

    expression: str

    def __new__(cls, value: str, text: str) -> "Text":
        made = super().__new__(cls, value)
        made.expression = text
        return made

    def __hash__(self) -> int:
        return str.__hash__(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str):
            return False
        return _noted(str.__eq__(self, other), f"{self.expression} == {str(other)!r}")

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __deepcopy__(self, memo: object) -> "Text":
        return self

    def __copy__(self) -> "Text":
        return self


def _noted(outcome: bool, text: str) -> bool:
    comparisons.setdefault(text, outcome)
    return outcome


def _plain(value: Any) -> Any:
    if isinstance(value, Whole):
        return builtins.int(value)
    return builtins.float(value) if isinstance(value, Real) else value


def _arithmetic(name: str, sign: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    act = getattr(operator, name)

    def result(left: Any, right: Any) -> Any:
        if not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
            return NotImplemented
        value = act(_plain(left), _plain(right))
        text = f"{_wrapped(expression(left))} {sign} {_wrapped(expression(right))}"
        if isinstance(value, float):
            return Real(value, text)
        computed.setdefault(value, text)
        return Whole(value, text)

    def forward(self: Any, other: Any) -> Any:
        if isinstance(other, (list, tuple, str)) and name == "mul":
            return other * _plain(self)
        return result(self, other)

    def backward(self: Any, other: Any) -> Any:
        if isinstance(other, (list, tuple, str)) and name == "mul":
            return other * _plain(self)
        return result(other, self)

    return forward, backward


def _comparison(name: str, sign: str) -> Callable[..., Any]:
    act = getattr(operator, name)

    def compare(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        return _noted(
            act(_plain(self), _plain(other)), f"{_wrapped(self.expression)} {sign} {_wrapped(expression(other))}"
        )

    return compare


for _kind in (Whole, Real):
    for _name, _sign in _SIGNS.items():
        _forward, _backward = _arithmetic(_name, _sign)
        setattr(_kind, f"__{_name}__", _forward)
        setattr(_kind, f"__r{_name}__", _backward)
    for _name, _sign in _TESTS.items():
        setattr(_kind, f"__{_name}__", _comparison(_name, _sign))


class _LikeInt(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, builtins.int)

    def __call__(cls, value: Any = 0, *rest: Any) -> Any:
        if isinstance(value, Real):
            computed.setdefault(builtins.int(value), f"int({value.expression})")
            return Whole(builtins.int(value), f"int({value.expression})")
        return value if isinstance(value, Whole) else builtins.int(value, *rest)


class traced_int(metaclass=_LikeInt):
    """`int` that keeps the trace; `isinstance` and `issubclass` see the builtin."""


def _choice(name: str) -> Callable[..., Any]:
    act = getattr(builtins, name)

    def choose(*values: Any, **options: Any) -> Any:
        items = list(values[0]) if len(values) == 1 and isinstance(values[0], Iterable) else list(values)
        chosen = act(*values, **options) if not items else act(items, **options)
        if options or not any(isinstance(item, (Whole, Real)) for item in items):
            return chosen
        text = f"{name}({', '.join(expression(item) for item in items)})"
        return Real(chosen, text) if isinstance(chosen, float) else Whole(chosen, text)

    return choose


def traced_range(*bounds: Any) -> range:
    """`range` that notes what counted it."""
    if len(bounds) == 1 and isinstance(bounds[0], Whole):
        ranges.setdefault(_plain(bounds[0]), {})[bounds[0].expression] = None
    return builtins.range(*(_plain(bound) for bound in bounds))


# What a traced module's own names are replaced by.
REPLACEMENTS = {"int": traced_int, "max": _choice("max"), "min": _choice("min"), "range": traced_range}
