"""The cache folder for built libraries and lookups. Code is loaded from it, so no other user may write there.

A path is safe if it belongs to this user or root and neither the group nor others can write it.
"""

import fcntl
import os
import pwd
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from tonnage.errors import MissingPart


def cache_folder() -> Path:
    """Return the folder in TONNAGE_CACHE, or the first safe default; raise MissingPart if there is none."""
    if named := os.environ.get("TONNAGE_CACHE"):
        folder = _made(Path(named))
        if why := _why_unsafe(folder):
            raise MissingPart(
                f"TONNAGE_CACHE names {folder}, which {why}; the virtual GPU's compiled code is loaded from there.",
                hint="Name a folder of your own that only you can write (chmod go-w), or leave TONNAGE_CACHE out.",
            )
        return folder
    for folder in _usual_folders():
        with suppress(OSError):
            if not _why_unsafe(_made(folder)) and os.access(folder, os.W_OK):
                return folder
    raise MissingPart(
        "There is no folder that only you can write, from which the virtual GPU's compiled code could be loaded: tried "
        f"{', '.join(map(str, _usual_folders()))}.",
        hint="Name one: export TONNAGE_CACHE=/a/folder/of/your/own",
    )


def check_code(path: Path) -> Path:
    """Return the path of a library, or folder of libraries, if it is safe to load; raise MissingPart otherwise."""
    for each in (path, *path.iterdir()) if path.is_dir() else (path,):
        if why := _why_unsafe(each):
            raise MissingPart(
                f"{each} is compiled code of the virtual GPU, and {why}: it is not loaded.",
                hint=f"Remove it, and it is built again: rm -r {path}",
            )
    return path


def built_once(target: Path, build: Callable[[], None]) -> Path:
    """Return the target, building it if it does not exist, after checking that it is safe to load."""
    if not target.exists():
        with target.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a concurrent run waits here until the first has built it
            if not target.exists():
                build()
    return check_code(target)


def make_safe(path: Path) -> None:
    """Remove group and other write permission from what was just built, whatever the umask."""
    for each in (path, *path.iterdir()) if path.is_dir() else (path,):
        each.chmod(each.stat().st_mode & 0o755)


def _usual_folders() -> Iterator[Path]:
    with suppress(RuntimeError):  # no home directory
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        yield home / "tonnage"
        yield home / "tonnage-private"
    yield Path(tempfile.gettempdir()) / f"tonnage-{os.geteuid()}"


def _made(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _why_unsafe(path: Path) -> str:
    """Return why another user could have changed the path, or "" if none could."""
    for status in (path.lstat(), path.stat()):  # check the symlink itself, too
        if status.st_uid not in (os.geteuid(), 0):
            try:
                return f"belongs to the user {pwd.getpwuid(status.st_uid).pw_name}"
            except KeyError:
                return f"belongs to user {status.st_uid}"
    mode = path.stat().st_mode & 0o7777
    return f"can be written by others (mode {mode:04o})" if mode & 0o022 else ""
