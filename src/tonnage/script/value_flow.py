"""Finds what in a program depends on values that it read, from its source text and the places where it read them.

A *read* is the stack of instructions under which a value was read. From there the value is followed through expressions,
names, attributes, arguments and results of functions. Three questions are answered:

- which test (`if`, `while`, `assert`) a read decides;
- whether an error was raised because of a read: the tests that guard the statement that raised, in its own function or
  in the nearest caller that has any, depend on it; or a value of it made a call fail;
- whether a loop can only end by values that were read.

The analysis ignores the order of assignments in a function, and knows classes and functions of one file by their names.
Where it does not know, it finds no dependence: an error is then the script's own. Frames without source are skipped.
"""

import ast
import inspect
import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import CodeType, FrameType, TracebackType
from typing import Any, Literal

from tonnage.script.code_paths import EXITS

Place = tuple[CodeType, int]  # a code object and the offset of an instruction
Places = tuple[Place, ...]  # innermost first
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | ast.Module
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Module)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_TESTED = (ast.If, ast.While, ast.Assert, ast.IfExp)
# What these give of a value does not depend on its numbers.
_METADATA = frozenset(
    "shape size dim ndim dtype device numel is_cuda requires_grad grad_fn layout names format".split()
)
_METADATA_CALLS = frozenset("type isinstance issubclass id print hasattr callable".split())
_COUNTED_CALLS = frozenset("range enumerate count".split())
_ENDLESS_ITERATORS = frozenset("count cycle repeat".split())
_WHOLE_NUMBERS = frozenset("int round floor ceil len range".split())
_SIZED_CALLS = frozenset(
    "zeros ones empty full rand randn randint arange eye linspace new_zeros new_ones new_empty new_full view reshape expand"
    " repeat split chunk narrow tile unflatten unfold resize_ pad range islice randperm".split()
)
_SIZED_BY_VALUES = frozenset("unique set nonzero flatnonzero argwhere compress Counter".split())
_VALUE_ERRORS = (ArithmeticError, LookupError, ValueError)
# Raised for no value's sake, unless the very test that guards the `raise` says so.
_PLAIN_ERRORS = (NameError, TypeError, AttributeError, ImportError, NotImplementedError, OSError, SyntaxError)
_MOST_PASSES = 8
_DEEPEST = 24
_MOST_NODES = 400_000


CauseKind = Literal["assert", "raise", "exit", "error", "loop"]


@dataclass(frozen=True, slots=True)
class Read:
    """A value that was read: where, and of what kind it was ("float", "int", "flag", "values", "size")."""

    places: Places
    kind: str


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a program ended: the file and line of a test or call that failed, and the read that it depends on."""

    file: str
    line: int
    how: CauseKind
    read: Read


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a value comes from, and what kind of value it is now.

    An indirect one was not computed from what was read: a test by it decided whether, or how often, it was assigned.
    """

    read: Read
    kind: str
    is_indirect: bool = False


@dataclass
class _Source:
    """The tree of one file, its parents, and its nodes by their text range."""

    file: str
    tree: ast.Module
    parents: dict[ast.AST, ast.AST]
    by_range: dict[tuple[int, int, int, int], ast.AST]
    modules: set[str]  # names bound by imports
    definitions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]]
    constructors: dict[str, ast.FunctionDef | ast.AsyncFunctionDef]

    @classmethod
    def of(cls, file: str, lines: list[str]) -> "_Source | None":
        """Return the whole file; None if it is no Python, or too large."""
        return cls._parsed(file, "".join(lines), 0)

    @classmethod
    def of_function(cls, code: CodeType, lines: list[str]) -> "_Source | None":
        """Return the text of one function, which is much faster for the large files of libraries."""
        first = code.co_firstlineno - 1
        block = inspect.getblock(lines[first:])
        if not block:
            return None
        if block[0][:1].isspace():  # a method, below a line that lets it be indented
            return cls._parsed(code.co_filename, "".join(["if True:\n", *block]), first - 1)
        return cls._parsed(code.co_filename, "".join(block), first)

    @classmethod
    def _parsed(cls, file: str, text: str, lines_before: int) -> "_Source | None":
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
            if isinstance(parent, _SCOPES):
                return
            node = parent

    def scope_of(self, node: ast.AST) -> Scope:
        """Return the function, class or module that a node is directly in."""
        for parent in self.ancestors(node):
            if isinstance(parent, _SCOPES):
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
_sources: dict[tuple[str, int], tuple[list[str], _Source | None]] = {}


