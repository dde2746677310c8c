"""The import rule: packages form no cycle, and inside one at most three modules do; lazy imports count."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import tonnage

SOURCE = Path(tonnage.__file__).parent
LARGEST_CYCLE = 3  # modules


def modules() -> dict[str, Path]:
    """Every module by its name, without the stand-ins for other libraries, which those libraries' users import."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        inside = path.relative_to(SOURCE)
        if inside.parts[:2] != ("virtual", "packages"):
            found[".".join(("tonnage", *inside.with_suffix("").parts)).removesuffix(".__init__")] = path
    return found


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules that a file imports, at its top or in a function, but not those for annotations alone."""
    waiting: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in known else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        waiting.extend(ast.iter_child_nodes(node))


def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: {other for other in imported(path, known) if other in known} - {name} for name, path in known.items()}


def reached(edges: Mapping[str, set[str]], start: str) -> set[str]:
    found, waiting = set[str](), [start]
    while waiting:
        new = edges[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def cycles(edges: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """Return the sets of nodes that all reach each other."""
    reach = {node: reached(edges, node) for node in edges}
    return {
        frozenset({other for other in reach[node] if node in reach[other]}) for node in edges if node in reach[node]
    }


def test_packages_form_no_cycle() -> None:
    packages: dict[str, set[str]] = {}
    for name, others in graph().items():
        package = ".".join(name.split(".")[:2])
        packages.setdefault(package, set()).update({".".join(other.split(".")[:2]) for other in others} - {package})
    del packages["tonnage"]  # its public names are loaded on first use, from every package
    assert cycles({name: others & set(packages) for name, others in packages.items()}) == set()


def test_inside_a_package_few_modules_form_a_cycle() -> None:
    assert {cycle for cycle in cycles(graph()) if len(cycle) > LARGEST_CYCLE} == set()


def test_a_cycle_is_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {frozenset("abc")}
