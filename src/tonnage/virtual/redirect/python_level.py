"""Redirects what a script writes by replacing functions of Python, where no native library can.

It reaches Python code, and native code that is listed in `native_files`. It does not reach other
native code, nor programs and spawned processes that the script starts; forked children are
redirected. An object or a table that holds a function of `os` since before keeps the plain one.
"""

import errno
import glob
import io
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from multiprocessing import process
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar

from tonnage.virtual.redirect.native_files import NativeFiles, Pairs, rebind
from tonnage.virtual.redirect.overlay import IN_SCRATCH, Location, Overlay, Place, plain

# Functions of `os`, by what they do with the path that is their first argument.
_READING = "stat lstat statvfs readlink getxattr listxattr".split()
_CHANGING_ATTRIBUTES = """
chmod lchmod fchmod chown lchown fchown chflags lchflags utime setxattr removexattr
""".split()
_MAKING = "mkfifo mknod".split()
_NOT_FOLLOWING = ("lstat", "readlink", "lchmod", "lchown", "lchflags")
_SUPPORTS = (
    os.supports_dir_fd,
    os.supports_effective_ids,
    os.supports_fd,
    os.supports_follow_symlinks,
)
_NEW_FILE_MODE = 0o666
_OPENER_POSITION = 5  # among the arguments of `open` after the mode


