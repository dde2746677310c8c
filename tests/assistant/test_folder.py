from pathlib import Path

import pytest

from snapshots import DATA
from support import training_run
from tonnage.assistant.session import Folder, is_text
from tonnage.errors import RequestError
from tonnage.recording import write_recording


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    root, session = tmp_path / "project", tmp_path / "session"
    root.mkdir()
    session.mkdir()
    (session / "run-1.tonnage").touch()
    (root / "out").symlink_to("/etc")
    return Folder(root, session)


def test_files_are_found_below_the_root_and_in_the_session_by_name(folder: Folder) -> None:
    assert folder.file("sub/a.tonnage") == folder.root / "sub" / "a.tonnage"
    assert folder.file("sub/../a.tonnage") == folder.root / "a.tonnage"
    assert folder.file("run-1.tonnage") == folder.session / "run-1.tonnage"
    assert folder.file(str(folder.session / "run-1.tonnage")) == folder.session / "run-1.tonnage"
    assert folder.new("run", ".tonnage") != folder.new("run", ".tonnage")
    assert folder.pasted("half a character: \ud800").read_text() == "half a character: ?"


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x", "out/passwd", "~/x", "~nobody-at-all/x", "a\0b", "x" * 9999, "", " ", "sub/../../x"]
)
def test_what_leads_out_is_refused(folder: Folder, name: str) -> None:
    with pytest.raises(RequestError):
        folder.file(name)


@pytest.mark.parametrize(
    "word",
    [
        "/etc/passwd",
        "--lengths=/etc/passwd",
        "512,/etc/passwd",
        "'/etc/passwd' --users 4",
        "\\/etc/passwd",
        "mean ../x",
        "out/mine.toml",
    ],
)
def test_words_that_name_files_elsewhere_are_refused(folder: Folder, word: str) -> None:
    with pytest.raises(RequestError):
        folder.check([word])


def test_words_that_are_no_paths_pass(folder: Folder) -> None:
    folder.check(
        ["--drive", "7g/s", "meta-llama/Llama-3.1-8B", "optimizer:nvme", "mean 600 max 4096", "", "5%", "config.json"]
    )


def test_logs_are_told_from_recordings_and_snapshots(folder: Folder) -> None:
    write_recording(folder.root / "a.tonnage", training_run(batch=4))
    assert is_text(folder.pasted("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert not is_text(folder.root / "a.tonnage") and not is_text(folder.root / "none")
    assert not any(is_text(path) for path in DATA.glob("*.pickle*"))
