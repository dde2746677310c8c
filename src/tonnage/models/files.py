"""The files of a model: its folder, by a path or an id in this machine's hub cache, and its JSON files, one object each.

Nothing is downloaded unless `online` is set, and then only data: configurations, weights, tokenizers.
"""

import re
from pathlib import Path
from typing import Any

from tonnage.errors import BadModel, MissingPart, UnknownModel
from tonnage.untrusted import Unreadable, parse_json, read_bytes

INDEX = "model.safetensors.index.json"
LARGEST_CONFIG_BYTES = 16 * 2**20
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_DATA = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
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


def find_folder(name_or_path: str, *, online: bool = False) -> Path:
    """Return the model's folder."""
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BadModel(f"The folder {path} has no config.json.", hint="Give the folder of a model.")
        return path
    if path.exists() or not HUB_ID.fullmatch(name_or_path):
        problem = f"There is no folder {name_or_path!r}."
        raise UnknownModel(problem, hint="Give the folder of a model, or an id of the hub.")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingPart("An id of the hub needs huggingface_hub.", hint="pip install huggingface_hub") from None
    try:
        return Path(snapshot_download(name_or_path, local_files_only=not online, allow_patterns=list(_DATA)))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        if online:
            raise UnknownModel(f"The hub gave no {name_or_path!r}: {reason}", hint="Check the id, or log in.") from None
        problem = f"{name_or_path!r} is neither a folder nor in the hub's cache on this machine."
        raise UnknownModel(problem, hint="Add --online to download it.") from None
