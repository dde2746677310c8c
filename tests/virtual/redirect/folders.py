"""What is in a folder, to compare before and after."""

import hashlib
import os
from pathlib import Path


def contents(folder: Path) -> dict[str, tuple[int, int, str]]:
    """The mode, time and hash of every file, folder and link."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        text = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, hashlib.sha256(text).hexdigest())
    return found