def _source(code: CodeType, variables: dict[str, Any] | None = None, *, is_quick: bool = False) -> _Source | None:
    """Return the source of a code object's file or, if `is_quick`, of its function."""
    lines = linecache.getlines(code.co_filename, variables)
    is_part = is_quick and not code.co_name.startswith("<")
    key = code.co_filename, code.co_firstlineno if is_part else 0
    known = _sources.get(key)
    if known is None or known[0] is not lines:
        found = _Source.of_function(code, lines) if is_part else _Source.of(code.co_filename, lines)
        known = _sources[key] = lines, found
    return known[1]


@dataclass
class _Values:
    """What is known of the variables of one function."""

    names: dict[str, _Origin] = field(default_factory=dict)
    is_done: bool = False


class Flow:
    """Follows the values of some reads through the source of the functions that read them and that got them."""

    def __init__(self, reads: Sequence[Read], *, is_quick: bool = False) -> None:
        """Follow these reads, later ones last; `is_quick` looks at one function at a time, not at whole files."""
        self._is_quick = is_quick
        self._seeds: dict[ast.AST, _Origin] = {}
        self._scopes: dict[ast.AST, _Values] = {}
        self._files: dict[ast.AST, _Source] = {}
        self._attributes: dict[tuple[str, str], _Origin] = {}
        for read in reads:
            self._add(read)

    def _add(self, read: Read) -> None:
        """Mark the expressions that a value came from: where it was read, and the calls that returned it."""
        origin = _Origin(read, read.kind)
        changed: list[tuple[_Source, Scope]] = []
        for code, offset in read.places[:_DEEPEST]:
            source = _source(code, is_quick=self._is_quick)
            node = source.node_at(code, offset) if source else None
            if source is None or node is None:
                return
            scope = source.scope_of(node)
            if isinstance(node, ast.stmt) and not isinstance(node, _SCOPES):
                node = _value_of(node) or node
            self._seeds[node] = origin
            changed.append((source, scope))
            self._analyse(source, scope)
            returned = self._returned(source, scope)
            if returned is None:
                break
            origin = returned
        for source, scope in changed:
            self._analyse(source, scope)

    # Origins of expressions

    def origin(self, source: _Source, node: ast.AST | None, depth: int = 0) -> _Origin | None:
        """Return the read that the value of an expression depends on."""
        if node is None or depth > 60:
            return None
        if node in self._seeds:
            return self._seeds[node]
        match node:
            case ast.Constant() | ast.Lambda():
                return None
            case ast.Name(id=name):
                return self._of_name(source, node, name)
            case ast.Attribute(value=owner, attr=attribute):
                if attribute in _METADATA:
                    return None
                dotted = _dotted(node)
                found = self._of_name(source, node, dotted) if dotted else None
                return found or self._attributes.get((source.file, attribute)) or self.origin(source, owner, depth + 1)
            case ast.Call():
                return self._of_call(source, node, depth)
            case ast.Compare(left=left, ops=ops, comparators=others):
                if all(isinstance(op, (ast.Is, ast.IsNot)) for op in ops):
                    found = self.origin(source, left, depth + 1)
                    return found if found and found.is_indirect else None
                return _as("flag", self._first(source, [left, *others], depth))
            case ast.Subscript(value=owner, slice=index):
                sized = self.origin(source, index, depth + 1)
                is_mask = sized is not None and sized.kind == "flag" and sized.read.kind == "values"
                if is_mask or (sized and sized.kind == "int" and isinstance(index, (ast.Slice, ast.Tuple))):
                    sized = _as("size", sized)
                return sized or self.origin(source, owner, depth + 1)
            case ast.JoinedStr() | ast.FormattedValue():
                return _as("text", self._first(source, list(ast.iter_child_nodes(node)), depth))
        return self._first(source, list(ast.iter_child_nodes(node)), depth)

    def _first(self, source: _Source, nodes: Sequence[ast.AST], depth: int) -> _Origin | None:
        found = None
        for node in nodes:
            origin = self.origin(source, node, depth + 1)
            if origin and (found is None or _rank(origin) > _rank(found)):
                found = origin
        return found

    def _of_call(self, source: _Source, call: ast.Call, depth: int) -> _Origin | None:
        called = _last_name(call.func)
        if called in _METADATA_CALLS or called in _METADATA:
            return None
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        found = self._first(source, arguments, depth)
        if called == "len":
            return found if found and (found.kind == "size" or found.is_indirect) else None
        if found and (called in _SIZED_BY_VALUES or (found.kind == "int" and called in _SIZED_CALLS)):
            return _as("size", found)
        if found and called in _WHOLE_NUMBERS and found.kind == "float":
            return _as("int", found)
        if found is None and isinstance(call.func, ast.Attribute):
            found = self.origin(source, call.func.value, depth + 1)
        return found

    def _of_name(self, source: _Source, node: ast.AST, name: str) -> _Origin | None:
        scope: ast.AST | None = source.scope_of(node)
        while scope is not None:
            values = self._scopes.get(scope)
            if values and name in values.names:
                return values.names[name]
            if isinstance(scope, ast.Module) or _binds(scope, name):
                return None
            scope = source.scope_of(scope)
        return None

    # Names of a function

    def _analyse(self, source: _Source, scope: Scope, depth: int = 0) -> None:
        """Follow values through the assignments of a function until nothing new depends on them."""
        values = self._scopes.setdefault(scope, _Values())
        self._files[scope] = source
        for _ in range(_MOST_PASSES):
            before = len(values.names), len(self._attributes)
            for node in _own_nodes(scope):
                self._assign(source, node, values)
            if before == (len(values.names), len(self._attributes)):
                break
        if depth < 3:
            for node in _own_nodes(scope):
                if isinstance(node, ast.Call):
                    self._enter(source, node, depth)

    def _assign(self, source: _Source, node: ast.AST, values: _Values) -> None:
        targets: list[ast.expr] = []
        origin = None
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=left)], value=ast.Tuple(elts=right)) if len(left) == len(right):
                for target, value in zip(left, right, strict=True):
                    origin = self.origin(source, value)
                    if origin is not None:
                        self._bind(source, target, origin, values)
                return
            case ast.Assign(targets=targets, value=value):
                origin = self.origin(source, value) or self._decision(source, node)
            case ast.AugAssign(target=target, value=value):
                targets = [target]
                origin = self.origin(source, value) or self._decision(source, node)
                if origin is None and isinstance(value, ast.Constant):
                    origin = self._counter(source, node)
            case ast.AnnAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
                targets = [target]
                origin = self.origin(source, value) or self._decision(source, node)
            case ast.For(target=target, iter=iterated) | ast.AsyncFor(target=target, iter=iterated):
                origin = self.origin(source, iterated)
                targets = [target]
                if origin is None and _last_name(getattr(iterated, "func", None)) in _COUNTED_CALLS:
                    targets = [target.elts[0]] if isinstance(target, ast.Tuple) and target.elts else [target]
                    origin = self._counter(source, node)
            case ast.comprehension(target=target, iter=iterated):
                targets = [target]
                origin = self.origin(source, iterated)
            case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
                targets = [target]
                origin = self.origin(source, value)
            case ast.Call(func=ast.Attribute(value=owner), args=args, keywords=keywords):
                # A method that gets such a value may keep it: `losses.append(loss.item())`.
                name = _dotted(owner)
                if name and name not in ("self", "cls") and name.partition(".")[0] not in source.modules:
                    origin = self._first(source, [*args, *keywords], 0)
                    if origin and origin.kind != "text":
                        self._bind(source, owner, origin, values)
                return
        if origin is not None:
            for target in targets:
                self._bind(source, target, origin, values)

    def _bind(self, source: _Source, target: ast.expr, origin: _Origin, values: _Values) -> None:
        match target:
            case ast.Name(id=name):
                values.names[name] = origin
            case ast.Attribute(attr=attribute):
                dotted = _dotted(target)
                if dotted:
                    values.names[dotted] = origin
                self._attributes[source.file, attribute] = origin
            case ast.Subscript(value=owner) | ast.Starred(value=owner):
                if _dotted(owner) not in ("self", "cls"):
                    self._bind(source, owner, origin, values)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                for element in elements:
                    self._bind(source, element, origin, values)

    def _decision(self, source: _Source, node: ast.AST) -> _Origin | None:
        """Return the read that decided whether an assignment was made: that of an `if` around it."""
        inner = node
        for parent in source.ancestors(node):
            if isinstance(parent, ast.If) and inner is not parent.test:
                found = self.origin(source, parent.test)
                if found:
                    return _Origin(found.read, "flag", is_indirect=True)
            inner = parent
        return None

    def _counter(self, source: _Source, node: ast.AST) -> _Origin | None:
        """Return the read that decides how often a loop runs, for what counts its rounds."""
        loops = [node] if isinstance(node, _LOOPS) else []
        loops += [parent for parent in source.ancestors(node) if isinstance(parent, _LOOPS)]
        for loop in loops[:1]:
            tests = [guard for exit_ in _exits(source, loop) for guard in _guards(source, exit_, loop)]
            if isinstance(loop, ast.While):
                tests.append(loop.test)
            found = self._first(source, tests, 0)
            if found:
                return _Origin(found.read, "int", is_indirect=True)
        return None

    def _enter(self, source: _Source, call: ast.Call, depth: int) -> None:
        """Follow arguments into a function or constructor of the same file."""
        name = _last_name(call.func)
        functions = source.definitions.get(name, [])
        if isinstance(call.func, ast.Name) and name in source.constructors:
            functions = [source.constructors[name]]
        if not functions or len(functions) > 3:
            return
        for function in functions:
            values = self._scopes.setdefault(function, _Values())
            is_bound = isinstance(call.func, ast.Attribute) or function.name == "__init__"
            found = self._arguments(source, call, function, is_bound=is_bound)
            new = {parameter: origin for parameter, origin in found.items() if parameter not in values.names}
            if new:
                values.names.update(new)
                self._analyse(source, function, depth + 1)

    def _arguments(
        self,
        source: _Source,
        call: ast.Call,
        function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
        *,
        is_bound: bool,
    ) -> dict[str, _Origin]:
        """Return the parameters of a called function that get values from reads."""
        parameters = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        named = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
        if is_bound or (parameters and parameters[0] in ("self", "cls")):
            parameters = parameters[1:]
        found: dict[str, _Origin] = {}
        rest = function.args.vararg
        for number, argument in enumerate(call.args):
            origin = self.origin(source, argument)
            if origin is None:
                continue
            if isinstance(argument, ast.Starred):
                found.update(dict.fromkeys(parameters[number:], origin))
                names = [rest.arg] if rest else []
            else:
                names = parameters[number : number + 1] or ([rest.arg] if rest else [])
            found.update(dict.fromkeys(names, origin))
        for keyword in call.keywords:
            origin = self.origin(source, keyword.value)
            if origin is None:
                continue
            if keyword.arg is None:
                found.update(dict.fromkeys(named, origin))
            elif keyword.arg in named:
                found[keyword.arg] = origin
            elif function.args.kwarg:
                found[function.args.kwarg.arg] = origin
        return found

    def _returned(self, source: _Source, scope: Scope) -> _Origin | None:
        """Return the read that a function's result depends on."""
        if isinstance(scope, ast.Lambda):
            return self.origin(source, scope.body)
        if isinstance(scope, (ast.ClassDef, ast.Module)):
            return None
        for node in _own_nodes(scope):
            if not isinstance(node, (ast.Return, ast.Yield)):
                continue
            found = self.origin(source, node.value) if node.value is not None else None
            if found is None and node.value is not None and isinstance(node, ast.Return):
                found = self._first(source, _guards(source, node, scope), 0)
                found = _as("flag", found) if isinstance(node.value, ast.Constant) else None
            if found:
                return found
        return None

    # Questions

    def decides(self, read: Read) -> tuple[str, str, int] | None:
        """Return the statement ("if", "while", "assert") that a read decides, with its file and line."""
        for scope, source in list(self._files.items()):
            for node in _own_nodes(scope):
                if isinstance(node, _TESTED):
                    found = self.origin(source, node.test)
                    if found and found.read == read:
                        name = "if" if isinstance(node, ast.IfExp) else type(node).__name__.lower()
                        return name, source.file, node.lineno
        return None

    def cause_of(self, error: BaseException, skipped: Sequence[str] = ()) -> Cause | None:
        """Return why an error was raised, if it was because of a read; files whose frames do not count are skipped."""
        seen: set[int] = set()
        each: BaseException | None = error
        while each is not None and id(each) not in seen:
            seen.add(id(each))
            found = self._cause(each, skipped)
            if found:
                return found
            each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
        return None

    def _cause(self, error: BaseException, skipped: Sequence[str]) -> Cause | None:
        frames = _frames_of(error.__traceback__, skipped)
        places: list[tuple[_Source | None, ast.AST | None, FrameType]] = []
        for frame, offset in frames:
            source = _source(frame.f_code, frame.f_globals)
            places.append((source, source.node_at(frame.f_code, offset) if source else None, frame))
        # From the outside in, so that parameters have the origins of their arguments.
        for (source, node, _), (inner_source, inner_node, inner_frame) in zip(
            places[:0:-1], places[-2::-1], strict=True
        ):
            if source and inner_source and inner_node is not None:
                self._pass_on(source, node, inner_source, inner_node, inner_frame)
        for number, (source, node, _) in enumerate(places):
            if source is None or node is None:
                if number == 0:
                    continue
                return None
            statement = source.statement_of(node)
            is_raised = isinstance(statement, (ast.Raise, ast.Assert)) or isinstance(error, SystemExit)
            if number == 0 and not is_raised:
                return self._of_failed_call(source, node, error)
            if number and isinstance(error, _PLAIN_ERRORS):
                return None
            guards = _guards(source, node, None)
            if isinstance(statement, ast.Assert) and number == 0:
                guards = [statement.test]
            for guard in guards:
                found = self.origin(source, guard)
                if found and found.kind != "text":
                    how: CauseKind = "exit" if isinstance(error, SystemExit) else "raise"
                    if isinstance(statement, ast.Assert):
                        how = "assert"
                    return Cause(source.file, getattr(node, "lineno", 0), how, found.read)
            if guards:
                return None
        return None

    def _pass_on(
        self, source: _Source, node: ast.AST | None, inner_source: _Source, inner: ast.AST, frame: FrameType
    ) -> None:
        """Give the parameters of a called function the origins of its arguments."""
        self._analyse(source, source.scope_of(node) if node is not None else source.tree)
        function: ast.AST = inner_source.scope_of(inner)
        values = self._scopes.setdefault(function, _Values())
        if isinstance(node, ast.Call) and isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            for parameter, origin in self._arguments(source, node, function, is_bound=False).items():
                values.names.setdefault(parameter, origin)
        if isinstance(function, _SCOPES):
            self._analyse(inner_source, function)

    def _of_failed_call(self, source: _Source, node: ast.AST, error: BaseException) -> Cause | None:
        """Return the cause of an error that no statement raised, if a value that was read may make this call fail."""
        found = None
        self._analyse(source, source.scope_of(node))
        if isinstance(error, _VALUE_ERRORS) and not isinstance(error, UnicodeError):
            if isinstance(error, ZeroDivisionError) and isinstance(node, ast.BinOp):
                found = self.origin(source, node.right)
            elif isinstance(error, LookupError) and isinstance(node, ast.Subscript):
                found = self.origin(source, node.slice)
            elif isinstance(node, ast.Call) and _last_name(node.func) not in ("format", "strftime"):
                found = self._first(source, [*node.args, *node.keywords], 0)
            elif isinstance(error, ArithmeticError):
                found = self.origin(source, node)
        if found is None and isinstance(error, (RuntimeError, ValueError, IndexError)):
            found = self.origin(source, node)
            if found and found.kind != "size":
                found = None
        if found is None or found.kind == "text":
            return None
        return Cause(source.file, getattr(node, "lineno", 0), "error", found.read)

    def is_endless(self, read: Read) -> tuple[str, int] | None:
        """Return the file and line of a loop around a read that can only end by values that were read."""
        for code, offset in read.places[:_DEEPEST]:
            source = _source(code)
            node = source.node_at(code, offset) if source else None
            if source is None or node is None:
                continue
            inner: ast.AST = node
            for parent in source.ancestors(node):
                if isinstance(parent, _LOOPS) and inner not in parent.orelse and self._depends(source, parent):
                    return source.file, parent.lineno
                inner = parent
        return None

    def _depends(self, source: _Source, loop: ast.While | ast.For | ast.AsyncFor) -> bool:
        exits = _exits(source, loop)
        if isinstance(loop, ast.While):
            is_forever = isinstance(loop.test, ast.Constant) and bool(loop.test.value)
            if not is_forever and not self._needs(source, loop.test, ending=False):
                return False
            if is_forever and not exits:
                return False  # nothing that was read keeps it from ending
        elif _last_name(getattr(loop.iter, "func", None)) not in _ENDLESS_ITERATORS or not exits:
            return False
        for exit_ in exits:
            guards = _guards(source, exit_, loop)
            if not any(self._needs(source, guard, ending=True) for guard in guards):
                return False
        return True

    def _needs(self, source: _Source, test: ast.expr, *, ending: bool) -> bool:
        """Whether a test becomes true (or false, unless `ending`) only by values that were read."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self._needs(source, test.operand, ending=not ending)
        if isinstance(test, ast.BoolOp) and test not in self._seeds:
            parts = [self._needs(source, value, ending=ending) for value in test.values]
            takes_all = isinstance(test.op, ast.And) == ending
            return any(parts) if takes_all else all(parts)
        if isinstance(test, ast.BoolOp):
            others = [value for value in test.values if self._is_direct(source, value)]
            takes_all = isinstance(test.op, ast.And) == ending
            return bool(others) if takes_all else len(others) == len(test.values)
        return self._is_direct(source, test)

    def _is_direct(self, source: _Source, node: ast.expr) -> bool:
        found = self.origin(source, node)
        return found is not None and not found.is_indirect


_RANKS = {"text": 1, "float": 3, "flag": 3, "values": 3, "int": 4, "size": 5}


def _rank(origin: _Origin) -> tuple[bool, int]:
    return not origin.is_indirect, _RANKS[origin.kind]


def _as(kind: str, origin: _Origin | None) -> _Origin | None:
    """Return the origin of a value of another kind; text and sizes stay what they are."""
    if origin is None or origin.kind == kind or (origin.kind in ("text", "size") and kind != "text"):
        return origin
    return replace(origin, kind=kind)


def _value_of(statement: ast.stmt) -> ast.expr | None:
    if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)):
        return statement.value
    return None


def _dotted(node: ast.AST | None) -> str:
    """Return "name" or "name.attribute" of an expression; "" for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def _last_name(node: ast.AST | None) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


