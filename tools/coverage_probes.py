"""Which lines of Tonnage the tests run, at a few per cent of their time, in whatever process runs them.

Before Python 3.12, coverage.py traces every line, which costs tests of the planner 30 to 100 % and does not see processes that end by
`os._exit`. Here each block of statements has a probe, a store into one byte of a mapped file, put in when the module is compiled;
`probes/sitecustomize.py` loads the modules so. coverage.py does the rest: it finds the statements and reports.

A block whose statements raise counts whole.
"""

import ast
import io
import json
import marshal
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

from coverage import Coverage, CoverageData

_LEFT_INSIDE = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.TryStar, ast.With, ast.AsyncWith, ast.Match)

_TRACED = (
    "fit/techniques/recompute.py",
)  # by torch.compile, as a part of the blocks of a model: a probe would end its graph


def prepare(package: Path, folder: Path) -> dict[str, str]:
    """Compile the modules of `package` with probes into `folder`; return the environment in which Python loads them."""
    blocks: list[tuple[str, list[int]]] = []
    for path in sorted(set(package.rglob("*.py")) - {package / name for name in _TRACED}):
        tree = ast.parse(path.read_bytes())
        for suite in list(_suites(tree)):
            _probe(suite, str(path), blocks)
        code = compile(ast.fix_missing_locations(tree), str(path), "exec")
        (folder / str(path).replace("/", "+")).write_bytes(marshal.dumps(code))
    (folder / "hits").write_bytes(bytes(len(blocks)))
    (folder / "blocks.json").write_text(json.dumps(blocks))
    paths = [str(Path(__file__).with_name("probes")), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"TONNAGE_PROBES": str(folder), "PYTHONPATH": os.pathsep.join(paths)}


def report(folder: Path, root: Path) -> list[str]:
    """Write the lines that ran to `.coverage`, print each package's share, and return the packages below their floors."""
    lines: dict[str, set[int]] = {}
    hits = (folder / "hits").read_bytes()
    for hit, (path, block) in zip(hits, json.loads((folder / "blocks.json").read_text()), strict=True):
        lines.setdefault(path, set()).update(block if hit else ())
    (root / ".coverage").unlink(missing_ok=True)
    data = CoverageData(str(root / ".coverage"))
    data.add_lines(lines)
    data.write()

    settings = tomllib.loads((root / "pyproject.toml").read_text())
    floors = settings["tool"]["tonnage"]["coverage-floors"]
    coverage = Coverage(str(root / ".coverage"), config_file=str(root / "pyproject.toml"))
    coverage.load()
    below = []
    for package, floor in floors.items():
        percent = coverage.report(include=[str(root / "src" / "tonnage" / package / "**")], file=io.StringIO())
        print(f"  {package:16}{percent:5.1f} % of statements run, at least {floor} %")
        if percent < floor:
            below.append(package)
    return below


def _suites(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """Every list of statements but those of functions that Triton compiles from their source."""
    if any("jit" in ast.unparse(decorator) for decorator in getattr(tree, "decorator_list", ())):
        return
    for name in ("body", "orelse", "finalbody"):
        if isinstance(suite := getattr(tree, name, None), list) and suite:
            yield suite
    for child in ast.iter_child_nodes(tree):
        yield from _suites(child)


def _probe(suite: list[ast.stmt], path: str, blocks: list[tuple[str, list[int]]]) -> None:
    """Put a probe before each run of statements that is left only at its end."""
    probed: list[ast.stmt] = []
    lines: list[int] = []
    has_probe = False
    for statement in suite:
        lines += [statement.lineno, *(decorator.lineno for decorator in getattr(statement, "decorator_list", ()))]
        # A docstring and imports from __future__ stay first.
        first = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        first |= isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if not (has_probe or first):
            target = ast.Subscript(ast.Name("__hits__", ast.Load()), ast.Constant(len(blocks)), ast.Store())
            probed.append(ast.copy_location(ast.Assign([target], ast.Constant(1)), statement))
            blocks.append((path, lines))
            has_probe = True
        probed.append(statement)
        if isinstance(statement, _LEFT_INSIDE):
            lines, has_probe = [], False
    suite[:] = probed
