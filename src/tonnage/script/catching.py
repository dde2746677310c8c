"""Predicts whether a program would catch an error that is about to be raised, from the source of the frames on its
stack.

A handler counts if it may match and may continue afterwards. One that always reraises or exits ends the program
anyway, and does not count. `with suppress(...)` counts, as does any `with` that is given a matching type, and a
generator-based context manager whose `yield` is in such a `try`. Classes with their own `__exit__` are assumed to
propagate errors. Frames without source are assumed to catch nothing.
"""

import ast
import builtins
import inspect
import linecache
import sys
from collections import ChainMap
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

_EXITS = {"exit", "_exit", "quit", "abort"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_Block = ast.Try | ast.With | ast.AsyncWith
_trees: dict[str, ast.Module | None] = {}


def stacks(of: FrameType | None, waiting: int) -> Iterator[FrameType]:
    """Return this thread's frames, innermost first, then those of the thread that waits for it."""
    seen = set()
    for frame in (of, sys._current_frames().get(waiting)):
        while frame is not None and id(frame) not in seen:
            seen.add(id(frame))
            yield frame
            frame = frame.f_back


def is_caught(error: type[BaseException], frames: Iterable[FrameType]) -> bool:
    """Whether one of these frames, innermost first, would catch an error of this type and continue."""
    kinds: tuple[type[BaseException], ...] = (error,)
    for frame in frames:
        for block in _around(frame):
            if isinstance(block, ast.Try):
                handler = next((h for h in block.handlers if _matches(h.type, kinds, frame)), None)
                if handler is None:
                    continue
                if not _ends(handler.body):
                    return True
                # Whether it raises an error of its own, not the one that it caught.
                raised = [node.exc for node in ast.walk(handler) if isinstance(node, ast.Raise)]
                if any(exc and not (isinstance(exc, ast.Name) and exc.id == handler.name) for exc in raised):
                    kinds = (Exception,)  # of an unknown type
            elif any(_item_catches(item.context_expr, kinds, frame) for item in block.items):
                return True
    return False


def _around(frame: FrameType) -> list[_Block]:
    """Return the `try` and `with` blocks of a frame's function around its current line, innermost first."""
    node: ast.AST | None = _tree(frame.f_code.co_filename, frame.f_globals)
    blocks: list[_Block] = []
    while node is not None:
        if isinstance(node, _FUNCTIONS):
            blocks = []  # blocks around a function's definition are not around its calls
        elif isinstance(node, (ast.With, ast.AsyncWith)) or (
            isinstance(node, ast.Try) and any(_covers(statement, frame.f_lineno) for statement in node.body)
        ):
            blocks.append(node)
        node = next((child for child in ast.iter_child_nodes(node) if _covers(child, frame.f_lineno)), None)
    return blocks[::-1]


def _covers(node: ast.AST, line: int) -> bool:
    if isinstance(node, ast.match_case):
        return any(_covers(statement, line) for statement in node.body)
    return getattr(node, "lineno", line + 1) <= line <= (getattr(node, "end_lineno", None) or 0)


def _tree(file: str, variables: dict[str, Any]) -> ast.Module | None:
    if file not in _trees:
        try:
            _trees[file] = ast.parse("".join(linecache.getlines(file, variables)))
        except (SyntaxError, ValueError, RecursionError):
            _trees[file] = None
    return _trees[file]


def _matches(kind: ast.expr | None, errors: tuple[type[BaseException], ...], frame: FrameType) -> bool:
    """Whether `except kind` may match one of these errors; True if unknown."""
    if kind is None:
        return True
    found = _value(kind, frame)
    return any(
        not isinstance(each, type)
        or any(issubclass(error, each) or (error is Exception and issubclass(each, error)) for error in errors)
        for each in (found if isinstance(found, tuple) else (found,))
    )


def _value(node: ast.expr, frame: FrameType) -> Any:
    """Return what a name or dotted name refers to in a frame; None for anything else."""
    match node:
        case ast.Name(id=name):
            return ChainMap(frame.f_locals, frame.f_globals, vars(builtins)).get(name)
        case ast.Attribute(value=owner, attr=name):
            return getattr(_value(owner, frame), name, None)
        case ast.Tuple(elts=elements):
            return tuple(_value(each, frame) for each in elements)
    return None


def _ends(body: list[ast.stmt]) -> bool:
    match body[-1]:
        case ast.If(body=then, orelse=otherwise):
            ends = bool(otherwise) and _ends(then) and _ends(otherwise)
        case ast.With(body=inner) | ast.AsyncWith(body=inner):
            ends = _ends(inner)
        case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))):
            ends = name in _EXITS
        case last:
            ends = isinstance(last, ast.Raise)
    return ends and not any(map(_leaves, body))


def _leaves(node: ast.AST, in_loop: bool = False) -> bool:
    """Whether a statement may leave the handler without an error."""
    if isinstance(node, ast.Return) or (isinstance(node, (ast.Break, ast.Continue)) and not in_loop):
        return True
    if isinstance(node, _FUNCTIONS):
        return False
    return any(_leaves(child, in_loop or isinstance(node, _LOOPS)) for child in ast.iter_child_nodes(node))


def _item_catches(item: ast.expr, errors: tuple[type[BaseException], ...], frame: FrameType) -> bool:
    """Whether a `with` of this context manager continues after such an error."""
    if not isinstance(item, ast.Call):
        return False
    given = [value for argument in item.args if (value := _value(argument, frame)) is not None]
    flat = [kind for value in given for kind in (value if isinstance(value, tuple) else (value,))]
    if any(isinstance(kind, type) and issubclass(kind, BaseException) and issubclass(errors[0], kind) for kind in flat):
        return True
    # Whether the `yield` of a generator-based context manager is in a `try` that catches the errors.
    made: Any = inspect.unwrap(called) if callable(called := _value(item.func, frame)) else None
    code = getattr(made, "__code__", None)
    if code is None or not inspect.isgeneratorfunction(made):
        return False
    tree = _tree(code.co_filename, made.__globals__)
    last = max(line for *_, line in code.co_lines() if line)
    for node in ast.walk(tree) if tree else ():
        if not isinstance(node, ast.Try) or not code.co_firstlineno <= node.lineno <= last:
            continue
        has_yield = any(isinstance(inner, ast.Yield) for statement in node.body for inner in ast.walk(statement))
        handler = next((h for h in node.handlers if _matches(h.type, errors, frame)), None)
        if has_yield and handler and not _ends(handler.body):
            return True
    return False