@lru_cache(maxsize=8192)
def _own_nodes(scope: ast.AST) -> tuple[ast.AST, ...]:
    """Return the nodes of a function without those of functions and classes defined in it, in their order."""
    found: list[ast.AST] = []
    waiting = list(ast.iter_child_nodes(scope))[::-1]
    while waiting:
        node = waiting.pop()
        found.append(node)
        if not isinstance(node, _SCOPES):
            waiting += list(ast.iter_child_nodes(node))[::-1]
    return tuple(found)


@lru_cache(maxsize=2048)
def _bound_names(scope: ast.AST) -> frozenset[str]:
    return frozenset(
        node.id for node in _own_nodes(scope) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )


def _binds(scope: ast.AST, name: str) -> bool:
    """Whether a name is a parameter or assigned in a function."""
    if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        arguments = scope.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        if any(argument is not None and argument.arg == name for argument in every):
            return True
    return name in _bound_names(scope)


def _exits(source: _Source, loop: ast.AST) -> list[ast.AST]:
    """Return the statements in a loop's body that leave it: its own `break`, `return`, and calls that exit."""
    found = []
    for node in _own_nodes(loop):
        if isinstance(node, ast.Return) or _is_exit(node):
            found.append(node)
        elif isinstance(node, ast.Break):
            own = next(parent for parent in source.ancestors(node) if isinstance(parent, _LOOPS))
            if own is loop:
                found.append(node)
    return found


