"""What a script left in the scratch folder, and where it is kept."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tonnage.virtual.redirect.scratch import ScratchFolder, summary


@pytest.fixture
def scratch() -> Iterator[ScratchFolder]:
    made = ScratchFolder()
    made.prepare([], [])
    yield made
    made.remove()


def write(scratch: ScratchFolder, path: Path, text: str) -> None:
    copy = scratch.path / "files" / path.relative_to("/")
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(text)


def delete(scratch: ScratchFolder, path: Path) -> None:
    (scratch.path / "gone" / str(len(os.listdir(scratch.path / "gone")))).write_text(str(path))


def test_changes_are_new_changed_and_deleted_files_the_largest_first(scratch: ScratchFolder, tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_text("old")
    (tmp_path / "log").write_text("log")
    write(scratch, tmp_path / "log", "longer")
    write(scratch, tmp_path / "new" / "model.pt", "the model")
    write(scratch, tmp_path / "__pycache__" / "module.pyc", "compiled")
    delete(scratch, tmp_path / "old.pt")
    delete(scratch, tmp_path / "log")  # and written again
    delete(scratch, tmp_path / "never.pt")
    found = [(file.change, file.path, file.size_bytes) for file in scratch.changes(tmp_path)]
    assert found == [
        ("new", str(tmp_path / "new" / "model.pt"), 9),
        ("changed", str(tmp_path / "log"), 6),
        ("deleted", str(tmp_path / "old.pt"), 0),
    ]


def test_files_of_tempfile_are_left_out_unless_the_script_is_among_them(scratch: ScratchFolder) -> None:
    temporary = Path("/tmp/tmpabcdefgh")
    write(scratch, temporary / "x", "x")
    write(scratch, Path("/tmp/results/x"), "x")
    assert [file.path for file in scratch.changes(Path("/home/me"))] == ["/tmp/results/x"]
    assert len(scratch.changes(temporary)) == 2


def test_kept_files_have_their_path_in_the_folder_or_under_absolute(scratch: ScratchFolder, tmp_path: Path) -> None:
    inside, kept = tmp_path / "training", tmp_path / "kept"
    inside.mkdir()
    (tmp_path / "renamed.pt").write_text("the original")
    write(scratch, inside / "runs" / "log", "log")
    write(scratch, Path("/data/cache"), "cache")
    copies = scratch.path / "files" / inside.relative_to("/")
    (copies / "best.pt").symlink_to(f"/proc/self/root{tmp_path}/renamed.pt")
    (copies / "latest").symlink_to("runs")
    scratch.keep(kept, inside)
    assert (kept / "runs" / "log").read_text() == "log"
    assert (kept / "absolute" / "data" / "cache").read_text() == "cache"
    assert (kept / "best.pt").read_text() == "the original"
    assert not (kept / "best.pt").is_symlink()
    assert os.readlink(kept / "latest") == "runs"


def test_holes_stay_holes_on_another_disk(scratch: ScratchFolder) -> None:
    path = Path("/data/model.pt")
    write(scratch, path, "head")
    os.truncate(scratch.path / "files/data/model.pt", 1 << 30)
    target = Path("/dev/shm") / scratch.path.name
    try:
        scratch.keep(target, Path("/data"))
        status = (target / "model.pt").stat()
        assert (target / "model.pt").open("rb").read(5) == b"head\0"
        assert status.st_size == 1 << 30
        assert status.st_blocks * 512 < 1 << 20
    finally:
        (target / "model.pt").unlink(missing_ok=True)
        target.rmdir()


def test_empty_forgets_all_changes(scratch: ScratchFolder, tmp_path: Path) -> None:
    write(scratch, tmp_path / "x", "x")
    scratch.empty()
    assert scratch.changes(tmp_path) == []


def test_summary_counts_all_and_lists_the_first(scratch: ScratchFolder, tmp_path: Path) -> None:
    for index in range(5):
        write(scratch, tmp_path / str(index), "x" * index)
    writes = summary(scratch.changes(tmp_path), most=2)
    assert (writes.written_count, writes.written_bytes, len(writes.files)) == (5, 10, 2)
