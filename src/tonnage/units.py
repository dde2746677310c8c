"""Convert between byte counts and text.

| text                      | bytes         |
|---------------------------|---------------|
| "80GB", "80 gb", "80e9"   | 80 × 10^9     |
| "80GiB", "80 gib"         | 80 × 2^30     |
| "512 MiB", "0.5GiB"       | 2^29          |
| "4096", "4096 B"          | 4096          |

A budget may also be any number, or a share of what is free ("80%"). Output uses binary units and says so ("GiB").
"""

import math
import re
from numbers import Integral, Real
from typing import SupportsFloat

from tonnage.errors import BadSize

KIB = 2**10
MIB = 2**20
GIB = 2**30
TIB = 2**40

_BINARY = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_FACTORS = {name.lower(): factor for name, factor in (_BINARY | _DECIMAL | {"": 1}).items()}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*%\s*")
_BUDGETS = 'Give a size ("40 GiB"), a number of bytes, or a share of what is free ("80%").'


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as "80GB" or "512 MiB"."""
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None or math.isinf(float(match[1]) * factor):
        raise BadSize(f"{text!r} is not a size in bytes.", hint="Write it like 80GB (10^9), 80GiB (2^30) or 512 MiB.")
    number = match[1]
    return int(number) * factor if number.isdigit() else round(float(number) * factor)


def budget_bytes(
    size: str | SupportsFloat | None, free_bytes: int, *, name: str = "budget", least_bytes: int = 1
) -> int:
    """Return a budget in bytes: a size ("40 GiB"), a number, a share of `free_bytes` ("80%"), or all of them (None)."""
    if size is None:
        return free_bytes
    asked: float
    if isinstance(size, str):
        share = _SHARE.fullmatch(size)
        if share and float(share[1]) > 100:
            raise BadSize(f"{name} is {size.strip()}, which is more than all that is free.", hint=_BUDGETS)
        asked = free_bytes * float(share[1]) / 100 if share else parse_bytes(size)
    elif isinstance(size, bool) or not isinstance(size, Real):
        raise BadSize(f"{name} is {size!r}, which is neither a size nor a number of bytes.", hint=_BUDGETS)
    else:
        asked = int(size) if isinstance(size, Integral) else float(size)
    if not math.isfinite(asked) or asked < least_bytes:
        raise BadSize(f"{name} is {size}; it must be a finite number of bytes, {least_bytes} or more.", hint=_BUDGETS)
    return int(asked)


def is_size(text: str) -> bool:
    """Say whether a text is a number with a byte unit."""
    match = _SIZE.fullmatch(text)
    return match is not None and match[2].lower() in _FACTORS


def parse_gib(text: str) -> int:
    """Parse a memory size as GiB, even if written as GB."""
    return parse_bytes(re.sub(r"(?<=[kmgt])b?$", "iB", text.strip(), flags=re.IGNORECASE))


def parse_count(text: str) -> int:
    """Parse a number of tokens: "32k" (32,768), "1m" (1,048,576) or "4096"."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([km]?)\s*", text, re.IGNORECASE)
    if match is None or math.isinf(float(match[1]) * MIB):
        raise BadSize(f"{text!r} is not a number of tokens.", hint="Write it like 8192, 32k (32,768) or 1m.")
    return round(float(match[1]) * {"": 1, "k": KIB, "m": MIB}[match[2].lower()])


def parse_amount(text: str) -> float:
    """Parse an amount of tokens, samples or money, in powers of ten: "1B", "2.5 T", "300k" or "1e9"."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:e\+?[0-9]{1,3})?)\s*([kmbt]?)\s*", text, re.IGNORECASE)
    amount = float(match[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match[2].lower()] if match else 0.0
    if not 0 < amount < math.inf:
        raise BadSize(f"{text!r} is not an amount above zero.", hint="Write it like 300000, 300k, 1B or 1e9.")
    return amount


def unit_for(size_bytes: int) -> str:
    """Return the largest binary unit not larger than the size."""
    fitting = [name for name, factor in _BINARY.items() if abs(size_bytes) >= factor]
    return fitting[-1] if fitting else "B"


def format_bytes(size_bytes: int, unit: str | None = None) -> str:
    """Format bytes like "92.41 GiB": two decimals in the given or a suitable unit; plain bytes are whole."""
    unit = unit or unit_for(size_bytes)
    return f"{size_bytes} B" if unit == "B" else f"{size_bytes / _BINARY[unit]:.2f} {unit}"


def percent(share: float, digits: int = 1) -> str:
    """Format a share of 0.415 as "41.5 %"."""
    return f"{100 * share:.{digits}f} %"
