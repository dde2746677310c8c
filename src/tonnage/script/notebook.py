"""Runs the cells of a notebook in order, in one namespace, as "Run all" would. Jupyter is not needed.

A cell's file is named "train.ipynb cell 3", counting code cells, so that tables and tracebacks show cell and line.
IPython itself translates its own syntax, and is needed only for cells that are not plain Python:

| in a cell                                  | here                                             |
|--------------------------------------------|--------------------------------------------------|
| `%%time`, `%%timeit`, `%%capture`, `%time` | the code they measure or capture runs once       |
| `%env A=b`, `%cd folder`, `%run file.py`   | done                                             |
| `%%writefile file`                         | written                                          |
| `!pip …`, `%pip …`, any other command      | not run, with a message                          |
| `%matplotlib inline`, any other magic      | skipped, with a message                          |
| the value of a last line                   | printed, and kept in `_` and `Out` as in IPython |
"""

import ast
import asyncio
import inspect
import json
import linecache
import os
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from tonnage.errors import MissingPart, ScriptNotFound

_RUN_ONCE = {"time", "timeit", "capture", "prun", "tonnage"}
_OPTIONS = re.compile(r"^(?:-\w+\s+(?:\d+\s+)?)+")  # such as in `%timeit -n 10 step()`


class Cell(NamedTuple):
    """One code cell: its number, its file name, and its text."""

    number: int
    file: str
    text: str


def read_cells(notebook: Path) -> list[Cell]:
    """Return the code cells, in order."""
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ScriptNotFound(
            f"{notebook} is not a notebook that can be read ({type(error).__name__}: {str(error)[:80]}).",
            hint="Save it again from Jupyter, in version 4 of the format.",
        ) from None
    texts = [text for text in texts if text.strip()]
    path = os.path.abspath(notebook)
    return [Cell(number, f"{path} cell {number}", text) for number, text in enumerate(texts, 1)]


def source_line(script: str, line: str) -> str:
    """Return the text of "train.py:88" or "train.ipynb cell 3:8"; "" if the script is missing or is another file."""
    name, _, number = line.rpartition(":")
    if not number.isdigit():
        return ""
    if os.path.basename(script) == os.path.basename(name):
        return linecache.getline(script, int(number)).strip()
    if not script.endswith(".ipynb") or not name.startswith(os.path.basename(script)):
        return ""
    try:
        cells = read_cells(Path(script))
    except (OSError, ScriptNotFound):
        return ""
    text = next((cell.text for cell in cells if os.path.basename(cell.file) == name), "")
    return dict(enumerate(text.splitlines(), 1)).get(int(number), "").strip()


def run_notebook(notebook: Path) -> None:
    """Run every cell; an error ends the run, as in Jupyter."""
    main = ModuleType("__main__")
    shell = _Shell(main.__dict__)
    main.__dict__.update(get_ipython=lambda: shell, display=_display, In=shell.inputs, Out=shell.outputs)
    before = sys.modules["__main__"]
    sys.modules["__main__"] = main
    try:
        for cell in read_cells(notebook):
            linecache.cache[cell.file] = (len(cell.text), None, cell.text.splitlines(keepends=True), cell.file)
            shell.run(cell)
    finally:
        sys.modules["__main__"] = before


class _Shell:
    """What `get_ipython()` returns in a cell: the namespace, its outputs, and the supported magics."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.user_ns = namespace
        self.inputs: list[str] = [""]
        self.outputs: dict[int, Any] = {}
        self._cell = Cell(0, "", "")

    def run(self, cell: Cell) -> None:
        """Run a cell and show the value of its last line."""
        self._cell = cell
        self.inputs.append(cell.text)
        text = self._without_cell_magics(cell.text)
        tree = ast.parse(_plain_python(text, cell), cell.file)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        self._evaluate(_compiled(tree, cell.file, "exec"))
        if isinstance(last, ast.Expr):
            value = self._evaluate(_compiled(ast.Expression(last.value), cell.file, "eval"))
            if value is not None and not text.rstrip().endswith(";"):
                # What a cell shows stays alive, and so does its memory.
                names = self.user_ns
                names["___"], names["__"], names["_"] = names.get("__"), names.get("_"), value
                names[f"_{self._cell.number}"] = self.outputs[self._cell.number] = value
                _display(value)

    def _evaluate(self, code: CodeType) -> Any:
        value = eval(code, self.user_ns)
        return asyncio.run(value) if code.co_flags & inspect.CO_COROUTINE else value

    def _without_cell_magics(self, text: str) -> str:
        """Remove leading `%%` lines; return "" if they make the cell something other than Python."""
        lines = text.split("\n")
        for place, line in enumerate(lines):
            if not line.strip():
                continue
            if not line.startswith("%%"):
                break
            name, _, rest = line[2:].strip().partition(" ")
            lines[place] = ""  # keeps the line numbers
            if name == "writefile":
                Path(rest.replace("-a", "").strip()).write_text("\n".join(lines[place + 1 :]).rstrip("\n") + "\n")
                return ""
            if name not in _RUN_ONCE:
                self._skip(f"%%{name}", "the cell is not Python")
                return ""
        return "\n".join(lines)

    # What IPython translates its own syntax to

    def run_line_magic(self, name: str, line: str, *_depth: Any, **__: Any) -> Any:
        if name in _RUN_ONCE:
            self._evaluate(_compiled(ast.parse(_OPTIONS.sub("", line), self._cell.file), self._cell.file, "exec"))
        elif name in ("env", "set_env") and "=" in line:
            key, _, value = line.partition("=")
            os.environ[key.strip()] = value.strip()
        elif name == "cd":
            os.chdir(os.path.expanduser(line.strip() or "~"))
        elif name == "run" and line.strip():
            script, *arguments = shlex.split(line)
            before, sys.argv = sys.argv, [script, *arguments]
            self.user_ns.update(runpy.run_path(script, run_name="__main__"))
            sys.argv = before
        else:
            self._skip(f"%{name} {line}".rstrip(), "it changes no memory of the GPU")

    magic = run_line_magic

    def system(self, command: str, *_: Any, **__: Any) -> None:
        """Report that `!command` is not run."""
        self._skip(f"!{command}", "commands of the shell are not run")

    def getoutput(self, command: str, *_: Any, **__: Any) -> list[str]:
        """Report that the command in `lines = !command` is not run, and return no lines."""
        self.system(command)
        return []

    def _skip(self, what: str, why: str) -> None:
        print(f"tonnage: cell {self._cell.number}: {what} is left out: {why}", file=sys.stderr)


def _compiled(tree: ast.AST, file: str, mode: str) -> CodeType:
    code: CodeType = compile(tree, file, mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)  # type: ignore[call-overload]
    return code


def _plain_python(text: str, cell: Cell) -> str:
    """Return the text as Python, with calls in place of IPython's syntax."""
    try:
        ast.parse(text)
        return text
    except SyntaxError:
        pass
    special = next((line.strip() for line in text.splitlines() if line.strip().startswith(("%", "!", "?"))), "")
    try:
        from IPython.core.inputtransformer2 import TransformerManager
    except ImportError:
        if not special:
            return text  # the cell's own syntax error, raised when it is compiled
        raise MissingPart(
            f"Cell {cell.number} has IPython's own syntax ({special}), and IPython is not installed.",
            hint="Install it: pip install ipython",
        ) from None
    return str(TransformerManager().transform_cell(text))


def _display(*values: Any, **_: Any) -> None:
    for value in values:
        print(repr(value))
