"""Where a program is: the script's own line, and the libraries' lines that it led to."""

import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from tonnage.script.lines import LineFinder, ScriptPlace
from tonnage.script.running import run_as_main

LIBRARY = Path(sysconfig.get_paths()["purelib"]) / "trainers" / "loop.py"


def compiled(source: str, file: Path | str) -> dict[str, Callable[..., ScriptPlace]]:
    names: dict[str, Callable[..., ScriptPlace]] = {}
    exec(compile(source, str(file), "exec"), names)
    return names


def here(finder: LineFinder) -> Callable[[], ScriptPlace]:
    return lambda: finder.find(sys._getframe(1))


def test_a_library_that_the_script_called_is_told_beside_the_scripts_line(tmp_path: Path) -> None:
    library = compiled("def train(step):\n    return step()\n", LIBRARY)
    script = compiled("def main(train, step):\n\n    return train(step)\n", tmp_path / "run.py")
    place = script["main"](library["train"], here(LineFinder()))
    assert place.line == "run.py:3"
    assert place.stack[:2] == ("trainers/loop.py:2", "run.py:3")


def test_a_callback_of_the_script_is_its_innermost_line(tmp_path: Path) -> None:
    library = compiled("def train(step, find):\n    return step(find)\n", LIBRARY)
    script = compiled(
        "def step(find):\n    return find()\ndef main(train, find):\n    return train(step, find)\n",
        tmp_path / "run.py",
    )
    place = script["main"](library["train"], here(LineFinder()))
    assert place.line == "run.py:2"
    assert place.stack[:3] == ("run.py:2", "trainers/loop.py:2", "run.py:4")


def test_lines_of_torch_and_of_python_itself_are_left_out(tmp_path: Path) -> None:
    torch = compiled("def call(find):\n    return find()\n", LIBRARY.parent.parent / "torch" / "nn" / "module.py")
    script = compiled("def main(call, find):\n    return call(find)\n", tmp_path / "run.py")
    assert script["main"](torch["call"], here(LineFinder())).stack[0] == "run.py:2"


def test_code_that_cannot_be_hashed_has_a_line(tmp_path: Path) -> None:
    def at(find: Callable[[], ScriptPlace]) -> ScriptPlace:
        return find()

    # torch.compile puts dictionaries among the constants of the code that it generates, and such code has no hash
    at.__code__ = at.__code__.replace(co_consts=(*at.__code__.co_consts, {}), co_filename=str(tmp_path / "run.py"))
    assert at(here(LineFinder())).line.startswith("run.py:")


def test_what_started_us_is_not_the_scripts(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text("import sys\nsys.modules['places'].append(sys.modules['finder'].find(sys._getframe()))\n")
    places: list[ScriptPlace] = []
    sys.modules |= {"places": places, "finder": LineFinder()}  # type: ignore[dict-item]
    try:
        run_as_main(script, [], SimpleNamespace(OutOfMemoryError=MemoryError))
    finally:
        del sys.modules["places"], sys.modules["finder"]
    assert places == [ScriptPlace("run.py:2", ("run.py:2",))]
