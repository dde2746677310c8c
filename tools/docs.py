"""Make the outputs that README and docs/ print, by the commands that they name: `make docs` writes them, a test compares them.

    .venv/bin/python tools/docs.py [--check] [PAGE ...]

A comment before a fenced block says where the block comes from:

    <!-- output -->                          the commands in it, each after "$ ", are run and their output is put below them
    <!-- output of="COMMAND" -->             the output of that command; a command that the block shows is left as it is
    <!-- output before="COMMAND" -->         run that first, unseen
    <!-- output paragraphs="peak; launch" -->  of the output only the paragraphs whose first line has one of these words
    <!-- output varies="REGEX" -->           what differs from machine to machine, and is not compared
    <!-- output status="2" -->               how the command exits, where that is neither 0 nor 1
    <!-- output heavy="5 minutes" -->        too much for CI: made by `make docs`, not compared
    <!-- recorded: WHERE FROM -->            made elsewhere, on a GPU say: left as it is

The commands of a page run one after the other in an empty folder of their own, in which examples/, benchmarks/ and tests/
are those of the source tree. Every block without a language must say where it comes from.
"""

import argparse
import difflib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LENT = ("examples", "benchmarks", "tests")
TIME_LIMIT_S, HEAVY_TIME_LIMIT_S = 300, 3600
# Seconds that a command took on this machine.
VARIES = r"\bin \d+\.\d+ s\b"
_OPTIONS = {"of", "before", "heavy", "paragraphs", "varies", "status"}
_BLOCK = re.compile(r"^(?:<!-- (?P<origin>.+?) -->\n)?```(?P<language>\w*)\n(?P<body>.*?)^```$", re.M | re.S)


class WrongPage(Exception):
    """A block that cannot be made: the page, its line and why."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: where its text stands on the page, and how it is made."""

    page: Path
    line: int
    start: int
    end: int
    body: str
    options: dict[str, str] = field(default_factory=dict)

    def wrong(self, why: str) -> WrongPage:
        return WrongPage(f"{self.page.name}:{self.line}: {why}")

    def same(self, made: str) -> bool:
        """Whether the page has this already, but for what varies."""
        patterns = [VARIES, *([self.options["varies"]] if "varies" in self.options else [])]
        return _masked(self.body, patterns) == _masked(made, patterns)


def main() -> int:
    """Write the pages, or compare them; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 where a page differs from what runs"
    )
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES, metavar="PAGE")
    options = parser.parse_args()
    differing = 0
    for page in options.pages:
        began_s, text = time.monotonic(), page.read_text()
        try:
            made = made_anew(page, heavy=not options.check)
        except WrongPage as error:
            print(error, file=sys.stderr)
            return 2
        if made != text:
            differing += 1
            print(difference(page, text, made))
            if not options.check:
                page.write_text(made)
        if outputs(page):
            print(
                f"{page.name:20}{time.monotonic() - began_s:5.1f} s   {'differs' if made != text else 'same'}",
                flush=True,
            )
    return int(options.check and differing > 0)


def outputs(page: Path) -> list[Block]:
    """Read a page's blocks that commands make; a block of unknown origin is refused."""
    return list(_outputs(page, page.read_text()))


def _outputs(page: Path, text: str) -> Iterator[Block]:
    for match in _BLOCK.finditer(text):
        kind, _, words = (match["origin"] or "").partition(" ")
        line = text.count("\n", 0, match.start("body")) + 1
        block = Block(page, line, match.start("body"), match.end("body"), match["body"])
        if kind == "output":
            options = dict(word.partition("=")[::2] for word in shlex.split(words))
            if unknown := options.keys() - _OPTIONS:
                raise block.wrong(
                    f"unknown option {', '.join(sorted(unknown))}; there are {', '.join(sorted(_OPTIONS))}"
                )
            yield Block(page, line, block.start, block.end, block.body, options)
        elif kind != "recorded:" and not match["language"]:
            raise block.wrong("nobody knows where this block comes from: write <!-- output --> or <!-- recorded: … --> before it, "
                              "or give it a language")  # fmt: skip


