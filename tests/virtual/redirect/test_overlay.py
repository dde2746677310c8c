"""The overlay behaves as a file system: any sequence of calls has the results and errors that it has in a real folder."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tonnage.virtual.redirect import Redirection
from tonnage.virtual.redirect.native_library import NativeRedirector
from tonnage.virtual.redirect.python_level import PythonRedirector
from tonnage.virtual.redirect.redirection import Redirector

ORIGINALS = {"a": "a", "d/a": "da", "d/b": "db", "d/e/a": "dea", "f/a": "fa"}
PATHS = ["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a", "d/e/b", "f", "f/a", "f/e", "l", "l/a", "g", "g/a", "d/../a"]
paths = st.sampled_from(PATHS)


def make(folder: Path) -> None:
    for name, text in ORIGINALS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "l").symlink_to("d")


def write(path: str, mode: str) -> str:
    with open(path, mode) as file:
        file.write("new")
    return Path(path).read_text()


def listing(path: str) -> list[tuple[str, bool, bool]]:
    with os.scandir(path) as entries:
        return sorted((e.name, e.is_dir(follow_symlinks=False), e.is_file()) for e in entries)


def kind(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_mode, 0 if os.path.isdir(path) else status.st_size


def function(name: str) -> Callable[..., Any]:
    """A function of `os`, looked up when it is called: a redirection may replace it."""
    return lambda *arguments: getattr(os, name)(*arguments)


CALLS: dict[str, Callable[..., Any]] = {
    "unlink": function("unlink"),
    "rmdir": function("rmdir"),
    "mkdir": function("mkdir"),
    "list": listing,
    "kind": kind,
    "read": lambda path: Path(path).read_text(),
    "readlink": function("readlink"),
    "rmtree": shutil.rmtree,
    "truncate": lambda path: os.truncate(path, 1),
    "exists": os.path.exists,
    "realpath": lambda path: os.path.relpath(os.path.realpath(path)),
}
PAIRS: dict[str, Callable[..., Any]] = {
    "rename": function("rename"),
    "replace": function("replace"),
    "symlink": function("symlink"),
    "copy": lambda source, target: shutil.copyfile(source, target) and None,
    "link": function("link"),
}
call = st.one_of(
    st.tuples(st.sampled_from(sorted(CALLS)), paths),
    st.tuples(st.sampled_from(sorted(PAIRS)), paths, paths),
    st.tuples(st.just("write"), paths, st.sampled_from(["w", "a", "x", "r+", "w+"])),
)
FUNCTIONS = {**CALLS, **PAIRS, "write": write}


def result(words: tuple[str, ...]) -> object:
    """What the call returns, or its error."""
    try:
        return FUNCTIONS[words[0]](*words[1:])
    except shutil.SameFileError:
        return "same file"
    except OSError as error:
        # Below a file or a link to itself there is nothing: which error says so depends on how the path is looked up.
        return errno.ENOENT if error.errno in (errno.ENOTDIR, errno.ELOOP) else error.errno
    except RecursionError:
        return "recursion"


def content(path: str) -> str | None:
    if os.path.islink(path):
        return os.readlink(path)
    return None if os.path.isdir(path) else Path(path).read_text()


def tree(folder: str) -> list[tuple[str, object]]:
    """Every entry, with its text or target."""
    found = []
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = os.path.join(parent, name)
            found.append((os.path.relpath(path, folder), content(path)))
    return sorted(found, key=str)


@pytest.fixture(scope="module")
def folders() -> Iterator[tuple[Path, Path]]:
    """A folder that is redirected, and one that is written in place."""
    start = Path.cwd()
    with tempfile.TemporaryDirectory() as redirected, tempfile.TemporaryDirectory() as real:
        yield Path(os.path.realpath(redirected)), Path(os.path.realpath(real))
        os.chdir(start)


@pytest.mark.parametrize("redirector", [NativeRedirector, PythonRedirector])
@settings(max_examples=200, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(calls=st.lists(call, max_size=14))
def test_overlay_behaves_as_a_real_folder(
    redirector: type[Redirector], folders: tuple[Path, Path], calls: list[tuple[str, ...]]
) -> None:
    redirected, real = folders
    for folder in folders:
        shutil.rmtree(folder)
        folder.mkdir()
        make(folder)
    before = tree(str(redirected))
    redirection = Redirection(redirector=redirector())
    redirection.write_through(real)
    start = Path.cwd()
    try:
        with redirection:
            for words in calls:
                outcomes = []
                for folder in (real, redirected):
                    os.chdir(folder)
                    outcomes.append(result(words))
                assert outcomes[0] == outcomes[1], words
            assert tree(str(redirected)) == tree(str(real))
    finally:
        os.chdir(start)
    assert tree(str(redirected)) == before
