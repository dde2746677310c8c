"""Find the statement in a script's source that keeps a value beyond the loop iteration that made it.

The source is parsed, never run; it is searched at the recorded script path and beside it. Without it every answer is
None. Only Python statements are understood, not what a library does with its arguments.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_STORING_CALLS = {"append", "appendleft", "add", "extend", "insert", "update", "setdefault", "put", "push", "store"}
# A value passed through one of these keeps no significant GPU memory; through one of those, no graph either.
_RELEASING = {"item", "tolist", "cpu", "numpy", "float", "int", "len", "backward", "str", "print", "format"}
_RELEASING_GRAPHS = _RELEASING | {"detach", "detach_"}
_MOST_BYTES = 2_000_000
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class KeepingStatement:
    """A statement that keeps a value: its line, its text, and whether it is in a hook."""

    line: str
    text: str
    is_hook: bool = False


class Source:
    """One source file of the script."""

    def __init__(self, path: Path, text: str) -> None:
        self.name = path.name
        self._text = text
        self._tree = ast.parse(text)

    @classmethod
    def find(cls, script: str, file_name: str = "") -> "Source | None":
        """Return the script, or a file beside it; None if it cannot be read."""
        path = Path(script)
        if file_name and path.name != file_name:
            path = path.with_name(file_name)
        try:
            if not script or not path.is_file() or path.stat().st_size > _MOST_BYTES:
                return None
            return cls(path, path.read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError, RecursionError):
            return None

    def names_backward_runs_on(self, line: int) -> set[str]:
        """Return `loss` for `loss.backward()` or `scaler.scale(loss).backward()` on this line."""
        calls = [node for node in ast.walk(self._tree) if isinstance(node, ast.Call) and _spans(node, line)]
        backward = [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "backward"]
        return {name for call in backward for name in _loaded(call)}

    def names_made_on(self, line: int) -> set[str]:
        """Return the names that this line's statement assigns."""
        made: set[str] = set()
        for statement in self._statements():
            if _spans(statement, line) and isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                made = made.union(*map(_loaded, targets))
        return made

    def keeper_on(self, line: int) -> KeepingStatement | None:
        """Return this line's statement, if it stores its result."""
        stored = (one for one in self._statements() if _spans(one, line) and any(_stored_values(one)))
        return next(map(self._keeper, stored), None)

    def keeper_of(self, names: set[str], *, of_graph: bool) -> KeepingStatement | None:
        """Return the first statement that stores a value (`of_graph`: its graph) derived from one of these names."""
        tracked = set(names)
        releasing = _RELEASING_GRAPHS if of_graph else _RELEASING
        for statement in self._statements() if of_graph else ():
            if isinstance(statement, ast.Assign) and _kept_names(statement.value, releasing) & tracked:
                tracked |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
        for statement in self._statements():
            # A sum is a tensor of its own: it keeps the graph of what was added, not the values.
            if isinstance(statement, ast.AugAssign) and not of_graph:
                continue
            if any(_kept_names(value, releasing) & tracked for value in _stored_values(statement)):
                return self._keeper(statement)
        return None

    def keeping_hook(self) -> KeepingStatement | None:
        """Return a statement in a registered hook that stores one of the hook's arguments."""
        calls = (node for node in ast.walk(self._tree) if isinstance(node, ast.Call))
        hooking = [c for c in calls if isinstance(c.func, ast.Attribute) and "hook" in c.func.attr]
        hooks = {name for call in hooking for argument in call.args for name in _loaded(argument)}
        for function in (node for node in ast.walk(self._tree) if isinstance(node, _Function)):
            arguments = {argument.arg for argument in function.args.args}
            inside = ast.walk(function) if function.name in hooks else ()
            for statement in (node for node in inside if isinstance(node, ast.stmt)):
                if any(_kept_names(value, _RELEASING) & arguments for value in _stored_values(statement)):
                    return self._keeper(statement, is_hook=True)
        return None

    def mentions(self, name: str) -> int | None:
        """Return the first line that uses this name or attribute."""
        nodes = (node for node in ast.walk(self._tree) if isinstance(node, ast.Name | ast.Attribute))
        return next((n.lineno for n in nodes if (n.id if isinstance(n, ast.Name) else n.attr) == name), None)

    def _statements(self) -> Iterator[ast.stmt]:
        compound = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        return (node for node in ast.walk(self._tree) if isinstance(node, ast.stmt) and not isinstance(node, compound))

    def _keeper(self, statement: ast.stmt, is_hook: bool = False) -> KeepingStatement:
        text = (ast.get_source_segment(self._text, statement) or "").split("\n")[0]
        return KeepingStatement(f"{self.name}:{statement.lineno}", text, is_hook)


def _spans(node: ast.stmt | ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _loaded(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _stored_values(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield what a statement stores in a container or attribute, or adds to a running sum."""
    match statement:
        case ast.AugAssign():
            yield statement.value
        case ast.Assign() if any(isinstance(target, ast.Subscript | ast.Attribute) for target in statement.targets):
            yield statement.value
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name)) as call) if name in _STORING_CALLS:
            yield from call.args


def _kept_names(value: ast.expr, releasing: set[str]) -> set[str]:
    """Return names whose own value is kept, not those that only pass through `item()` and the like."""
    match value:
        case ast.Name():
            return {value.id}
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in releasing:
            return set()
        case ast.Attribute(attr="data" | "shape" | "grad"):
            return set()
        case ast.IfExp():  # not its test
            return _kept_names(value.body, releasing) | _kept_names(value.orelse, releasing)
    children = (child for child in ast.iter_child_nodes(value) if isinstance(child, ast.expr))
    return set().union(*(_kept_names(child, releasing) for child in children))