def _is_exit(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _last_name(node.value.func) in EXITS


def _guards(source: _Source, node: ast.AST, within: ast.AST | None) -> list[ast.expr]:
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
        elif isinstance(parent, _LOOPS) and inner in parent.orelse:
            for exit_ in _exits(source, parent):
                tests += _guards(source, exit_, parent)
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
            for leaving in [before, *_own_nodes(before)]:
                if _skips(source, leaving, around):
                    tests += _guards(source, leaving, before)
    return tests


def _skips(source: _Source, leaving: ast.AST, around: set[ast.AST]) -> bool:
    """Whether a statement leaves the function, or one of the loops around another statement."""
    if isinstance(leaving, (ast.Break, ast.Continue)):
        loop = next((parent for parent in source.ancestors(leaving) if isinstance(parent, _LOOPS)), None)
        return loop in around
    return isinstance(leaving, ast.Return) or _is_exit(leaving)


def _before(parent: ast.AST, child: ast.AST) -> list[ast.AST]:
    """Return the statements before one in its block."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and child in block:
            return list(block[: block.index(child)])
    return []


def _frames_of(traceback: TracebackType | None, skipped: Sequence[str]) -> list[tuple[FrameType, int]]:
    """Return the frames of a traceback with their instructions, innermost first."""
    found = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(tuple(skipped)):
            found.append((traceback.tb_frame, traceback.tb_lasti))
        traceback = traceback.tb_next
    return found[::-1]