class PythonRedirector:
    """Replaces the functions of `os` and `io`, in all modules that have imported them."""

    active: ClassVar["PythonRedirector | None"] = None  # inherited by forked children

    def __init__(self) -> None:
        self._overlay: Overlay | None = None
        self._thread = threading.local()
        self._native_files = NativeFiles(self._physical_path)
        self._functions: Pairs = []
        self._undo = ExitStack()

    def variables(self, scratch: Path) -> dict[str, str]:
        """Return the environment variables that redirect children: there are none."""
        return {}

    def begin(self, scratch: Path) -> None:
        """Redirect from here on."""
        self._overlay = Overlay(scratch)
        self._undo.callback(self._overlay.close)
        self._place_sockets(scratch / "sockets")
        self._native_files.begin()
        self._functions = self._replacements()
        rebind([*self._functions, *self._native_files.pairs], _standard_classes())
        self._declare_supported()
        PythonRedirector.active = self

    def end(self) -> None:
        """Write in place again."""
        overlay = self._overlay
        if overlay is None:
            return
        folder = overlay.logical(plain.getcwd())
        self._overlay = None
        PythonRedirector.active = None
        self._native_files.end()
        replaced = [*self._functions, *self._native_files.pairs]
        rebind([(new, old) for old, new in replaced], _standard_classes())
        self._undo.close()
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        os.chdir(folder)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let this thread read and write in place."""
        self._thread.is_paused = True
        try:
            yield
        finally:
            self._thread.is_paused = False

    # Where a path is

    def _redirecting(self) -> Overlay | None:
        if getattr(self._thread, "is_paused", False):
            return None
        return self._overlay

    def _to_read(
        self,
        path: Any,
        *,
        follow: bool = True,
        dir_fd: int | None = None,
    ) -> Location | None:
        """Return where to read a path; None as it is."""
        overlay = self._redirecting()
        if overlay is None or isinstance(path, int) or not overlay.has_changes:
            return None
        location = overlay.locate(path, follow=follow, dir_fd=dir_fd)
        if location is not None and location.place is Place.HIDDEN:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return location

    def _to_change(
        self, path: Any, *, follow: bool = False, dir_fd: int | None = None
    ) -> tuple[Overlay, Location] | None:
        """Return the overlay and where a path is in it; None if it is changed in place."""
        overlay = self._redirecting()
        if overlay is None or isinstance(path, int):
            return None
        location = overlay.locate(path, follow=follow, dir_fd=dir_fd)
        return None if location is None else (overlay, location)

    def _physical_path(self, path: Any, flags: int) -> Any:
        """Return the path that native code opens with these flags."""
        if not _writes(flags):
            location = self._to_read(path)
            is_elsewhere = location is not None and location.physical != location.canonical
            return _of_type(path, location.physical) if location and is_elsewhere else path
        change = self._to_change(path, follow=True)
        if change is None:
            return path
        overlay, location = change
        with _naming(path):
            return _of_type(path, overlay.path_to_write(location, flags))

    # The functions

    def _replacements(self) -> Pairs:
        """Return each plain function with its replacement."""
        makers: dict[str, Callable[[Any], Any]] = {
            **dict.fromkeys(_READING, self._reading),
            **dict.fromkeys(_CHANGING_ATTRIBUTES, self._changing_attributes),
            **dict.fromkeys(_MAKING, self._making),
            "access": self._access,
            "chdir": self._chdir,
            "getcwd": self._getcwd,
            "getcwdb": self._getcwdb,
            "link": self._link,
            "listdir": self._listdir,
            "mkdir": self._mkdir,
            "open": self._open,
            "remove": self._unlink,
            "rename": self._rename,
            "replace": self._rename,
            "rmdir": self._rmdir,
            "scandir": self._scandir,
            "symlink": self._symlink,
            "truncate": self._truncate,
            "unlink": self._unlink,
        }
        functions = {name: getattr(os, name) for name in makers if hasattr(os, name)}
        pairs = [(function, makers[name](function)) for name, function in functions.items()]
        pairs.append((io.open, self._open_file(io.open)))
        pairs.append((io.open_code, self._open_code(io.open_code)))
        pairs.append((io.FileIO, self._file_io(io.FileIO)))
        return pairs

    def _reading(self, function: Any) -> Any:
        follows = function.__name__ not in _NOT_FOLLOWING

        @wraps(function)
        def read(path: Any, *arguments: Any, **keywords: Any) -> Any:
            follow = keywords.get("follow_symlinks", follows)
            location = self._to_read(path, follow=follow, dir_fd=keywords.get("dir_fd"))
            if location is None:
                return function(path, *arguments, **keywords)
            keywords.pop("dir_fd", None)
            with _naming(path):
                return function(_of_type(path, location.physical), *arguments, **keywords)

        return read

    def _access(self, function: Any) -> Any:
        @wraps(function)
        def access(path: Any, mode: int, **keywords: Any) -> bool:
            follow = keywords.get("follow_symlinks", True)
            try:
                location = self._to_read(path, follow=follow, dir_fd=keywords.get("dir_fd"))
            except FileNotFoundError:
                return False
            if location is None:
                return bool(function(path, mode, **keywords))
            keywords.pop("dir_fd", None)
            return bool(function(location.physical, mode, **keywords))

        return access

    def _open(self, function: Any) -> Any:
        @wraps(function)
        def open_descriptor(
            path: Any,
            flags: int,
            mode: int = 0o777,
            *,
            dir_fd: int | None = None,
        ) -> int:
            follow = not flags & os.O_NOFOLLOW
            if not _writes(flags):
                location = self._to_read(path, follow=follow, dir_fd=dir_fd)
                if location is None:
                    return int(function(path, flags, mode, dir_fd=dir_fd))
                with _naming(path):
                    return int(function(location.physical, flags, mode))
            is_new = bool(flags & os.O_CREAT and flags & os.O_EXCL)
            change = self._to_change(path, follow=follow and not is_new, dir_fd=dir_fd)
            if change is None or _is_special(change[1]):
                return int(function(path, flags, mode, dir_fd=dir_fd))
            overlay, location = change
            unnamed = getattr(os, "O_TMPFILE", 0)
            if unnamed and flags & unnamed == unnamed:
                return int(function(overlay.root, flags, mode))
            with _naming(path):
                return int(function(overlay.path_to_write(location, flags), flags, mode))

        return open_descriptor

    def _open_file(self, function: Any) -> Any:
        @wraps(function)
        def open_file(file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
            has_opener = len(arguments) > _OPENER_POSITION or keywords.get("opener") is not None
            if not has_opener and self._redirecting() is not None and not isinstance(file, int):
                keywords["opener"] = _open_redirected
            return function(file, mode, *arguments, **keywords)

        return open_file

    def _open_code(self, function: Any) -> Any:
        @wraps(function)
        def open_code(path: str) -> Any:
            location = self._to_read(path)
            return function(path if location is None else location.physical)

        return open_code

    def _file_io(self, plain_class: Any) -> Any:
        redirector = self

        class FileIO(plain_class, metaclass=_Instances):
            """io.FileIO; the objects that `open` makes are instances of it, too."""

            plain = plain_class

            def __init__(
                self,
                file: Any,
                mode: str = "r",
                closefd: bool = True,
                opener: Any = None,
            ) -> None:
                is_redirected = not isinstance(file, int) and redirector._redirecting() is not None
                if opener is None and is_redirected:
                    opener = _open_redirected
                super().__init__(file, mode, closefd, opener)

        return FileIO

    def _listdir(self, function: Any) -> Any:
        @wraps(function)
        def listdir(path: Any = None) -> Any:
            location = self._folder(path)
            if location is None:
                return function(path)
            with _naming(path):
                names = self._names(location)
            return [_of_type(path, name) for name in names]

        return listdir

    def _scandir(self, function: Any) -> Any:
        @wraps(function)
        def scandir(path: Any = None) -> Any:
            location = self._folder(path)
            if location is None:
                return function(path)
            with _naming(path):
                names = self._names(location)
            shown_folder = "." if path is None else path
            if isinstance(path, int):
                shown_folder = ""
            return _Entries(location.canonical, shown_folder, names)

        return scandir

    def _folder(self, path: Any) -> Location | None:
        """Return the folder to list; None if it is to be listed as it is."""
        overlay = self._redirecting()
        if overlay is None or not overlay.has_changes:
            return None
        if isinstance(path, int):
            logical = overlay.path_of_descriptor(path)
            location = overlay.locate(logical, follow=False)
            return location if location and location.place in IN_SCRATCH else None
        folder = "." if path is None else path
        location = self._to_read(folder)
        if location is None or location.place in IN_SCRATCH:
            return location
        # Plain entries are faster, and right if no link leads to the folder.
        physical = os.path.join(plain.getcwd(), os.fsdecode(folder))
        return None if os.path.normpath(physical) == location.canonical else location

    def _names(self, location: Location) -> list[str]:
        assert self._overlay is not None
        return self._overlay.names(location)

    def _chdir(self, function: Any) -> Any:
        @wraps(function)
        def chdir(path: Any) -> None:
            location = self._to_read(path)
            if location is None:
                function(path)
                return
            with _naming(path):
                function(location.physical)

        return chdir

    def _getcwd(self, function: Any) -> Any:
        @wraps(function)
        def getcwd() -> str:
            overlay = self._redirecting()
            folder: str = function()
            return folder if overlay is None else overlay.logical(folder)

        return getcwd

    def _getcwdb(self, function: Any) -> Any:
        @wraps(function)
        def getcwdb() -> bytes:
            return os.fsencode(os.getcwd())

        return getcwdb

    def _mkdir(self, function: Any) -> Any:
        @wraps(function)
        def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            change = self._to_change(path, dir_fd=dir_fd)
            if change is None:
                function(path, mode, dir_fd=dir_fd)
                return
            overlay, location = change
            with _naming(path):
                overlay.mkdir(location, mode)

        return mkdir

    def _making(self, function: Any) -> Any:
        @wraps(function)
        def make(path: Any, *arguments: Any, **keywords: Any) -> None:
            change = self._to_change(path, dir_fd=keywords.get("dir_fd"))
            if change is None:
                function(path, *arguments, **keywords)
                return
            overlay, location = change
            keywords.pop("dir_fd", None)
            with _naming(path):
                function(overlay.new_path(location), *arguments, **keywords)

        return make

    def _unlink(self, function: Any) -> Any:
        @wraps(function)
        def unlink(path: Any, *, dir_fd: int | None = None) -> None:
            change = self._to_change(path, dir_fd=dir_fd)
            if change is None:
                function(path, dir_fd=dir_fd)
                return
            overlay, location = change
            with _naming(path):
                overlay.unlink(location)

        return unlink

    def _rmdir(self, function: Any) -> Any:
        @wraps(function)
        def rmdir(path: Any, *, dir_fd: int | None = None) -> None:
            change = self._to_change(path, dir_fd=dir_fd)
            if change is None:
                function(path, dir_fd=dir_fd)
                return
            overlay, location = change
            with _naming(path):
                overlay.rmdir(location)

        return rmdir

    def _rename(self, function: Any) -> Any:
        @wraps(function)
        def rename(
            src: Any,
            dst: Any,
            *,
            src_dir_fd: int | None = None,
            dst_dir_fd: int | None = None,
        ) -> None:
            source = self._to_change(src, dir_fd=src_dir_fd)
            target = self._to_change(dst, dir_fd=dst_dir_fd)
            with _naming(src, dst):
                if source is not None and target is not None:
                    overlay, location = source
                    overlay.rename(location, target[1])
                elif source is None and target is None:
                    function(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
                elif source is not None and not source[1].is_of_user:
                    function(source[1].physical, dst, dst_dir_fd=dst_dir_fd)
                else:
                    raise _other_disk()

        return rename

    def _link(self, function: Any) -> Any:
        @wraps(function)
        def link(
            src: Any,
            dst: Any,
            *,
            src_dir_fd: int | None = None,
            dst_dir_fd: int | None = None,
            follow_symlinks: bool = True,
        ) -> None:
            source = self._to_change(src, dir_fd=src_dir_fd)
            target = self._to_change(dst, dir_fd=dst_dir_fd)
            with _naming(src, dst):
                if source is None and target is None:
                    function(
                        src,
                        dst,
                        src_dir_fd=src_dir_fd,
                        dst_dir_fd=dst_dir_fd,
                        follow_symlinks=follow_symlinks,
                    )
                elif source is not None and target is not None:
                    overlay, location = source
                    overlay.link(location, target[1])
                else:
                    raise _other_disk()

        return link

    def _symlink(self, function: Any) -> Any:
        @wraps(function)
        def symlink(
            src: Any,
            dst: Any,
            target_is_directory: bool = False,
            *,
            dir_fd: int | None = None,
        ) -> None:
            change = self._to_change(dst, dir_fd=dir_fd)
            if change is None:
                function(src, dst, target_is_directory, dir_fd=dir_fd)
                return
            overlay, location = change
            with _naming(src, dst):
                function(os.fsdecode(src), overlay.new_path(location))

        return symlink

    def _truncate(self, function: Any) -> Any:
        @wraps(function)
        def truncate(path: Any, length: int) -> None:
            change = self._to_change(path, follow=True)
            if change is None:
                function(path, length)
                return
            overlay, location = change
            with _naming(path):
                function(overlay.path_to_write(location, os.O_RDWR), length)

        return truncate

    def _changing_attributes(self, function: Any) -> Any:
        """Set the attributes of what the script made; leave those of the user's files."""
        follows = function.__name__ not in _NOT_FOLLOWING

        @wraps(function)
        def change_attributes(path: Any, *arguments: Any, **keywords: Any) -> None:
            overlay = self._redirecting()
            if overlay is not None and isinstance(path, int):
                if not overlay.is_of_user(path):
                    function(path, *arguments, **keywords)
                return
            follow = keywords.get("follow_symlinks", follows)
            change = self._to_change(path, follow=follow, dir_fd=keywords.get("dir_fd"))
            if change is None:
                function(path, *arguments, **keywords)
                return
            overlay, location = change
            keywords.pop("dir_fd", None)
            with _naming(path):
                overlay.status(location)
                if not location.is_of_user:
                    function(location.physical, *arguments, **keywords)

        return change_attributes

    # What else begins and ends

    def _declare_supported(self) -> None:
        """Add the functions to the sets of those that take a descriptor, and so on."""
        for supported in _SUPPORTS:
            functions = [pair for pair in self._functions if isinstance(pair[1], FunctionType)]
            replacements = {new for old, new in functions if old in supported}
            supported |= replacements
            self._undo.callback(supported.difference_update, replacements)

    def _place_sockets(self, folder: Path) -> None:
        """Let multiprocessing make its sockets, whose paths native code takes, in this folder."""
        folder.mkdir()
        settings = process.current_process()._config  # type: ignore[attr-defined]
        earlier = settings.get("tempdir")
        settings["tempdir"] = str(folder)
        self._undo.callback(settings.__setitem__, "tempdir", earlier)


