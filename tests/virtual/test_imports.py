"""Imports that take less time: without collection, and packages that wait until they are needed."""

import gc
import subprocess
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

import pytest

from tonnage.virtual.imports import lazily, quick_imports, release


def test_an_import_statement_runs_without_collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asks_gc.py").write_text("import gc\nduring = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with quick_imports():
        import asks_gc  # type: ignore[import-not-found]

        assert gc.isenabled()
    assert asks_gc.during is False


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package that notes in `sys` when its code runs."""
    package = tmp_path / "heavy"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import sys\nsys.heavy_ran = True\nfrom .parts import weight\nanswer = 42\ndisable = 'its own'\n"
    )
    (package / "parts.py").write_text("weight = 7\n")
    (package / "config.py").write_text("verbose = False\n")
    monkeypatch.setattr(sys, "heavy_ran", False, raising=False)
    for name in ("heavy", "heavy.parts", "heavy.config"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = lazily(PathFinder.find_spec("heavy", [str(tmp_path)]), {"disable": "known beforehand"})
    assert spec
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "heavy", module)
    assert spec.loader
    spec.loader.exec_module(module)
    return module


def ran() -> bool:
    return bool(sys.heavy_ran)  # type: ignore[attr-defined]


def test_a_waiting_package_answers_what_is_known_without_running(waiting: ModuleType) -> None:
    assert waiting.disable == "known beforehand"
    assert not ran()


def test_its_submodules_import_without_it(waiting: ModuleType) -> None:
    from heavy.parts import weight  # type: ignore[import-not-found]

    assert weight == 7
    assert waiting.config.verbose is False
    assert not ran()


def test_any_other_name_runs_it_once_for_all(waiting: ModuleType) -> None:
    assert waiting.answer == 42
    assert ran()
    assert waiting.weight == 7
    assert waiting.disable == "its own"


def test_once_released_it_answers_for_itself(waiting: ModuleType) -> None:
    release("heavy")
    assert waiting.disable == "its own"
    assert ran()


def test_who_waits_for_it_is_told_when_it_has_run(tmp_path: Path) -> None:
    (tmp_path / "heavier.py").write_text("answer = 43\n")
    told: list[int] = []
    spec = lazily(PathFinder.find_spec("heavier", [str(tmp_path)]), {}, lambda module: told.append(module.answer))
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not told
    assert module.answer == 43
    assert told == [43]


def test_a_name_that_is_nowhere_is_an_attribute_error(waiting: ModuleType) -> None:
    with pytest.raises(AttributeError):
        _ = waiting.nothing_of_the_kind
    assert not hasattr(waiting, "__wrapped__")


COMPILER_ASKED = """
import sys, torch
model = torch.nn.Linear(8, 8, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
torch.utils.checkpoint.checkpoint(model, torch.ones(4, 8, device="cuda"), use_reentrant=False).sum().backward()
optimizer.step()
optimizer.zero_grad()
print("ran" if "torch._dynamo.eval_frame" in sys.modules else "spared")
torch.compiler.reset()
torch._dynamo.eval_frame
print("ran" if "torch._dynamo.eval_frame" in sys.modules else "spared")
"""


def test_a_training_step_does_not_load_the_compiler_and_a_script_that_asks_gets_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(COMPILER_ASKED)
    command = [str(Path(sys.executable).parent / "tonnage"), "run", "--gpu", "h200", "--json", "-", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.split()[:2] == ["spared", "ran"]
