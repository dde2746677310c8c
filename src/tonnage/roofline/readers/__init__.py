"""One door to a profile: what kind of file it is is read off its contents, not its name.

A file is a trace of the PyTorch profiler (JSON) or Nsight Compute's CSV, gzipped or not. Nothing in it is executed.
"""

import gzip
import io
import json
import zlib
from pathlib import Path

from tonnage.errors import BadProfile
from tonnage.garbage import no_collection
from tonnage.roofline.profile import Profile
from tonnage.roofline.readers.ncu import is_ncu, read_ncu
from tonnage.roofline.readers.torch_trace import is_torch_trace, read_torch_trace

# Parsed, a trace takes about six times its text.
LIMIT_BYTES = 512 * 2**20
_GZIP = b"\x1f\x8b"
_START = 65_536
_HINT = "Give a trace of the PyTorch profiler (JSON) or Nsight Compute's CSV (`ncu --page raw --csv`)."


def read_profile(path: Path, *, limit_bytes: int = LIMIT_BYTES) -> Profile:
    """The profile in a file."""
    text = _text(path, limit_bytes)
    if is_ncu(text[:_START]) and not text.lstrip().startswith(("{", "[")):
        return read_ncu(io.StringIO(text, newline=""), path.name)
    try:
        with no_collection():
            value = json.loads(text)
    except (ValueError, RecursionError):
        raise BadProfile(f"{path} is neither JSON nor Nsight Compute's CSV.", hint=_HINT) from None
    if not is_torch_trace(value):
        raise BadProfile(f"{path} is JSON, but no trace of the PyTorch profiler.", hint=_HINT)
    return read_torch_trace(value, path.name)


def _text(path: Path, limit_bytes: int) -> str:
    try:
        with path.open("rb") as file:
            packed = file.read(len(_GZIP)) == _GZIP
            file.seek(0)
            stream = gzip.GzipFile(fileobj=file) if packed else file
            data = stream.read(limit_bytes + 1)
    except OSError as error:  # gzip's own among them
        raise BadProfile(f"{path} cannot be read: {error.strerror or error}.", hint=_HINT) from None
    except (EOFError, zlib.error) as error:
        raise BadProfile(f"{path} is damaged: {error}.", hint="Copy or record it again.") from None
    if len(data) > limit_bytes:
        raise BadProfile(
            f"{path} holds more than {limit_bytes // 2**20} MiB of text.", hint="Profile fewer steps (schedule=...)."
        )
    return data.decode("utf-8", errors="replace")
