"""The merged file system of a redirection, in Python: the scratch folder on top of the user's files.

The folder has the layout of native/redirect.h: a file, folder or link that the script made or changed is at
`files/PATH`, a record in `gone/` holds the path of one that it deleted. The folder is the whole state, so forked
children share it. Functions of `os` are replaced while a redirection is active; `plain` keeps the real ones.
"""

import errno
import fcntl
import hashlib
import mmap
import os
import stat
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import count
from pathlib import Path
from types import SimpleNamespace

from tonnage.virtual.redirect.scratch import BORROWED, copy_sparsely

AnyPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]

_NAMES = """
access chdir chmod close getcwd link listdir lstat mkdir mkfifo mknod open readlink remove rename rmdir scandir
stat statvfs symlink truncate unlink utime
""".split()
plain = SimpleNamespace(**{name: getattr(os, name) for name in _NAMES})

_SYSTEM_FOLDERS = ("/dev", "/proc", "/sys")
_MOST_LINKS = 40
_STATE_BYTES = 2  # of the file `state`, which forked children share
_ANY_CHANGED, _ANY_DELETED = range(_STATE_BYTES)
_GET_PATH_BYTES = 1024  # of F_GETPATH, on macOS
_LARGEST_SHARE_OF_DISK = 0.9


class Place(Enum):
    """Where a path of the merged file system is."""

    ORIGINAL = "original"  # whatever the user has there
    CHANGED = "changed"  # in the scratch folder
    HIDDEN = "hidden"  # deleted by the script


@dataclass(frozen=True, slots=True)
class Location:
    """A path without links, and the path of its content on the disk."""

    canonical: str
    place: Place
    physical: str
    is_borrowed: bool = False  # an original that was renamed: `physical` is the user's file

    @property
    def is_of_user(self) -> bool:
        """Whether the content is the user's own, which must stay as it is."""
        return self.place is Place.ORIGINAL or self.is_borrowed


