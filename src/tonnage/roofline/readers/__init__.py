"""Read a profile, by contents: a JSON trace of the PyTorch profiler or Nsight Compute's CSV, optionally gzipped."""

import io
from pathlib import Path

from tonnage.errors import BadProfile
from tonnage.garbage import no_collection
from tonnage.roofline.items import RooflineProfile
from tonnage.roofline.readers.ncu import is_ncu, read_ncu
from tonnage.roofline.readers.torch_trace import is_torch_trace, read_torch_trace
from tonnage.untrusted import Unreadable, parse_json, parse_text, printable, read_bytes

# A parsed trace takes about six times its text.
LIMIT_BYTES = 512 * 2**20
_START = 65_536
_HINT = "Give a trace of the PyTorch profiler (JSON) or Nsight Compute's CSV (`ncu --page raw --csv`)."


def read_profile(path: Path, *, limit_bytes: int = LIMIT_BYTES) -> RooflineProfile:
    """Return the profile in a file."""
    source = printable(path.name)
    try:
        data = read_bytes(path, limit_bytes, inflate=True)
    except Unreadable as error:
        raise BadProfile(f"{path} {error}.", hint=_HINT) from None
    start = data[:_START].decode("utf-8", errors="replace")
    if is_ncu(start) and not start.lstrip().startswith(("{", "[")):
        return read_ncu(io.StringIO(parse_text(data), newline=""), source)
    try:
        with no_collection():
            value = parse_json(data, errors="replace")
    except Unreadable as error:
        raise BadProfile(f"{path} is neither JSON nor Nsight Compute's CSV: it {error}.", hint=_HINT) from None
    if not is_torch_trace(value):
        raise BadProfile(f"{path} is JSON, but no trace of the PyTorch profiler.", hint=_HINT)
    return read_torch_trace(value, source)