class _Instances(type):
    """The metaclass of a class that stands for a plain one."""

    plain: type

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.plain)


class _Entry:
    """An entry of a folder, as os.DirEntry."""

    def __init__(self, folder: str, shown_folder: Any, name: str) -> None:
        self._path = os.path.join(folder, name)
        self.name = _of_type(shown_folder, name)
        self.path = os.path.join(shown_folder, self.name)

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self._path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return stat.S_ISDIR(self._mode(follow_symlinks))

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return stat.S_ISREG(self._mode(follow_symlinks))

    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self._mode(False))

    def is_junction(self) -> bool:
        return False

    def _mode(self, follow_symlinks: bool) -> int:
        with suppress(FileNotFoundError):
            return self.stat(follow_symlinks=follow_symlinks).st_mode
        return 0


class _Entries:
    """An iterator of entries that is closed, as that of os.scandir."""

    def __init__(self, folder: str, shown_folder: Any, names: list[str]) -> None:
        self._entries = iter([_Entry(folder, shown_folder, name) for name in names])

    def __iter__(self) -> "_Entries":
        return self

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> "_Entries":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter([])


def _open_redirected(path: Any, flags: int) -> int:
    return os.open(path, flags, _NEW_FILE_MODE)


def _writes(flags: int) -> bool:
    return flags & os.O_ACCMODE != os.O_RDONLY or bool(flags & (os.O_CREAT | os.O_TRUNC))


def _is_special(location: Location) -> bool:
    """Whether it is a device, a pipe or a socket of the user's."""
    if location.place is not Place.ORIGINAL:
        return False
    try:
        mode = plain.stat(location.physical).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _of_type(path: Any, text: str) -> Any:
    """Return the text as bytes if the path is given so."""
    return os.fsencode(text) if isinstance(path, bytes) else text


def _other_disk() -> OSError:
    return OSError(errno.EXDEV, os.strerror(errno.EXDEV))


@contextmanager
def _naming(path: Any, second: Any = None) -> Iterator[None]:
    """Name the paths that the script gave in an error."""
    try:
        yield
    except OSError as error:
        error.filename = path
        if second is not None:
            error.filename2 = second
        raise


def _standard_classes() -> list[type]:
    """Return the classes of the standard library that hold functions of `os`, in this version."""
    classes = [vars(tempfile).get("_TemporaryFileCloser"), vars(glob).get("_StringGlobber")]
    return [holder for holder in classes if holder is not None]
