"""The scratch folder of a redirection: how it is laid out, what a script left in it, and how that is kept.

See native/redirect.h for its layout.
"""

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tonnage.recording.writes import Change, ScriptWrites, WrittenFile

_STATE_BYTES = 8 + (1 << 17)  # `State` of native/redirect.h
_PARTS = ("files", "gone", "views", "loggers")
BORROWED = "/proc/self/root"  # where links lead that stand for renamed originals
_OUTSIDE = "absolute"  # folder of kept files from outside the working directory
_PIECE_BYTES = 1 << 20
_TEMPORARY_NAMES = (tempfile.gettempprefix(), "pymp-")


class ScratchFolder:
    """A folder that a redirection writes to."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="tonnage-"))
        self._temporary = Path(os.path.realpath(tempfile.gettempdir()))
        for part in _PARTS:
            (self.path / part).mkdir()

    def prepare(self, in_place: Sequence[str], compiled: Sequence[str]) -> None:
        """Write the settings and an empty state."""
        with (self.path / "state").open("wb") as state:
            state.truncate(_STATE_BYTES)
        lines = [*in_place, *(f"*{folder}" for folder in compiled)]
        (self.path / "through").write_text("".join(f"{line}\n" for line in lines if "\n" not in line))

    def changes(self, folder: Path) -> list[WrittenFile]:
        """Return what the script left, the largest first: without temporary files, unless its folder is among them."""
        written = []
        for path, scratch_copy in self._files():
            if self._is_temporary(path, folder) or "__pycache__" in path.parts:
                continue
            change: Change = "changed" if os.path.lexists(path) else "new"
            written.append(WrittenFile(str(path), _size_bytes(scratch_copy), change))
        for path in self._deleted():
            if not self._is_temporary(path, folder):
                written.append(WrittenFile(str(path), 0, "deleted"))
        return sorted(written, key=lambda file: (-file.size_bytes, file.path))

    def keep(self, target: Path, folder: Path) -> None:
        """Move the files to the target: by their path in the script's folder, or else under `absolute`."""
        target.mkdir(parents=True, exist_ok=True)
        for path, scratch_copy in self._files():
            if self._is_temporary(path, folder):
                continue
            is_inside = path.is_relative_to(folder)
            kept = target / path.relative_to(folder) if is_inside else target / _OUTSIDE / path.relative_to("/")
            kept.parent.mkdir(parents=True, exist_ok=True)
            _move(scratch_copy, kept)

    def empty(self) -> None:
        """Forget all changes, for a run that begins again; the state is cleared in place, because it is mapped."""
        for part in _PARTS:
            shutil.rmtree(self.path / part, ignore_errors=True)
            (self.path / part).mkdir()
        with (self.path / "state").open("r+b") as state:
            state.write(bytes(_STATE_BYTES))

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _files(self) -> Iterator[tuple[Path, Path]]:
        """Yield each file's path and its scratch copy."""
        root = self.path / "files"
        for parent, folders, names in os.walk(root):
            links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
            for name in (*names, *links):
                scratch_copy = Path(parent, name)
                path = Path("/") / scratch_copy.relative_to(root)
                if scratch_copy.is_symlink() or stat.S_ISREG(scratch_copy.lstat().st_mode):
                    yield path, scratch_copy

    def _deleted(self) -> Iterator[Path]:
        """Yield the files that were deleted or renamed, and not written again."""
        for record in sorted((self.path / "gone").iterdir()):
            path = Path(os.fsdecode(record.read_bytes()))
            is_back = os.path.lexists(self.path / "files" / path.relative_to("/"))
            if is_back or not os.path.lexists(path):
                continue
            if not path.is_dir() or path.is_symlink():
                yield path

    def _is_temporary(self, path: Path, folder: Path) -> bool:
        """Whether Python's tempfile or multiprocessing named it, outside of the script's folder."""
        if path.is_relative_to(folder) or not path.is_relative_to(self._temporary) or path == self._temporary:
            return False
        return path.relative_to(self._temporary).parts[0].startswith(_TEMPORARY_NAMES)


def summary(files: Sequence[WrittenFile], most: int) -> ScriptWrites:
    """Return the totals, and the largest files."""
    written = [file for file in files if file.change != "deleted"]
    return ScriptWrites(
        written_count=len(written),
        written_bytes=sum(file.size_bytes for file in written),
        deleted_count=len(files) - len(written),
        files=tuple(files[:most]),
    )


def _size_bytes(scratch_copy: Path) -> int:
    link = os.readlink(scratch_copy) if scratch_copy.is_symlink() else ""
    original = link.removeprefix(BORROWED) if link.startswith(BORROWED) else scratch_copy
    return os.lstat(original).st_size


def _move(source: Path, target: Path) -> None:
    if source.is_symlink():
        link = os.readlink(source)
        if link.startswith(BORROWED):
            shutil.copy2(link.removeprefix(BORROWED), target)
        else:
            target.symlink_to(link)
        return
    try:
        source.rename(target)
    except OSError:  # on another disk
        with source.open("rb") as old, target.open("wb") as new:
            copy_sparsely(old.fileno(), new.fileno())


def copy_sparsely(old: int, new: int) -> None:
    """Copy the content of one open file to another, leaving its holes."""
    size = os.fstat(old).st_size
    os.ftruncate(new, size)
    position = 0
    while position < size:
        try:
            position = os.lseek(old, position, os.SEEK_DATA)
            end = os.lseek(old, position, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # the rest is a hole
                return
            end = size  # this disk does not tell
        while position < end:
            piece = os.pread(old, min(_PIECE_BYTES, end - position), position)
            if not piece:  # truncated meanwhile
                return
            os.pwrite(new, piece, position)
            position += len(piece)
