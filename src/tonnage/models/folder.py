"""The folder of a model whose weights are needed: a path, or an id in this machine's hub cache.

Nothing is downloaded unless `online` is set, and then only data: configurations, weights, tokenizers.
"""

import re
from pathlib import Path

from tonnage.errors import BadModel, MissingPart, UnknownModel

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_DATA = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def find_folder(name_or_path: str, *, online: bool = False) -> Path:
    """Return the model's folder."""
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BadModel(f"The folder {path} has no config.json.", hint="Give the folder of a model.")
        return path
    if path.exists() or not _HUB_ID.fullmatch(name_or_path):
        raise UnknownModel(
            f"There is no folder {name_or_path!r}.", hint="Give the folder of a model, or an id of the hub."
        )
    return _from_hub(name_or_path, online)


def _from_hub(hub_id: str, online: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingPart("An id of the hub needs huggingface_hub.", hint="pip install huggingface_hub") from None
    try:
        return Path(snapshot_download(hub_id, local_files_only=not online, allow_patterns=list(_DATA)))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        if online:
            raise UnknownModel(f"The hub gave no {hub_id!r}: {reason}", hint="Check the id, or log in.") from None
        raise UnknownModel(
            f"{hub_id!r} is neither a folder nor in the hub's cache on this machine.",
            hint="Add --online to download it.",
        ) from None
