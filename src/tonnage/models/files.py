"""Read a model's JSON files: each holds one object, and errors become readable messages."""

from pathlib import Path
from typing import Any

from tonnage.errors import BadModel
from tonnage.untrusted import Unreadable, parse_json, read_bytes

INDEX = "model.safetensors.index.json"
LARGEST_CONFIG_BYTES = 16 * 2**20
_HINT = "Give a config.json, a folder or a .safetensors file."


def read_json(path: Path, *, largest_bytes: int = LARGEST_CONFIG_BYTES) -> dict[str, Any]:
    """Return the object in a file."""
    try:
        return parse_object(read_bytes(path, largest_bytes), str(path))
    except Unreadable as error:
        raise BadModel(f"{path} {error}.", hint=_HINT) from None


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object; raises a readable error if it is none."""
    try:
        value = parse_json(data)
    except Unreadable as error:
        raise BadModel(f"{where} {error}.", hint=_HINT) from None
    if not isinstance(value, dict):
        raise BadModel(f"{where} holds a JSON {type(value).__name__}, not an object.", hint='It should start with "{".')
    return value