class Overlay:
    """Reads and changes the merged file system; failures are an OSError, as those of the functions of `os`."""

    def __init__(self, scratch: Path) -> None:
        self.root = os.path.realpath(scratch)
        self._files = f"{self.root}/files"
        self._gone = f"{self.root}/gone"
        lines = (scratch / "through").read_text().splitlines()
        in_place = [line for line in lines if not line.startswith("*")]
        self._system = (*_SYSTEM_FOLDERS, self.root)
        self._in_place = (*self._system, *in_place)
        self._compiled = tuple(line[1:] for line in lines if line.startswith("*"))
        self._serial = count()
        with (scratch / "state").open("r+b") as state:
            self._changes = mmap.mmap(state.fileno(), _STATE_BYTES)

    @property
    def has_changes(self) -> bool:
        """Whether any process of the redirection has changed anything."""
        return bool(self._changes[_ANY_CHANGED])

    def close(self) -> None:
        self._changes.close()

    # Paths

    def locate(
        self, path: AnyPath, *, follow: bool = True, dir_fd: int | None = None
    ) -> Location | None:
        """Return where a path is; None if it is written in place, or is wrong."""
        text = os.fsdecode(path)
        absolute = self._absolute(text, dir_fd) if text else ""
        if not absolute:
            return None
        follow = follow or text.endswith("/")
        pending = _parts(absolute)
        canonical = ""
        links = 0
        while pending:
            part = pending.pop()
            if part == "..":
                canonical = canonical.rpartition("/")[0]
                continue
            candidate = f"{canonical}/{part}"
            if _is_below(candidate, self._system):
                return None
            target = self._link_target(candidate) if pending or follow else None
            if target is None:
                canonical = candidate
                continue
            links += 1
            if links > _MOST_LINKS:
                return None
            if target.startswith("/"):
                canonical = ""
            pending += _parts(target)
        if self._is_left_alone(canonical or "/"):
            return None
        return self.location(canonical or "/")

    def location(self, canonical: str) -> Location:
        """Return where a path without links is."""
        changed = self._files + canonical
        if _exists(changed):
            original = _borrowed_path(changed)
            return Location(canonical, Place.CHANGED, original or changed, original is not None)
        place = Place.HIDDEN if self.is_hidden(canonical) else Place.ORIGINAL
        return Location(canonical, place, canonical)

    def logical(self, physical: str) -> str:
        """Return the path that a script knows, of one that may be in the scratch folder."""
        if not _is_below(physical, (self._files,)):
            return physical
        return physical.removeprefix(self._files) or "/"

    def path_of_descriptor(self, descriptor: int) -> str:
        """Return the path that a script knows of an open file or folder; "" if it has none."""
        return self.logical(_path_of_descriptor(descriptor))

    def is_of_user(self, descriptor: int) -> bool:
        """Whether an open file or folder is one of the user's, which must stay as it is."""
        path = _path_of_descriptor(descriptor)
        return self.locate(path, follow=False) is not None

    def is_hidden(self, canonical: str) -> bool:
        """Whether the user's file of this path, or a folder above it, was deleted by the script."""
        if not self._changes[_ANY_DELETED]:
            return False
        end = 0
        while end != len(canonical):
            slash = canonical.find("/", end + 1)
            end = len(canonical) if slash < 0 else slash
            if _exists(self._gone_path(canonical[:end])):
                return True
        return False

    # Reading

    def status(self, location: Location) -> os.stat_result:
        """Return the status of a file, folder or link."""
        if location.place is Place.HIDDEN:
            raise _error(errno.ENOENT, location.canonical)
        status: os.stat_result = plain.lstat(location.physical)
        return status

    def names(self, location: Location) -> list[str]:
        """Return the names in a folder."""
        if location.place is Place.HIDDEN:
            raise _error(errno.ENOENT, location.canonical)
        names: list[str] = plain.listdir(location.physical)
        if location.place is Place.ORIGINAL or not self._has_original_folder(location.canonical):
            return names
        own_names = set(names)
        for name in plain.listdir(location.canonical):
            is_deleted = _exists(self._gone_path(_child(location.canonical, name)))
            if name not in own_names and not is_deleted:
                names.append(name)
        return names

    # Changes

    def path_to_write(self, location: Location, flags: int) -> str:
        """Return the scratch path to open with these flags, after copying what the user has there."""
        is_new = flags & os.O_CREAT and flags & os.O_EXCL
        target = self._files + location.canonical
        if location.place is Place.CHANGED and not location.is_borrowed:
            return target  # open(2) itself says what is wrong
        if location.is_of_user and _exists(location.physical):
            if is_new:
                raise _error(errno.EEXIST, location.canonical)
            self._copy(location, with_data=not flags & os.O_TRUNC)
        elif not flags & os.O_CREAT:
            raise _error(errno.ENOENT, location.canonical)
        else:
            self._shadow_parent(location.canonical)
        self._note()
        return target

    def new_path(self, location: Location) -> str:
        """Return the scratch path of a node that must not exist yet."""
        if self._exists(location):
            raise _error(errno.EEXIST, location.canonical)
        self._shadow_parent(location.canonical)
        self._note()
        return self._files + location.canonical

    def mkdir(self, location: Location, mode: int) -> None:
        plain.mkdir(self.new_path(location), mode)

    def unlink(self, location: Location) -> None:
        if stat.S_ISDIR(self.status(location).st_mode):
            raise _error(errno.EISDIR, location.canonical)
        self._shadow_parent(location.canonical)
        with suppress(FileNotFoundError):
            plain.unlink(self._files + location.canonical)
        self._hide_original(location.canonical)

    def rmdir(self, location: Location) -> None:
        if not stat.S_ISDIR(self.status(location).st_mode):
            raise _error(errno.ENOTDIR, location.canonical)
        if self.names(location):
            raise _error(errno.ENOTEMPTY, location.canonical)
        self._shadow_parent(location.canonical)
        with suppress(FileNotFoundError):
            plain.rmdir(self._files + location.canonical)
        self._hide_original(location.canonical)

    def rename(self, source: Location, target: Location) -> None:
        is_folder = stat.S_ISDIR(self.status(source).st_mode)
        if source.canonical == target.canonical:
            return
        if _is_below(target.canonical, (source.canonical,)):
            raise _error(errno.EINVAL, target.canonical)
        replaces = self._exists(target)
        if replaces:
            is_onto_folder = stat.S_ISDIR(self.status(target).st_mode)
            if is_onto_folder != is_folder:
                code = errno.EISDIR if is_onto_folder else errno.ENOTDIR
                raise _error(code, target.canonical)
        self._shadow_parent(source.canonical)
        self._shadow_parent(target.canonical)
        if is_folder and replaces:
            self.rmdir(target)
        self._move(source, target.canonical)

    def link(self, source: Location, target: Location) -> None:
        """Make a hard link; that of a user's file is a copy as soon as it is written."""
        self.status(source)
        linked = self.new_path(target)
        if source.is_of_user:
            plain.symlink(BORROWED + source.physical, linked)
        else:
            plain.link(source.physical, linked)

    # Parts of these

    def _absolute(self, path: str, dir_fd: int | None) -> str:
        if path.startswith("/"):
            return path
        if dir_fd is None:
            return f"{self.logical(plain.getcwd())}/{path}"
        folder = self.path_of_descriptor(dir_fd)
        return f"{folder}/{path}" if folder else ""

    def _link_target(self, canonical: str) -> str | None:
        location = self.location(canonical)
        if location.place is Place.HIDDEN:
            return None
        try:
            target: str = plain.readlink(location.physical)
        except OSError:
            return None
        return target

    def _is_left_alone(self, canonical: str) -> bool:
        if _is_below(canonical, self._in_place):
            return True
        return "__pycache__" in canonical.split("/") and _is_below(canonical, self._compiled)

    def _exists(self, location: Location) -> bool:
        return location.place is not Place.HIDDEN and _exists(location.physical)

    def _has_original_folder(self, canonical: str) -> bool:
        if self.is_hidden(canonical):
            return False
        try:
            return stat.S_ISDIR(plain.lstat(canonical).st_mode)
        except OSError:
            return False

    def _shadow_parent(self, canonical: str) -> None:
        """Make the folder above the path in the scratch folder, if the user may write to it."""
        parent = os.path.dirname(canonical)
        is_original = not _exists(self._files + parent) and not self.is_hidden(parent)
        if is_original and _exists(parent) and not plain.access(parent, os.W_OK | os.X_OK):
            raise _error(errno.EACCES, canonical)
        self._shadow(parent)

    def _shadow(self, folder: str) -> None:
        changed = self._files + folder
        if _exists(changed):
            if not stat.S_ISDIR(plain.lstat(changed).st_mode):
                raise _error(errno.ENOTDIR, folder)
            return
        if self.is_hidden(folder):
            raise _error(errno.ENOENT, folder)
        mode = plain.stat(folder).st_mode
        if not stat.S_ISDIR(mode):
            raise _error(errno.ENOTDIR, folder)
        if folder != "/":
            self._shadow(os.path.dirname(folder))
        with suppress(FileExistsError):
            plain.mkdir(changed, 0o700)
            plain.chmod(changed, stat.S_IMODE(mode) | 0o700)
        self._note()

    def _copy(self, location: Location, *, with_data: bool) -> None:
        """Copy a user's file to its scratch path in one step, because other threads may want it, too."""
        status = plain.stat(location.physical)
        if stat.S_ISDIR(status.st_mode):
            raise _error(errno.EISDIR, location.canonical)
        if not plain.access(location.physical, os.W_OK):
            raise _error(errno.EACCES, location.canonical)
        self._shadow(os.path.dirname(location.canonical))
        copy = f"{self.root}/views/copy-{os.getpid()}-{threading.get_ident()}-{next(self._serial)}"
        target = self._files + location.canonical
        new = plain.open(copy, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            if with_data:
                self._copy_data(location.physical, new, status)
        finally:
            plain.close(new)
        plain.chmod(copy, stat.S_IMODE(status.st_mode))
        plain.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
        if location.is_borrowed:
            plain.rename(copy, target)
            return
        with suppress(FileExistsError):  # another thread was faster
            plain.link(copy, target)
        plain.unlink(copy)

    def _copy_data(self, source: str, new: int, status: os.stat_result) -> None:
        disk = plain.statvfs(self.root)
        free_bytes = disk.f_bavail * disk.f_frsize
        if status.st_blocks * 512 > free_bytes * _LARGEST_SHARE_OF_DISK:
            sys.stderr.write(
                f"tonnage: {source} ({status.st_size / 2**30:.1f} GiB) is changed by the script, "
                f"and there is no room for its scratch copy in {self.root}; set TMPDIR\n"
            )
            raise _error(errno.ENOSPC, source)
        old = plain.open(source, os.O_RDONLY)
        try:
            copy_sparsely(old, new)
        finally:
            plain.close(old)

    def _move(self, source: Location, target: str) -> None:
        """Move a file, or a folder entry by entry, to a scratch path whose folder exists."""
        target_path = self._files + target
        status = self.status(source)
        if stat.S_ISDIR(status.st_mode):
            names = self.names(source)
            plain.mkdir(target_path, stat.S_IMODE(status.st_mode) | 0o700)
            self._note()
            for name in names:
                entry = self.location(_child(source.canonical, name))
                self._move(entry, _child(target, name))
            if source.place is Place.CHANGED:
                plain.rmdir(self._files + source.canonical)
        elif source.place is Place.CHANGED:
            plain.rename(self._files + source.canonical, target_path)
        else:
            with suppress(FileNotFoundError):
                plain.unlink(target_path)
            plain.symlink(BORROWED + source.canonical, target_path)
        self._hide_original(source.canonical)

    def _hide_original(self, canonical: str) -> None:
        if not self.is_hidden(canonical) and _exists(canonical):
            self._changes[_ANY_DELETED] = 1
            flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
            record = plain.open(self._gone_path(canonical), flags, 0o600)
            os.write(record, os.fsencode(canonical))
            plain.close(record)
        self._note()

    def _note(self) -> None:
        self._changes[_ANY_CHANGED] = 1

    def _gone_path(self, canonical: str) -> str:
        return f"{self._gone}/{hashlib.sha256(os.fsencode(canonical)).hexdigest()[:32]}"


def _parts(path: str) -> list[str]:
    """Return the names in a path, the last one first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _child(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"


def _is_below(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _exists(path: str) -> bool:
    try:
        plain.lstat(path)
    except OSError:
        return False
    return True


def _borrowed_path(changed: str) -> str | None:
    """Return the user's file that a link in the scratch folder stands for."""
    try:
        target: str = plain.readlink(changed)
    except OSError:
        return None
    return target.removeprefix(BORROWED) if target.startswith(BORROWED) else None


def _path_of_descriptor(descriptor: int) -> str:
    """Return the path of an open file or folder on the disk; "" if it has none."""
    try:
        if sys.platform == "darwin":
            answer = fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(_GET_PATH_BYTES))
            path = os.fsdecode(answer.rstrip(b"\0"))
        else:
            path = plain.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
    return path if path.startswith("/") else ""


def _error(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)

