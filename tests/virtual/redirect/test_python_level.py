"""The redirection for platforms without the native library: the same ways of writing, in the test's own process."""

import builtins
import importlib
import io
import logging
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tonnage
from tonnage.virtual.redirect import Redirection
from tonnage.virtual.redirect.native_files import rebind
from tonnage.virtual.redirect.python_level import PythonRedirector
from virtual.redirect import ways
from virtual.redirect.folders import contents

UNSUPPORTED = {
    ways.copy_by_command: "a program that the script starts writes in place",
    ways.shell: "a program that the script starts writes in place",
    ways.shell_without_environment: "a program that the script starts writes in place",
    ways.python_child: "a program that the script starts writes in place",
    ways.spawned_workers: "a spawned process writes in place",
    ways.socket_file: "native code takes the path of a socket",
    ways.deepspeed: "DeepSpeed is installed apart from what the tests import",
    ways.at_exit: "it writes at the end of the process, which is that of the tests",
}
SUPPORTED = [way for way in ways.WITHOUT_TORCH if way not in UNSUPPORTED]
# They write with the functions of Python, torch and safetensors that other ways show.
SLOW = (ways.trainer, ways.lightning, ways.accelerate, ways.pretrained)
SUPPORTED_WITH_TORCH = [
    pytest.param(way, marks=[pytest.mark.slow] * (way in SLOW)) for way in ways.WITH_TORCH if way not in UNSUPPORTED
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "training"
    made.mkdir()
    ways.prepare(made)
    monkeypatch.chdir(made)
    return made


def redirection(keep: Path | None = None) -> Redirection:
    return Redirection(keep=keep, redirector=PythonRedirector())


@pytest.mark.parametrize("way", SUPPORTED, ids=lambda way: way.__name__)
def test_way_of_writing_leaves_files_unchanged(
    way: Callable[[], None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # those of pytest
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    before = contents(folder)
    with redirection() as redirected:
        way()
    assert contents(folder) == before
    assert redirected.writes is not None


@pytest.mark.parametrize("way", SUPPORTED_WITH_TORCH, ids=lambda way: way.__name__)
def test_way_of_saving_a_training_leaves_files_unchanged(way: Callable[[], None], folder: Path) -> None:
    before = contents(folder)
    with redirection() as redirected, tonnage.virtual_gpu("h200"):
        way()
    assert contents(folder) == before
    assert redirected.writes is not None
    assert redirected.writes.written_count > 0


def test_native_readers_of_tensors_see_what_was_written(folder: Path) -> None:
    values = torch.arange(6.0)
    with redirection():
        torch.save({"x": values}, "model.pt")
        assert torch.load("model.pt", mmap=True)["x"].equal(values)
        save_file({"x": values}, "model.safetensors")
        os.rename("model.safetensors", "latest/renamed.safetensors")
        assert load_file("latest/renamed.safetensors")["x"].equal(values)
        mapped = torch.from_file("data/part-1.bin", shared=True, size=4)
        mapped.fill_(1)
        assert Path("data/part-1.bin").read_bytes()[:16] == b"\0\0\x80?" * 4
        torch.jit.save(torch.jit.script(torch.nn.ReLU()), "relu.pt")
        assert torch.jit.load("relu.pt")(-values).sum() == 0
    assert Path("model.pt").read_bytes() == ways.ORIGINALS["model.pt"]
    assert Path("data/part-1.bin").read_bytes() == ways.ORIGINALS["data/part-1.bin"]
    assert not Path("relu.pt").exists()


def test_database_named_by_uri_is_a_copy(folder: Path) -> None:
    with redirection():
        with sqlite3.connect("file:runs.db?mode=rw", uri=True) as database:
            database.execute("DELETE FROM run")
        with sqlite3.connect("file:runs.db?mode=ro", uri=True) as database:
            assert database.execute("SELECT count(*) FROM run").fetchone() == (0,)
    with sqlite3.connect("runs.db") as database:
        assert database.execute("SELECT count(*) FROM run").fetchone() == (1,)


def test_written_files_are_listed_and_kept(folder: Path, tmp_path: Path) -> None:
    with redirection(keep=tmp_path / "kept") as redirected:
        ways.rename_original()
        Path("runs").mkdir()
        Path("runs/log.txt").write_text("x" * 100)
        shutil.rmtree("data")
    writes = redirected.writes
    assert writes is not None
    changes = {os.path.relpath(file.path, folder): file.change for file in writes.files}
    assert changes == {
        "model.pt": "changed",
        "model.old.pt": "new",
        "runs/log.txt": "new",
        "data/part-0.bin": "deleted",
        "data/part-1.bin": "deleted",
    }
    assert Path(tmp_path / "kept/model.old.pt").read_bytes() == ways.ORIGINALS["model.pt"]
    assert Path(tmp_path / "kept/runs/log.txt").stat().st_size == 100


def test_renamed_links_are_links(folder: Path, tmp_path: Path) -> None:
    with redirection(keep=tmp_path / "kept"):
        os.rename("latest", "newest")
        assert os.readlink("newest") == "checkpoints/checkpoint-1"
        Path("newest/notes.txt").write_text("new")
        assert os.path.realpath("newest/notes.txt") == f"{folder}/checkpoints/checkpoint-1/notes.txt"
        assert not os.path.lexists("latest")
    assert os.readlink(tmp_path / "kept/newest") == "checkpoints/checkpoint-1"


def test_paths_of_every_kind_lead_to_the_copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    before = contents(folder)
    with redirection():
        with open(b"model.pt", "wb") as file:
            file.write(b"new")
        assert os.readlink(b"latest") == b"checkpoints/checkpoint-1"
        assert sorted(entry.name for entry in os.scandir(b".")) == sorted(os.listdir(b"."))
        with io.FileIO("notes.txt", "a") as raw:
            raw.write(b"more")
        assert Path("latest/../../notes.txt").read_bytes() == b"written by hand\nmore"
        descriptor = os.open("data", os.O_RDONLY)
        with open("part", "wb", opener=lambda path, flags: os.open(path, flags, dir_fd=descriptor)) as file:
            file.write(b"x")
        os.close(descriptor)
        assert Path("data/part").read_bytes() == b"x"
        Path("written.py").write_text("VALUE = 3")
        assert importlib.import_module("written").VALUE == 3
    assert contents(folder) == before


def test_functions_are_restored_in_every_module(folder: Path) -> None:
    plain = [builtins.open, io.FileIO, os.open, os.stat, shutil.os.replace, sqlite3.connect]
    names = vars(tempfile)["_TemporaryFileCloser"].close.__defaults__
    with redirection():
        assert [builtins.open, io.FileIO, os.open, os.stat, shutil.os.replace, sqlite3.connect] != plain
        with open("model.pt") as file:
            assert isinstance(file.buffer.raw, io.FileIO)
    assert [builtins.open, io.FileIO, os.open, os.stat, shutil.os.replace, sqlite3.connect] == plain
    assert vars(tempfile)["_TemporaryFileCloser"].close.__defaults__ == names


def test_functions_that_classes_hold_are_replaced() -> None:
    class Globber:
        scandir = staticmethod(os.scandir)

        def close(self, unlink: object = os.unlink) -> object:
            return unlink

    rebind([(os.scandir, print), (os.unlink, len)], [Globber], within="none")
    assert Globber.scandir is print
    assert Globber().close() is len


def test_script_that_begins_again_finds_the_original_files(folder: Path) -> None:
    before = contents(folder)
    with redirection() as redirected:
        ways.remove_tree()
        redirected.empty()
        assert Path("latest/trainer_state.json").exists()
        ways.append()
    assert contents(folder) == before
    assert redirected.writes is not None
    assert [os.path.basename(file.path) for file in redirected.writes.files] == ["log.csv"]


def test_folder_that_the_script_made_is_left_at_the_end(folder: Path) -> None:
    with redirection():
        os.makedirs("runs/1")
        os.chdir("runs/1")
    assert Path.cwd() == folder


def test_errors_name_the_path_that_the_script_gave(folder: Path) -> None:
    with redirection():
        os.remove("notes.txt")
        with pytest.raises(FileNotFoundError) as missing:
            Path("notes.txt").read_text()
        with pytest.raises(IsADirectoryError) as is_folder:
            Path("data").write_text("x")
    assert os.fspath(missing.value.filename) == "notes.txt"
    assert os.fspath(is_folder.value.filename) == "data"


def test_redirection_within_another_is_the_outer_one(folder: Path) -> None:
    with redirection() as outer, redirection() as inner:
        ways.append()
    assert inner.writes is None
    assert outer.writes is not None
    assert outer.writes.written_count == 1
