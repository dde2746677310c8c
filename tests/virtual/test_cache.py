"""Code is loaded only from where nobody else can write."""

import os
from pathlib import Path

import pytest

from tonnage.errors import MissingPart
from tonnage.virtual.cache import cache_folder, check_code
from tonnage.virtual.driver.build import library_folder
from tonnage.virtual.driver.loading import torch_root
from tonnage.virtual.loading import native_library

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
STRANGER = 54321


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, and a folder for temporary files."""
    monkeypatch.delenv("TONNAGE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_new_folder_is_private_whatever_the_umask(home: Path) -> None:
    before = os.umask(0)
    try:
        folder = cache_folder()
    finally:
        os.umask(before)
    assert folder == home / "cache" / "tonnage"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_where_the_usual_folder_is_not_safe_another_is_used(home: Path) -> None:
    cache_folder().chmod(0o775)
    other = cache_folder()
    assert other == home / "cache" / "tonnage-private"
    other.chmod(0o777)
    assert cache_folder() == home / f"tonnage-{os.geteuid()}"
    cache_folder().chmod(0o777)
    with pytest.raises(MissingPart, match="no folder that only you can write") as problem:
        cache_folder()
    assert "TONNAGE_CACHE" in problem.value.hint


@AS_ROOT
def test_a_folder_of_somebody_else_is_not_used(home: Path) -> None:
    os.chown(cache_folder(), STRANGER, -1)
    os.symlink(home, home / "cache" / "tonnage-private")
    os.lchown(home / "cache" / "tonnage-private", STRANGER, -1)
    assert cache_folder() == home / f"tonnage-{os.geteuid()}"


def test_a_named_folder_that_others_can_write_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = home / "shared"
    named.mkdir()
    named.chmod(0o1777)
    monkeypatch.setenv("TONNAGE_CACHE", str(named))
    with pytest.raises(MissingPart, match=r"shared, which can be written by others \(mode 1777\)"):
        cache_folder()
    named.chmod(0o755)
    assert cache_folder() == named


def test_a_built_library_that_others_can_write_is_not_loaded(tmp_path: Path) -> None:
    library = tmp_path / "tonnage-0.so"
    library.touch(mode=0o755)
    assert check_code(library) == library
    library.chmod(0o775)
    with pytest.raises(MissingPart, match="it is not loaded") as problem:
        check_code(library)
    assert f"rm -r {library}" in problem.value.hint
    with pytest.raises(MissingPart, match=r"tonnage-0\.so"):
        check_code(tmp_path)


@AS_ROOT
def test_a_library_of_somebody_else_is_not_loaded(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies where the one that would be built is looked for."""
    pytest.importorskip("torch")
    monkeypatch.setattr("tonnage.virtual.loading._build", lambda root, target: target.touch(mode=0o755))
    os.chown(native_library(torch_root()), STRANGER, -1)
    with pytest.raises(MissingPart, match=f"belongs to user {STRANGER}"):
        native_library(torch_root())


def test_what_is_built_here_is_safe_whatever_the_umask(home: Path) -> None:
    before = os.umask(0)
    try:
        folder = library_folder(13)
    finally:
        os.umask(before)
    assert folder.parent == home / "cache" / "tonnage"
