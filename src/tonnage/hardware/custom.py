"""A GPU that is not in the catalogue, from a user's TOML file.

    name = "Prototype 48"            # required, as are the next six, unless `like` gives them
    architecture = "sm_90"           # whose registers, shared memory and lanes it has
    memory_bytes = "48 GiB"          # what a program sees: a number of bytes, or a text with a unit
    bandwidth_bytes_per_s = 2.4e12
    sm_count = 96
    clock_mhz = 1800
    rates = { fp32 = 4.4e13, bf16 = 3.5e14 }

    like = "h100"                    # take what is not given here from a GPU of the catalogue
    power_w = 350                    # and any other field of `Gpu`

A missing, unknown or implausible field is an error that names it: most mistakes in such files are wrong units.
"""

import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tonnage.errors import BadGpu, BadSize
from tonnage.hardware.catalogue import architecture_tables, build, find_gpu, gpu_tables, is_file
from tonnage.hardware.gpu import Gpu
from tonnage.units import parse_bytes
from tonnage.untrusted import Unreadable, printable, read_bytes

_MOST_BYTES = 2**20
_RULES = tomllib.loads((Path(__file__).parent / "data" / "custom.toml").read_text())
_NUMBERS: dict[str, list[float]] = _RULES["sizes"] | _RULES["counts"] | _RULES["speeds"]
_KNOWN = (*_RULES["texts"], *_NUMBERS, "rates")
_RATE_RANGE = (1e9, 1e19)


def read_gpu(path: Path) -> Gpu:
    """Return the GPU that a file describes; its key is the file's stem."""
    row = {field: _checked(path, field, value) for field, value in _read(path).items()}
    base: dict[str, Any] = {}
    if like := row.pop("like", None):
        if is_file(like):
            hint = "Name a card of the catalogue: `tonnage gpu` lists them."
            raise BadGpu(f"like in {path} is {like!r}: a file.", hint=hint)
        base = gpu_tables().table(find_gpu(like).key)
    missing = [field for field in _RULES["required"] if field not in base | row]
    if missing:
        hint = f"Write {_example(missing[0])}; a field `like` takes what is missing from another card."
        raise BadGpu(f"{path} lacks {', '.join(missing)}.", hint=hint)
    merged = _RULES["unsaid"] | base | row | {"aliases": ()}
    merged["memory_source"] = f"given in {path.name}" if "memory_bytes" in row else base["memory_source"]
    return build(path.stem, merged | {"family": "own-linked" if merged.get("nvlink_bytes_per_s") else "own"})


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = read_bytes(path, _MOST_BYTES)
    except Unreadable as error:
        raise BadGpu(f"{path} {error}.", hint="Name a TOML file that describes a card, in some ten lines.") from None
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadGpu(f"{path} is not TOML: {error}.", hint=f"Write lines like {_example('memory_bytes')}.") from None


def _checked(path: Path, field: str, value: Any) -> Any:
    if field not in _KNOWN:
        close = get_close_matches(field, _KNOWN, n=1, cutoff=0.5)
        hint = f"Did you mean {close[0]}?" if close else f"Known fields: {', '.join(_KNOWN)}."
        raise BadGpu(f"{path} has a field {field!r}, which no card has.", hint=hint)
    if field == "rates":
        if not isinstance(value, dict) or not value:
            raise BadGpu(f"rates in {path} is {value!r}: not a table of rates.", hint=f"Write {_example('rates')}.")
        for name in value:
            if name not in _RULES["rates"]:
                raise BadGpu(f"rates in {path} has {name!r}.", hint=f"Write one of {', '.join(_RULES['rates'])}.")
        if "fp32" not in value:
            raise BadGpu(f"rates in {path} lacks fp32.", hint=f"Write {_example('rates')}.")
        return {name: _number(path, f"rates.{name}", rate, _RATE_RANGE) for name, rate in value.items()}
    if field in _RULES["texts"]:
        if not isinstance(value, str) or not value.strip():
            raise BadGpu(f"{field} in {path} is {value!r}: not a text.", hint=f"Write {_example(field)}.")
        known = [name for name in architecture_tables().texts if name != "overhead"]
        if field == "architecture" and value not in known:
            raise BadGpu(f"architecture in {path} is {value!r}.", hint=f"Write one of {', '.join(known)}.")
        return printable(value)
    if field in _RULES["sizes"] and isinstance(value, str):
        try:
            value = parse_bytes(value)
        except BadSize as error:
            raise BadGpu(f"{field} in {path}: {error}", hint=error.hint) from None
    low, high = _NUMBERS[field]
    whole = field not in _RULES["speeds"]
    number = _number(path, field, value, (low, high))
    if whole and number != int(number):
        raise BadGpu(f"{field} in {path} is {value!r}: not a whole number.", hint=f"Write {_example(field)}.")
    return int(number) if whole else float(number)


def _number(path: Path, field: str, value: Any, limits: tuple[float, float]) -> float:
    low, high = limits
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadGpu(f"{field} in {path} is {value!r}: not a number.", hint=f"Write {_example(field)}.")
    if not low <= value <= high:
        words = f"{field} in {path} is {value:,}: not within {low:,} and {high:,}."
        raise BadGpu(words, hint=f"Write {_example(field)}.")
    return value


def _example(field: str) -> str:
    """Show how a field is written, with the H100's value."""
    if field.startswith("rates"):
        return "rates = { fp32 = 6.69e13, bf16 = 9.894e14 } (operations a second)"
    if field == "memory_bytes":
        return 'memory_bytes = 85017755648 (or "79.2 GiB")'
    value = "h100" if field == "like" else getattr(find_gpu("h100"), field)
    return f'{field} = "{value}"' if isinstance(value, str) else f"{field} = {value}"
