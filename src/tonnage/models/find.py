"""Find a model by a preset's name, a configuration, a folder, a checkpoint or, if allowed, the hub.

| given                                         | read                                                 |
|-----------------------------------------------|------------------------------------------------------|
| `llama-3.1-8b`, `meta-llama/Llama-3.1-8B`     | the preset                                           |
| `path/to/config.json`                         | the configuration                                    |
| `path/to/folder`                              | its config.json, and its safetensors headers         |
| `model.safetensors`, `...safetensors.index.json` | headers only, and a config.json beside them       |
| any other `owner/name`, with `online`         | the hub's config.json                                |
| `...gguf`                                     | the preset in the file's name                        |
"""

import re
from dataclasses import replace
from pathlib import Path

from tonnage.errors import BadModel, MissingPart, UnknownModel
from tonnage.models.config import from_config
from tonnage.models.files import HUB_ID, INDEX, read_json
from tonnage.models.presets import find_preset, unknown
from tonnage.models.shape import ModelShape
from tonnage.untrusted import printable

_PATH_LIKE = re.compile(r"^[./~]|\.(json|safetensors|bin|pt|pth|gguf)$|/.*/")


def find_model(name_or_path: str, *, online: bool = False) -> ModelShape:
    """Return the shape of the named model."""
    path = Path(name_or_path).expanduser()
    try:
        is_folder = path.is_dir()
        exists = (path / "config.json").is_file() or bool(_checkpoint_in(path)) if is_folder else path.exists()
    except (OSError, ValueError):  # a name too long, or with a null in it
        is_folder = exists = False
    if exists and path.suffix != ".gguf":
        return _from_path(path)
    preset = find_preset(path.name if path.suffix == ".gguf" else name_or_path)
    if preset is not None:
        return preset
    if is_folder and path != Path():
        raise BadModel(f"The folder {path} holds no model.", hint="It needs a config.json or .safetensors files.")
    if path.suffix == ".gguf":
        hint = "Give the config.json of the model that it was made from, and --weights q4_k_m, say."
        raise UnknownModel(f"The name of {path.name} does not say which known model it is.", hint=hint)
    if _PATH_LIKE.search(name_or_path):
        raise UnknownModel(f"There is no file or folder {name_or_path!r}.", hint="Check the path.")
    if HUB_ID.fullmatch(name_or_path):
        if not online:
            raise unknown(name_or_path, hint="If it is on the hub, add --online to read its config.json there.")
        try:
            from huggingface_hub import hf_hub_download
        except ImportError:
            raise MissingPart("Going online needs huggingface_hub.", hint="pip install huggingface_hub") from None
        try:
            config = hf_hub_download(name_or_path, "config.json")
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            problem = f"The hub gave no config.json of {name_or_path!r}: {reason}"
            raise UnknownModel(problem, hint="Check the id, or log in.") from None
        return from_config(read_json(Path(config)), name_or_path)
    raise unknown(name_or_path)


def _from_path(path: Path) -> ModelShape:
    try:
        if path.is_dir():
            checkpoint, name = _checkpoint_in(path), printable(path.absolute().name)
            if checkpoint is None or checkpoint.name.startswith("adapter_"):
                return from_config(read_json(path / "config.json"), name)
            return replace(_from_checkpoint(checkpoint), name=name)
        if not path.is_file():
            raise BadModel(f"{path} is not a file.", hint="Give a config.json, a folder or a .safetensors file.")
        if path.name.endswith((".safetensors", ".safetensors.index.json")):
            return _from_checkpoint(path)
        return from_config(read_json(path), _name(path))
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror}."
        raise BadModel(problem, hint="Check the path and its permissions.") from None


def _name(path: Path) -> str:
    return printable(path.parent.absolute().name if path.name == "config.json" else path.stem)


def _checkpoint_in(folder: Path) -> Path | None:
    if (folder / INDEX).is_file():
        return folder / INDEX
    return min(folder.glob("*.safetensors"), default=None)


def _from_checkpoint(path: Path) -> ModelShape:
    # A preset, the usual request, does not need it.
    from tonnage.models.checkpoint import from_tensors, read_checkpoint, with_config

    config = path.with_name("config.json")
    shape = from_config(read_json(config), _name(path)) if config.is_file() else None
    try:
        tensors = read_checkpoint(path)
    except BadModel as error:
        if shape is None or not path.name.endswith(".index.json"):
            raise
        return replace(shape, notes=(*shape.notes, str(error)))
    if shape is not None:
        return with_config(shape, tensors)
    shard = re.search(r"-(\d+)-of-(\d+)\.safetensors$", path.name)
    if shard and int(shard[2]) > 1 and not path.with_name(INDEX).is_file():
        problem = f"{path} is one shard of {int(shard[2])}, and neither their index nor a config.json is beside it."
        raise BadModel(problem, hint=f"Put {INDEX} beside the shards, or give the model's config.json.")
    return from_tensors(tensors, _name(path))
