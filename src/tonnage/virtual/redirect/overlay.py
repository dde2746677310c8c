"""The merged file system of a redirection, in Python: the scratch folder over the user's files.

The folder has the layout of native/redirect.h: a file, folder or link that the script made or
changed is at `files/PATH`, a record in `gone/` holds the path of one that it deleted. The folder
is the whole state, so forked children share it. Functions of `os` are replaced while a redirection
is active; `plain` keeps the real ones.
"""

import errno
import fcntl
import hashlib
import mmap
import os
import stat
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import count
from pathlib import Path
from types import SimpleNamespace

from tonnage.virtual.redirect.scratch import BORROWED, copy_sparsely

AnyPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]

_NAMES = """
access chdir chmod close getcwd link listdir lstat mkdir open readlink rename rmdir stat statvfs
symlink unlink utime
""".split()
plain = SimpleNamespace(**{name: getattr(os, name) for name in _NAMES})

_SYSTEM_FOLDERS = ("/dev", "/proc", "/sys")
_MOST_LINKS = 40
_STATE_BYTES = 2  # of the file `state`, which forked children share
_ANY_CHANGED, _ANY_DELETED = range(_STATE_BYTES)
_GET_PATH_BYTES = 1024  # of F_GETPATH, on macOS
_LARGEST_LINKED_BYTES = 64 << 20
_LARGEST_SHARE_OF_DISK = 0.9


class Place(Enum):
    """Where a path of the merged file system is."""

    ORIGINAL = "original"  # whatever the user has there, and below
    MERGED = "merged"  # in the scratch folder; of a folder, the user's entries are seen, too
    REPLACED = "replaced"  # in the scratch folder, and what the user has there is hidden
    HIDDEN = "hidden"  # deleted by the script


