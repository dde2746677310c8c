"""What README and docs/ print is what their commands print, and the tool that sees to it works."""

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forked_runs import run_forked

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("docs_tool", ROOT / "tools" / "docs.py")
assert spec and spec.loader
docs = importlib.util.module_from_spec(spec)
sys.modules["docs_tool"] = docs  # dataclasses look themselves up there
spec.loader.exec_module(docs)

PINNED = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)[1]  # type: ignore[index]
MADE = [page for page in docs.PAGES if docs.outputs(page)]


# Words of one call of `tonnage`, without anything that the shell reads; and where its messages go.
CALL = re.compile(r"tonnage ([^|;&<>$`(){}*?~#\[\]]+?)( 2>/dev/null| 2>&1)?")


def forked_or_in_bash(
    command: str, folder: Path, environment: dict[str, str], timeout_s: float
) -> "subprocess.CompletedProcess[str]":
    """Calls of `tonnage` are forks of a process that has loaded it and torch; all other commands are the shell's."""
    calls = [CALL.fullmatch(part.strip()) for part in command.replace("\\\n", "").split(";")]
    if not all(calls):
        return IN_BASH(command, folder, environment, timeout_s)
    said = ""
    for call in filter(None, calls):
        options = {"env": environment, "cwd": folder, "timeout_s": timeout_s, "of_many": True}
        tonnage = Path(sys.executable).with_name("tonnage")
        done = run_forked(tonnage, shlex.split(call[1]), joined=call[2] != " 2>/dev/null", **options)
        said += done.stdout
    return subprocess.CompletedProcess(command, done.returncode, said)


IN_BASH = docs.in_bash


def page(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text(text)
    return path


@pytest.mark.skipif(
    torch.__version__.split("+")[0] != PINNED, reason=f"outputs name torch {PINNED}; this is {torch.__version__}"
)
@pytest.mark.parametrize("path", MADE, ids=lambda path: path.name)
def test_outputs_are_those_of_their_commands(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs, "in_bash", forked_or_in_bash)
    made, text = docs.made_anew(path, heavy=False), path.read_text()
    assert made == text, "run `make docs`:\n" + docs.difference(path, text, made)


def test_every_verb_s_page_has_an_output_or_says_where_it_was_recorded() -> None:
    """Reading a page refuses blocks of unknown origin: this reads all of them."""
    assert len(MADE) >= 12


def test_commands_are_run_and_their_output_is_put_below_them(tmp_path: Path) -> None:
    path = page(tmp_path, "<!-- output -->\n```\n$ echo one\nold\n$ echo two \\\n    three\n```\n")
    assert docs.made_anew(path) == "<!-- output -->\n```\n$ echo one\none\n$ echo two \\\n    three\ntwo three\n```\n"


def test_commands_of_a_page_share_a_folder_that_has_the_examples(tmp_path: Path) -> None:
    path = page(tmp_path, '<!-- output before="echo kept > file" of="cat file; ls examples" -->\n```\n```\n')
    assert "kept\n" in docs.made_anew(path)
    assert "train_gpt.py\n" in docs.made_anew(path)


def test_what_varies_is_not_compared(tmp_path: Path) -> None:
    text = '<!-- output varies="[0-9]+ MB" -->\n```\n$ echo 7 MB in 0.25 s\n5 MB in 0.11 s\n```\n'
    assert docs.made_anew(page(tmp_path, text)) == text
    assert docs.made_anew(page(tmp_path, text.replace("5 MB", "5 GB"))).count("7 MB in 0.25 s") == 2


def test_paragraphs_that_are_left_out_are_marked(tmp_path: Path) -> None:
    text = '<!-- output paragraphs="two" of="printf \'one\\n\\ntwo\\n2\\n\\nthree\\n\'" -->\n```\n```\n'
    assert "```\n  …\ntwo\n2\n  …\n```" in docs.made_anew(page(tmp_path, text))
    with pytest.raises(docs.WrongPage, match="no paragraph begins with four"):
        docs.made_anew(page(tmp_path, text.replace('"two"', '"four"')))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("```\nsome output\n```\n", r"page.md:2: nobody knows where this block comes from"),
        ("<!-- output -->\n```\nsome output\n```\n", "it shows no command"),
        ("<!-- output color=1 -->\n```\n$ true\n```\n", "unknown option color"),
        ("<!-- output -->\n```\n$ exit 2\n```\n", "`exit 2` exits 2"),
        ("<!-- output -->\n```\n$ pwd\n```\n", "`pwd` prints a path of this machine"),
    ],
)
def test_a_block_that_cannot_be_made_is_named(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(docs.WrongPage, match=why):
        docs.made_anew(page(tmp_path, text))


def test_recorded_and_heavy_blocks_stay_as_they_are(tmp_path: Path) -> None:
    text = '<!-- recorded: on an H200 -->\n```\n$ exit 3\n```\n<!-- output heavy="an hour" -->\n```\n$ exit 3\n```\n'
    assert docs.made_anew(page(tmp_path, text), heavy=False) == text
