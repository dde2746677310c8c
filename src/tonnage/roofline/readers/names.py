"""Readable kernel names: "reduce sum" for three lines of C++ templates."""

import re

_RETURNS = re.compile(r"^(?:void|static|__global__)\s+")
_ANONYMOUS = re.compile(r"(?:\(anonymous namespace\)|<unnamed>)::")
_APPLIED = re.compile(r"(\w*?)_?(?:[Ff]unctor(?:OnSelf)?_?(\w*)|_kernel_cuda|(?:CUDA)?KernelImpl)\b")
# Wrappers that say nothing of what is applied.
_EMPTY = {"CUDA", "AUnary", "BUnary"}
_DECORATION = re.compile(r"^(?:vectorized|unrolled)_|_kernel(?=_|$)")
_UNNAMED = 40


def short_kernel_name(name: str) -> str:
    """Return the function's own name, and what it applies if its templates say so."""
    bare = _ANONYMOUS.sub("", _RETURNS.sub("", name.strip()))
    head, _, templates = bare.partition("<")
    own = head.partition("(")[0].split("::")[-1].strip() or bare[:_UNNAMED]
    own, applied = _DECORATION.sub("", own) or own, _applied(templates)
    return f"{own} {applied}" if applied and applied not in own else own


def _applied(templates: str) -> str:
    for match in _APPLIED.finditer(templates):
        for word in (match[1], match[2]):
            if word and word not in _EMPTY:
                return word.strip("_")
    return ""
