"""Scripts, modules and notebooks run as Python and Jupyter would run them."""

import json
import os
import py_compile
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tonnage.errors import ScriptNotFound
from tonnage.script.notebook import read_cells, source_line
from tonnage.script.running import Ending, Program, run_as_main

TORCH = SimpleNamespace(OutOfMemoryError=MemoryError)
NOTEBOOK = Path(__file__).parent / "programs" / "train.ipynb"


def notebook(path: Path, *cells: str) -> Path:
    code = [{"cell_type": "code", "metadata": {}, "outputs": [], "source": text.splitlines(True)} for text in cells]
    path.write_text(json.dumps({"cells": code, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


def run(program: Program | Path, *arguments: str) -> Ending:
    return run_as_main(program, list(arguments), TORCH)


def test_a_module_runs_as_python_m_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "launched").mkdir()
    (tmp_path / "launched" / "__init__.py").write_text("raise_if_looked_at = True\n")
    (tmp_path / "launched" / "sizes.py").write_text("ROWS = 4\n")
    (tmp_path / "launched" / "train.py").write_text(
        "import sys\nfrom .sizes import ROWS\nprint(__name__, __package__, ROWS, sys.argv)\n"
    )
    monkeypatch.chdir(tmp_path)
    program = Program("launched.train", "module", ("-m", "launched.train")).check()
    assert "launched" not in sys.modules, "looked for without importing it"
    assert program.file == tmp_path / "launched" / "train.py"
    assert run(program, "--rows", "8") == Ending("ok")
    assert capsys.readouterr().out == f"__main__ launched 4 {[str(program.file), '--rows', '8']}\n"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (Program("json.nothing", "module"), "no module json.nothing"),
        (Program("json", "module"), "no module json to run"),  # a package without __main__
        (Program("nowhere.py"), "no script at nowhere.py: found nothing"),
    ],
)
def test_what_is_not_there_is_refused(program: Program, words: str) -> None:
    with pytest.raises(ScriptNotFound, match=words):
        program.check()


def test_a_script_of_the_shell_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("torchrun train.py\n")
    with pytest.raises(ScriptNotFound, match="of the shell") as problem:
        Program.of_file(tmp_path / "train.sh").check()
    assert "torchrun" in problem.value.hint


@pytest.mark.parametrize("first_line", ["#!/bin/sh", "#!/usr/bin/env bash", "#! /usr/bin/zsh -l"])
def test_a_script_of_the_shell_without_a_suffix_is_refused(tmp_path: Path, first_line: str) -> None:
    (tmp_path / "train").write_text(f"{first_line}\npython train.py\n")
    with pytest.raises(ScriptNotFound, match="of the shell"):
        Program.of_file(tmp_path / "train").check()


def test_what_python_runs_is_not_refused(tmp_path: Path) -> None:
    """Whatever its first line or bytes."""
    (tmp_path / "train").write_text("#!/usr/bin/env python3\n")
    (tmp_path / "both.py").write_text("#!/bin/sh\n")
    (tmp_path / "source.py").write_text("import math\n")
    py_compile.compile(str(tmp_path / "source.py"), cfile=str(tmp_path / "compiled.pyc"))
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", "import math\n")
    for name in ("train", "both.py", "compiled.pyc", "app.pyz"):
        program = Program.of_file(tmp_path / name).check()
        assert run(program) == Ending("ok"), name


def test_what_cannot_be_a_script_is_refused_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.bin").write_bytes(b"\x00\x01")
    with pytest.raises(ScriptNotFound, match="is a binary file"):
        Program.of_file(tmp_path / "model.bin").check()
    (tmp_path / "train.py").write_text("pass\n")
    with pytest.raises(ScriptNotFound, match="found nothing") as problem:
        Program.of_file(f"{tmp_path}/train.py --batch 8").check()
    assert "Leave out the quotes" in problem.value.hint
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ScriptNotFound, match="may not be read") as problem:
        Program.of_file(tmp_path / "train.py").check()
    assert "chmod u+r" in problem.value.hint


def test_the_folder_is_as_before_though_the_script_leaves_it(tmp_path: Path) -> None:
    (tmp_path / "leave.py").write_text("import os\nos.chdir('/')\n")
    before = os.getcwd()
    run(tmp_path / "leave.py")
    assert os.getcwd() == before


def test_a_program_knows_its_path_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("pass\n")
    monkeypatch.chdir(tmp_path)
    program = Program.of_file("train.py")
    monkeypatch.chdir("/")
    assert program.header == {
        "script": str(tmp_path / "train.py"), "command": (str(tmp_path / "train.py"),), "folder": str(tmp_path),
    }  # fmt: skip


# Notebooks


def test_cells_share_a_namespace_and_show_their_last_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = notebook(
        tmp_path / "n.ipynb", "import os\nx = 2", "x + 1", "_ + 1;", "", "print(_, Out, os.getcwd(), __name__)"
    )
    assert run(path).outcome == "ok"
    assert capsys.readouterr().out == f"3\n3 {{2: 3}} {tmp_path} __main__\n"


def test_magics_do_what_they_can_and_say_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("IPython")
    path = notebook(
        tmp_path / "n.ipynb",
        "%matplotlib inline\n!pip install x\n%env TONNAGE_TEST=7\nfiles = !ls",
        "%%time\ny = 1",
        "%time y += 1\n%timeit -n 10 -r 3 y",
        "%%bash\nrm -rf nothing",
        "%%writefile part.py\nZ = 5",
        "from part import Z\nimport os\nprint(y, Z, files, os.environ.pop('TONNAGE_TEST'))",
    )
    assert run(path).error == ""
    said = capsys.readouterr()
    assert said.out == "2 5 [] 7\n"
    for words in (
        "cell 1: %matplotlib inline is left out",
        "cell 1: !pip install x is left out",
        "cell 4: %%bash is left out",
    ):
        assert words in said.err


def test_an_error_names_cell_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = notebook(tmp_path / "n.ipynb", "x = 1", "def f():\n    raise ValueError('no')\n\nf()", "print('later')")
    assert run(path) == Ending("error", 1, "ValueError: no")
    said = capsys.readouterr()
    assert f'"{path} cell 2", line 2, in f' in said.err and "raise ValueError('no')" in said.err
    assert "notebook.py" not in said.err and said.out == ""


def test_a_cell_may_await(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = notebook(tmp_path / "n.ipynb", "import asyncio\nawait asyncio.sleep(0)\nawait asyncio.sleep(0, 'done')")
    assert run(path).outcome == "ok"
    assert capsys.readouterr().out == "'done'\n"


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"cells": [{"cell_type": "code"}]}', '{"cells": 3}', "[" * 100_000])
def test_what_is_no_notebook_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "n.ipynb").write_text(text)
    with pytest.raises(ScriptNotFound, match="not a notebook that can be read"):
        read_cells(tmp_path / "n.ipynb")
    with pytest.raises(ScriptNotFound, match="not a notebook that can be read"):
        Program.of_file(tmp_path / "n.ipynb").check()  # and so before the run


def test_the_text_of_a_line_is_found_in_its_cell() -> None:
    assert source_line(str(NOTEBOOK), "train.ipynb cell 3:3") == "hidden.square().mean().backward()"
    assert source_line(str(NOTEBOOK), "train.ipynb cell 9:3") == ""
    assert source_line(__file__, f"{Path(__file__).name}:1").startswith('"""Scripts, modules')
