"""The syntax tree of a program's files, by the instructions that run there: which expression an instruction evaluates,
what is around it, and which tests decide whether a statement is reached.
"""

import ast
import inspect
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

from tonnage.script.code_paths import EXITS

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | ast.Module
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Module)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
_MOST_NODES = 400_000


@dataclass
class SourceTree:
    """The tree of one file, its parents, and its nodes by their text range."""

    file: str
    tree: ast.Module
    parents: dict[ast.AST, ast.AST]
    by_range: dict[tuple[int, int, int, int], ast.AST]
    modules: set[str]  # names bound by imports
    definitions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]]
    constructors: dict[str, ast.FunctionDef | ast.AsyncFunctionDef]

    @classmethod
    def of(cls, file: str, lines: list[str]) -> "SourceTree | None":
        """Return the whole file; None if it is no Python, or too large."""
        return cls._parsed(file, "".join(lines), 0)

    @classmethod
    def of_function(cls, code: CodeType, lines: list[str]) -> "SourceTree | None":
        """Return the text of one function, which is much faster for the large files of libraries."""
        first = code.co_firstlineno - 1
        block = inspect.getblock(lines[first:])
        if not block:
            return None
        if block[0][:1].isspace():  # a method, below a line that lets it be indented
            return cls._parsed(code.co_filename, "".join(["if True:\n", *block]), first - 1)
        return cls._parsed(code.co_filename, "".join(block), first)

    @classmethod
    def _parsed(cls, file: str, text: str, lines_before: int) -> "SourceTree | None":
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            return None
        if lines_before:
            ast.increment_lineno(tree, lines_before)
        source = cls(file, tree, {}, {}, set(), {}, {})
        for count, node in enumerate(ast.walk(tree)):
            if count > _MOST_NODES:
                return None
            for child in ast.iter_child_nodes(node):
                source.parents[child] = node
            source._note(node)
        return source if tree.body else None

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, (ast.expr, ast.stmt)):
            place = (node.lineno, node.end_lineno or 0, node.col_offset, node.end_col_offset or 0)
            if place not in self.by_range or isinstance(node, ast.expr):
                self.by_range[place] = node
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self.modules |= {(name.asname or name.name).partition(".")[0] for name in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self.definitions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                    self.constructors[node.name] = member

    def node_at(self, code: CodeType, offset: int) -> ast.expr | ast.stmt | None:
        """Return the expression that an instruction evaluates, or the test of the statement whose jump it is."""
        positions = list(code.co_positions())
        number = offset // 2
        if number >= len(positions) or None in positions[number]:
            return None
        place: Any = positions[number]
        node = self.by_range.get(place)
        if isinstance(node, (ast.If, ast.While, ast.Assert, ast.IfExp)):
            return node.test
        if isinstance(node, (ast.For, ast.AsyncFor)):
            return node.iter
        if isinstance(node, ast.Expr):
            return node.value
        if isinstance(node, (ast.expr, ast.stmt)):
            return node
        return self._around(*place)

    def _around(self, line: int, end_line: int, column: int, end_column: int) -> ast.expr | ast.stmt | None:
        """Return the smallest expression or statement that spans this range."""
        node: ast.AST = self.tree
        smallest: ast.expr | ast.stmt | None = None
        start, end = (line, column), (end_line, end_column)
        while True:
            for child in ast.iter_child_nodes(node):
                if _begin(child) <= start and end <= _end(child):
                    node = child
                    if isinstance(child, (ast.expr, ast.stmt)):
                        smallest = child
                    break
            else:
                return smallest

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around one, innermost first, up to its function."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            if isinstance(parent, SCOPES):
                return
            node = parent

    def scope_of(self, node: ast.AST) -> Scope:
        """Return the function, class or module that a node is directly in."""
        for parent in self.ancestors(node):
            if isinstance(parent, SCOPES):
                return parent
        return self.tree

    def statement_of(self, node: ast.AST) -> ast.stmt | None:
        if isinstance(node, ast.stmt):
            return node
        return next((parent for parent in self.ancestors(node) if isinstance(parent, ast.stmt)), None)


def _begin(node: ast.AST) -> tuple[int, int]:
    if isinstance(node, (ast.expr, ast.stmt, ast.ExceptHandler, ast.arg, ast.keyword)):
        return node.lineno, node.col_offset
    return (0, 0)


def _end(node: ast.AST) -> tuple[int, int]:
    if isinstance(node, (ast.expr, ast.stmt, ast.ExceptHandler, ast.arg, ast.keyword)):
        return node.end_lineno or 0, node.end_col_offset or 0
    return (1 << 30, 0)


# By file, and by the first line of a function: the lines that were read (a notebook's cell may have others under the same
# name), and what they are.
_sources: dict[tuple[str, int], tuple[list[str], SourceTree | None]] = {}


def source_of(code: CodeType, variables: dict[str, Any] | None = None, *, is_quick: bool = False) -> SourceTree | None:
    """Return the source of a code object's file or, if `is_quick`, of its function."""
    lines = linecache.getlines(code.co_filename, variables)
    is_part = is_quick and not code.co_name.startswith("<")
    key = code.co_filename, code.co_firstlineno if is_part else 0
    known = _sources.get(key)
    if known is None or known[0] is not lines:
        found = SourceTree.of_function(code, lines) if is_part else SourceTree.of(code.co_filename, lines)
        known = _sources[key] = lines, found
    return known[1]


def value_of(statement: ast.stmt) -> ast.expr | None:
    if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)):
        return statement.value
    return None


