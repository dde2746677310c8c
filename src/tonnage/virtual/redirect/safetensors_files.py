"""Redirects the files of safetensors in this process.

Its Rust code renames the finished file with a system call of its own, which the native library does not see. So it
gets the path of the scratch copy itself.
"""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

_FUNCTION = "serialize_file"
_MODULES = ("safetensors", "safetensors.torch", "safetensors.numpy")


def install_safetensors() -> Callable[[], None]:
    """Replace the function that writes files; the returned function undoes it."""
    if find_spec("safetensors") is None:
        return lambda: None
    plain = getattr(import_module("safetensors"), _FUNCTION)

    def serialize_file(data: Any, filename: str | os.PathLike[str], *arguments: Any, **keywords: Any) -> Any:
        return plain(data, _scratch_path(filename), *arguments, **keywords)

    _replace(plain, serialize_file)
    return lambda: _replace(serialize_file, plain)


def _replace(function: Any, replacement: Any) -> None:
    for name in _MODULES:
        module = sys.modules.get(name)
        if module is not None and getattr(module, _FUNCTION, None) is function:
            setattr(module, _FUNCTION, replacement)


def _scratch_path(filename: str | os.PathLike[str]) -> str:
    """Return the path of the file that a redirected `open` makes."""
    descriptor = os.open(filename, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