def made_anew(page: Path, *, heavy: bool = True) -> str:
    """Run a page's commands; return its text with what they print."""
    text = page.read_text()
    with tempfile.TemporaryDirectory(prefix="tonnage-docs-") as folder:
        for name in LENT:
            (Path(folder) / name).symlink_to(ROOT / name)
        made = [
            (block, make(block, Path(folder)))
            for block in _outputs(page, text)
            if heavy or "heavy" not in block.options
        ]
    for block, body in reversed(made):
        if not block.same(body):
            text = text[: block.start] + body + text[block.end :]
    return text


def make(block: Block, folder: Path) -> str:
    """Make a block's text: each command that it shows, and its output."""
    options = block.options
    if "before" in options:
        _run(block, options["before"], folder)
    shown = re.findall(r"^\$ .*(?:(?<=\\)\n.*)*$", block.body, re.M)
    if not shown and "of" not in options:
        raise block.wrong('it shows no command: write <!-- output of="COMMAND" -->')
    statuses = (int(options["status"]),) if "status" in options else (0, 1)
    parts = []
    for number, command in enumerate(shown or [""], 1):
        unseen = options.get("of") if number == max(1, len(shown)) else None
        printed = _run(block, unseen or command.removeprefix("$ "), folder, statuses)
        # What is cut is the last command's: those before it prepare.
        if "paragraphs" in options and number == max(1, len(shown)):
            printed = _paragraphs(block, printed)
        parts += [command] * bool(command) + [printed] * bool(printed)
    return "\n".join(parts) + "\n"


def _run(block: Block, command: str, folder: Path, statuses: tuple[int, ...] = (0, 1)) -> str:
    """Run a command as a reader would in a terminal of 80 columns; return what it prints."""
    known = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "COLUMNS": "80",
        "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "LC_ALL": "C.UTF-8",
    }
    done = in_bash(command, folder, known, HEAVY_TIME_LIMIT_S if "heavy" in block.options else TIME_LIMIT_S)
    if done.returncode not in statuses:
        raise block.wrong(f"`{command}` exits {done.returncode}:\n{done.stdout}")
    for local in (ROOT, folder, Path(sys.prefix)):
        if str(local) in done.stdout:
            raise block.wrong(f"`{command}` prints a path of this machine, {local}:\n{done.stdout}")
    return "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines())


def in_bash(
    command: str, folder: Path, environment: dict[str, str], timeout_s: float
) -> "subprocess.CompletedProcess[str]":
    """Run a command in the shell. Tests, which have a faster way to run `tonnage`, put theirs in the place of this."""
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, text=True, timeout=timeout_s,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def _paragraphs(block: Block, printed: str) -> str:
    """Keep the paragraphs that are asked for; a line with "…" stands for those between."""
    wanted = [word.strip() for word in block.options["paragraphs"].split(";")]
    kept: list[str] = []
    found: set[str] = set()
    for paragraph in re.split(r"\n{2,}", printed.strip("\n")):
        matching = {word for word in wanted if word in paragraph.splitlines()[0]}
        found |= matching
        if matching:
            kept.append(paragraph)
        elif not kept or kept[-1] != "  …":
            kept.append("  …")
    if missing := [word for word in wanted if word not in found]:
        raise block.wrong(f"no paragraph begins with {', '.join(missing)} in:\n{printed}")
    joined = "\n\n".join(kept).replace("\n\n  …", "\n  …").replace("  …\n\n", "  …\n")
    return "\n" * (printed[0] == "\n" and kept[0] != "  …") + joined


def _masked(text: str, patterns: list[str]) -> str:
    for pattern in patterns:
        text = re.sub(pattern, "~", text)
    return text


def difference(page: Path, text: str, made: str) -> str:
    """Show what differs, line by line."""
    before, after = text.splitlines(), made.splitlines()
    return "\n".join(
        difflib.unified_diff(before, after, f"{page.name}, as it is", f"{page.name}, as it runs", lineterm="")
    )


if __name__ == "__main__":
    sys.exit(main())