def dotted_name(node: ast.AST | None) -> str:
    """Return "name" or "name.attribute" of an expression; "" for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted_name(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def last_name(node: ast.AST | None) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


@lru_cache(maxsize=8192)
def own_nodes(scope: ast.AST) -> tuple[ast.AST, ...]:
    """Return the nodes of a function without those of functions and classes defined in it, in their order."""
    found: list[ast.AST] = []
    waiting = list(ast.iter_child_nodes(scope))[::-1]
    while waiting:
        node = waiting.pop()
        found.append(node)
        if not isinstance(node, SCOPES):
            waiting += list(ast.iter_child_nodes(node))[::-1]
    return tuple(found)


@lru_cache(maxsize=2048)
def _bound_names(scope: ast.AST) -> frozenset[str]:
    return frozenset(
        node.id for node in own_nodes(scope) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )


def binds(scope: ast.AST, name: str) -> bool:
    """Whether a name is a parameter or assigned in a function."""
    if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        arguments = scope.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        if any(argument is not None and argument.arg == name for argument in every):
            return True
    return name in _bound_names(scope)


def exits_of(source: SourceTree, loop: ast.AST) -> list[ast.AST]:
    """Return the statements in a loop's body that leave it: its own `break`, `return`, and calls that exit."""
    found = []
    for node in own_nodes(loop):
        if isinstance(node, ast.Return) or _is_exit(node):
            found.append(node)
        elif isinstance(node, ast.Break):
            own = next(parent for parent in source.ancestors(node) if isinstance(parent, LOOPS))
            if own is loop:
                found.append(node)
    return found


def _is_exit(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and last_name(node.value.func) in EXITS


def guards_of(source: SourceTree, node: ast.AST, within: ast.AST | None) -> list[ast.expr]:
    """Return the tests that decide whether a statement is reached, up to a loop or to its function.

    They are those around it; if there is none, those by which the function may have returned before.
    """
    tests: list[ast.expr] = []
    inner: ast.AST = node
    blocks: list[tuple[ast.AST, ast.AST]] = []
    for parent in source.ancestors(node):
        if isinstance(parent, (ast.If, ast.IfExp)) and inner is not parent.test:
            tests.append(parent.test)
        elif isinstance(parent, ast.BoolOp):
            for value in parent.values:
                if value is inner:
                    break
                tests.append(value)
        elif isinstance(parent, LOOPS) and inner in parent.orelse:
            for exit_ in exits_of(source, parent):
                tests += guards_of(source, exit_, parent)
            if isinstance(parent, ast.While):
                tests.append(parent.test)
        elif isinstance(parent, ast.match_case) and parent.guard is not None:
            tests.append(parent.guard)
        elif isinstance(parent, ast.Match):
            tests.append(parent.subject)
        blocks.append((parent, inner))
        if parent is within:
            return tests
        inner = parent
    if tests:
        return tests
    around = {parent for parent, _ in blocks}
    for parent, child in blocks:
        for before in _before(parent, child):
            for leaving in [before, *own_nodes(before)]:
                if _skips(source, leaving, around):
                    tests += guards_of(source, leaving, before)
    return tests


def _skips(source: SourceTree, leaving: ast.AST, around: set[ast.AST]) -> bool:
    """Whether a statement leaves the function, or one of the loops around another statement."""
    if isinstance(leaving, (ast.Break, ast.Continue)):
        loop = next((parent for parent in source.ancestors(leaving) if isinstance(parent, LOOPS)), None)
        return loop in around
    return isinstance(leaving, ast.Return) or _is_exit(leaving)


def _before(parent: ast.AST, child: ast.AST) -> list[ast.AST]:
    """Return the statements before one in its block."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and child in block:
            return list(block[: block.index(child)])
    return []
