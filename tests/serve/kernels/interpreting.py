"""Triton's interpreter, made to go with the NumPy that is here. Import this before a kernel is called."""

from typing import Any

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patch_for_numpy(tensor: Any, scope: Any) -> None:
    """Scalars are arrays of one element to the interpreter, and NumPy from 2.4 on makes no int of such."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_for_numpy