IN_SCRATCH = (Place.MERGED, Place.REPLACED)


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
    """Reads and changes the merged file system; it fails with an OSError, as `os` does."""

    def __init__(self, scratch: Path) -> None:
        self.root = os.path.realpath(scratch)
        self._files = f"{self.root}/files"
        self._gone = f"{self.root}/gone"
        lines = (scratch / "through").read_text().splitlines()
        in_place = [line for line in lines if not line.startswith("*")]
        self._system = {*_SYSTEM_FOLDERS, self.root}
        self._in_place = _prefixes([*self._system, *in_place])
        self._compiled = _prefixes(line[1:] for line in lines if line.startswith("*"))
        self._plain_folders: set[str] = set()  # of the user, which are no links
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
        self,
        path: AnyPath,
        *,
        follow: bool = True,
        dir_fd: int | None = None,
    ) -> Location | None:
        """Return where a path is; None if it is written in place, or is wrong."""
        text = os.fsdecode(path)
        absolute = self._absolute(text, dir_fd) if text else ""
        if not absolute:
            return None
        follow = follow or text.endswith("/")
        pending = _parts(absolute)
        folders = [("", Place.MERGED)]  # from the root to the path, each with its place
        links = 0
        while pending:
            part = pending.pop()
            if part == "..":
                if len(folders) > 1:
                    self._check_folder(self._location(*folders.pop()))
                continue
            folder, folder_place = folders[-1]
            canonical = f"{folder}/{part}"
            if canonical in self._system:
                return None
            place = self._place_below(folder_place, canonical)
            target = None
            if pending or follow:
                target = self._link_target(canonical, place, is_last=not pending)
            if target is None:
                folders.append((canonical, place))
                continue
            links += 1
            if links > _MOST_LINKS:
                return None
            if target.startswith("/"):
                del folders[1:]
            pending += _parts(target)
        canonical, place = folders[-1]
        if self._is_left_alone(canonical or "/"):
            return None
        return self._location(canonical or "/", place)

    def logical(self, physical: str) -> str:
        """Return the path that a script knows, of one that may be in the scratch folder."""
        if not _is_below(physical, (f"{self._files}/",)):
            return physical
        return physical.removeprefix(self._files) or "/"

    def path_of_descriptor(self, descriptor: int) -> str:
        """Return the path that a script knows of an open file or folder; "" if it has none."""
        return self.logical(_path_of_descriptor(descriptor))

    def is_of_user(self, descriptor: int) -> bool:
        """Whether an open file or folder is one of the user's, which must stay as it is."""
        path = _path_of_descriptor(descriptor)
        return self.locate(path, follow=False) is not None

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
        if location.place is not Place.MERGED or not _is_folder(location.canonical):
            return names
        own_names = set(names)
        for name in plain.listdir(location.canonical):
            is_deleted = _exists(self._gone_path(_child(location.canonical, name)))
            if name not in own_names and not is_deleted:
                names.append(name)
        return names

    # Changes

    def path_to_write(self, location: Location, flags: int) -> str:
        """Return the scratch path to open with these flags; the user's content is in it."""
        is_new = flags & os.O_CREAT and flags & os.O_EXCL
        target = self._files + location.canonical
        if location.place in IN_SCRATCH and not location.is_borrowed:
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
        self._hide_original(location)

    def rmdir(self, location: Location) -> None:
        if not stat.S_ISDIR(self.status(location).st_mode):
            raise _error(errno.ENOTDIR, location.canonical)
        if self.names(location):
            raise _error(errno.ENOTEMPTY, location.canonical)
        self._shadow_parent(location.canonical)
        with suppress(FileNotFoundError):
            plain.rmdir(self._files + location.canonical)
        self._hide_original(location)

    def rename(self, source: Location, target: Location) -> None:
        is_folder = stat.S_ISDIR(self.status(source).st_mode)
        if source.canonical == target.canonical:
            return
        if _is_below(target.canonical, (f"{source.canonical}/",)):
            raise _error(errno.EINVAL, target.canonical)
        if _is_below(source.canonical, (f"{target.canonical}/",)):
            raise _error(errno.ENOTEMPTY, target.canonical)
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
        """Make a hard link. A large file of the user's is not copied for it, but borrowed."""
        status = self.status(source)
        linked = self.new_path(target)
        if stat.S_ISDIR(status.st_mode):
            raise _error(errno.EPERM, source.canonical)
        is_small = stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST_LINKED_BYTES
        if source.place is Place.ORIGINAL and not is_small:
            _borrow(source.physical, linked)
        elif source.is_borrowed:
            plain.symlink(BORROWED + source.physical, linked)
        else:
            path = self.path_to_write(source, os.O_WRONLY)
            plain.link(path, linked, follow_symlinks=False)

    # Parts of these

    def _absolute(self, path: str, dir_fd: int | None) -> str:
        if path.startswith("/"):
            return path
        if dir_fd is None:
            return f"{self.logical(plain.getcwd())}/{path}"
        folder = self.path_of_descriptor(dir_fd)
        return f"{folder}/{path}" if folder else ""

    def _place_below(self, folder_place: Place, canonical: str) -> Place:
        """Return the place of a folder's entry; in most folders there is nothing to look up."""
        if folder_place in (Place.ORIGINAL, Place.HIDDEN):
            return folder_place
        is_in_scratch = _exists(self._files + canonical)
        if folder_place is Place.REPLACED:
            return Place.REPLACED if is_in_scratch else Place.HIDDEN
        is_deleted = self._changes[_ANY_DELETED] and _exists(self._gone_path(canonical))
        if is_in_scratch:
            return Place.REPLACED if is_deleted else Place.MERGED
        # The script may have put a file in place of a folder, or of a link to one.
        is_in_folder = _is_folder(self._files + os.path.dirname(canonical))
        return Place.ORIGINAL if is_in_folder and not is_deleted else Place.HIDDEN

    def _location(self, canonical: str, place: Place) -> Location:
        if place not in IN_SCRATCH:
            return Location(canonical, place, canonical)
        changed = self._files + canonical
        original = _borrowed_path(changed)
        return Location(canonical, place, original or changed, original is not None)

    def _location_of(self, canonical: str) -> Location:
        """Return where a path without links is."""
        place = Place.MERGED
        end = 0
        while end < len(canonical) and canonical != "/":
            slash = canonical.find("/", end + 1)
            end = len(canonical) if slash < 0 else slash
            place = self._place_below(place, canonical[:end])
        return self._location(canonical, place)

    def _check_folder(self, location: Location) -> None:
        if not stat.S_ISDIR(self.status(location).st_mode):
            raise _error(errno.ENOTDIR, location.canonical)

    def _link_target(self, canonical: str, place: Place, *, is_last: bool) -> str | None:
        if place is Place.HIDDEN or (canonical in self._plain_folders and not is_last):
            return None
        physical = self._location(canonical, place).physical
        try:
            target: str = plain.readlink(physical)
        except OSError:
            if place is Place.ORIGINAL and not is_last:
                self._plain_folders.add(canonical)
            return None
        return target

    def _is_left_alone(self, canonical: str) -> bool:
        if _is_below(canonical, self._in_place):
            return True
        return "/__pycache__" in canonical and _is_below(canonical, self._compiled)

    def _exists(self, location: Location) -> bool:
        return location.place is not Place.HIDDEN and _exists(location.physical)

    def _shadow_parent(self, canonical: str) -> None:
        """Make the folder above the path in the scratch folder, if the user may write to it."""
        folder = self._location_of(os.path.dirname(canonical))
        is_original = folder.place is Place.ORIGINAL and _is_folder(folder.physical)
        if is_original and not plain.access(folder.physical, os.W_OK | os.X_OK):
            raise _error(errno.EACCES, canonical)
        self._shadow(folder)

    def _shadow(self, folder: Location) -> None:
        """Make a folder, and those above it, in the scratch folder."""
        mode = plain.stat(folder.physical).st_mode if folder.place is not Place.HIDDEN else 0
        if not mode:
            raise _error(errno.ENOENT, folder.canonical)
        if not stat.S_ISDIR(mode):
            raise _error(errno.ENOTDIR, folder.canonical)
        if folder.place in IN_SCRATCH:
            return
        self._shadow(self._location_of(os.path.dirname(folder.canonical)))
        changed = self._files + folder.canonical
        with suppress(FileExistsError):
            plain.mkdir(changed, 0o700)
            plain.chmod(changed, stat.S_IMODE(mode) | 0o700)
        self._note()

    def _copy(self, location: Location, *, with_data: bool) -> None:
        """Copy a user's file to its scratch path in one step: other threads may want it, too."""
        status = plain.stat(location.physical)
        if stat.S_ISDIR(status.st_mode):
            raise _error(errno.EISDIR, location.canonical)
        if not plain.access(location.physical, os.W_OK):
            raise _error(errno.EACCES, location.canonical)
        self._shadow(self._location_of(os.path.dirname(location.canonical)))
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
                entry = self._location_of(_child(source.canonical, name))
                self._move(entry, _child(target, name))
            if source.place in IN_SCRATCH:
                plain.rmdir(self._files + source.canonical)
        elif source.place in IN_SCRATCH:
            plain.rename(self._files + source.canonical, target_path)
        else:
            with suppress(FileNotFoundError):
                plain.unlink(target_path)
            _borrow(source.physical, target_path)
        self._hide_original(source)

    def _hide_original(self, location: Location) -> None:
        """Hide what the user has at a path, if anything is seen there."""
        is_seen = location.place in (Place.ORIGINAL, Place.MERGED)
        if is_seen and _exists(location.canonical):
            self._changes[_ANY_DELETED] = 1
            flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
            record = plain.open(self._gone_path(location.canonical), flags, 0o600)
            os.write(record, os.fsencode(location.canonical))
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
    return f"{path}/".startswith(folders)


def _prefixes(folders: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{folder.rstrip('/')}/" for folder in folders)


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(plain.lstat(path).st_mode)
    except OSError:
        return False


def _exists(path: str) -> bool:
    try:
        plain.lstat(path)
    except OSError:
        return False
    return True


def _borrow(original: str, changed: str) -> None:
    """Make a link in the scratch folder that stands for a user's file; of a link, make a copy."""
    is_link = stat.S_ISLNK(plain.lstat(original).st_mode)
    plain.symlink(plain.readlink(original) if is_link else BORROWED + original, changed)


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
