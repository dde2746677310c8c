"""Evaluate the small arithmetic of tensor templates: "num_attention_heads * head_dim", "layer_types[i] == 'mamba'".

The expressions are our own data; the values are untrusted. Only what is listed here is possible: no attribute access,
no calls except eight numeric functions, and no number larger than a dimension may be.
"""

import ast
import math
import operator
import reprlib
from collections.abc import Callable
from functools import cache
from typing import Any

from tonnage.errors import BadModel

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
        raise BadModel(
            f"The configuration's fields make no sense together: {names}.", hint=f"Needed: {text}."
        ) from None


@cache
def names_in(text: str) -> frozenset[str]:
    """Return the fields that an expression reads."""
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.Name, ast.Attribute)):
            found.add(ast.unparse(node))
            return
        children = node.args if isinstance(node, ast.Call) else ast.iter_child_nodes(node)
        for child in children:
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
