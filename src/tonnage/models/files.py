"""Read JSON that a stranger wrote: its size is looked at first, and whatever is wrong with it becomes a sentence."""

import json
from pathlib import Path
from typing import Any

from tonnage.errors import BadModel

INDEX = "model.safetensors.index.json"
LARGEST_CONFIG_BYTES = 16 * 2**20


def read_json(path: Path, *, largest_bytes: int = LARGEST_CONFIG_BYTES) -> dict[str, Any]:
    """The object that a file holds."""
    size = path.stat().st_size
    if size > largest_bytes:
        raise BadModel(
            f"{path} has {size:,} bytes, too many for a JSON file of this kind.",
            hint="A model's config.json has a few kilobytes; weights are read from .safetensors files.",
        )
    try:
        with path.open("rb") as file:
            data = file.read(largest_bytes)
    except OSError as error:
        raise BadModel(
            f"{path} cannot be read: {error.strerror}.", hint="Check the path and its permissions."
        ) from None
    return parse_object(data, str(path))


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object, or a clear refusal."""
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise BadModel(f"{where} is not text.", hint="Give a config.json, a folder or a .safetensors file.") from None
    except RecursionError:
        raise BadModel(f"{where} is nested too deeply.", hint="A model's configuration is nearly flat.") from None
    except ValueError as error:
        reason = str(error).partition(":")[0]
        raise BadModel(
            f"{where} is not JSON: {reason}.", hint="Give a config.json, a folder or a .safetensors file."
        ) from None
    if not isinstance(value, dict):
        raise BadModel(f"{where} holds a JSON {type(value).__name__}, not an object.", hint='It should start with "{".')
    return value
