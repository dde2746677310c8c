"""Every module with behaviour has a test of its name, or says which tests stand for it."""

import ast
import tomllib
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "tonnage"
ELSEWHERE: dict[str, str] = tomllib.loads((TESTS / "tested_elsewhere.toml").read_text())


@cache
def with_behaviour() -> set[str]:
    """Modules that define a function or a method."""
    return {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if any(
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(ast.parse(path.read_text()))
        )
    }


def mirrored(module: str) -> Path:
    """Where its test would be: tests/report/test_lines.py for report/lines.py, tests/fit/test_fit.py for fit/__init__.py."""
    path = Path(module)
    return TESTS / path.parent / f"test_{path.parent.name if path.stem == '__init__' else path.stem}.py"


def test_every_module_has_a_test_of_its_name_or_is_listed() -> None:
    missing = {module for module in with_behaviour() if not mirrored(module).exists()} - ELSEWHERE.keys()
    assert not missing, (
        f"give these a test of their name, or say in tested_elsewhere.toml what tests them: {sorted(missing)}"
    )


def test_the_list_has_only_what_it_must_and_names_tests_that_are_there() -> None:
    needless = [module for module in ELSEWHERE if module not in with_behaviour() or mirrored(module).exists()]
    assert not needless, f"these need no line in tested_elsewhere.toml: {needless}"
    gone = [tests for tests in ELSEWHERE.values() if not (TESTS / tests).exists()]
    assert not gone, f"tested_elsewhere.toml names tests that are not there: {gone}"
