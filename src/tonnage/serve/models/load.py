"""Load a decoder from a folder of safetensors, make one with random weights, or share those of a live module.

Every weight is allocated once, on its device and merged; shards are mapped one after another and their tensors
copied (or quantized) into place, so that nothing holds the model twice. Names and shapes are checked against the
headers before anything is read. This module downloads nothing.

Of a live transformers model, a tensor that the pass reads as it is stays the module's own. Merged ones (query, key and
value; gate and up) are concatenated once, and the module's parameters become views of the result: an optimizer that
updates them in place, as PyTorch's do, changes what is served. PEFT adapters are not served unless merged into the base.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tonnage.errors import BadModel, MissingPart, UnknownModel
from tonnage.models.checkpoint import Stored, read_checkpoint, read_header
from tonnage.models.files import INDEX, read_json
from tonnage.serve.config import Weights
from tonnage.serve.models.architecture import Architecture, architecture_of
from tonnage.serve.models.decoder import Decoder
from tonnage.serve.models.weights import Builder, Dense, EightBit, ExpertStack

# Tensor names in files, and the names used here.
_RENAMED = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^(language_model\.model|model\.language_model)\.", "model."),
        (r"^language_model\.", ""),
        (r"^(?=layers\.|embed_tokens\.|norm\.)", "model."),
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
        (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
        (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
    )
)
_OTHER_PARTS = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector)\.")
_READABLE = ("fp64", "fp32", "fp16", "bf16")


def load_decoder(
    folder: str | Path, architecture: Architecture, *, device: torch.device | str, dtype: torch.dtype,
    weights: Weights | None = None, context: int | None = None,
) -> Decoder:  # fmt: skip
    """Load the model of a folder; position tables extend to `context`, or to the model's own limit."""
    files = _files(Path(folder).expanduser())
    build = Builder(torch.device(device), dtype, weights)
    decoder = Decoder(architecture, build, context or architecture.positions)
    headers = {file: read_header(file) for file in files}
    _check((tensor for tensors in headers.values() for tensor in tensors), build, architecture)
    try:
        from safetensors import safe_open
    except ImportError:
        raise MissingPart("Reading weights needs safetensors.", hint="pip install safetensors") from None
    pieces = build.pieces | build.fused
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as shard:
            for name in shard.keys():  # noqa: SIM118  (a shard is no mapping)
                piece = pieces.get(weight_name(name))
                if piece is not None:
                    piece.fill(shard.get_tensor(name))
    return decoder


def random_decoder(
    architecture: Architecture, device: torch.device | str, dtype: torch.dtype, seed: int = 0,
    weights: Weights | None = None, context: int | None = None,
) -> Decoder:  # fmt: skip
    """Return a model with random weights: for benchmarks, or if only the shape matters."""
    build = Builder(torch.device(device), dtype, weights)
    decoder = Decoder(architecture, build, context or architecture.positions)
    generator = torch.Generator(device=build.device).manual_seed(seed)
    for name, piece in build.pieces.items():
        if name.endswith("norm.weight"):
            piece.fill(torch.tensor(1 - architecture.norm_offset))
        else:
            piece.fill_random(generator, dtype)
    return decoder


def _files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder: those in the index, else the only one."""
    if not folder.is_dir():
        raise UnknownModel(f"There is no folder {folder}.", hint="Give the folder that the model was saved to.")
    index = folder / INDEX
    if index.is_file():
        read_checkpoint(index)  # refuses an index without shards, or with missing ones
        return [folder / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    found = [file for file in folder.glob("*.safetensors") if not file.name.startswith("adapter_")]
    if len(found) == 1 or folder / "model.safetensors" in found:
        return [folder / "model.safetensors" if len(found) > 1 else found[0]]
    what = f"{len(found)} .safetensors files and no {INDEX}" if found else "no .safetensors files"
    problem = f"The folder {folder} has {what}."
    raise BadModel(problem, hint="Save the model with save_pretrained, or fetch all its files.")


def _check(stored: Iterable[Stored], build: Builder, architecture: Architecture) -> None:
    """Check that every piece is present with the right shape, and nothing else is."""
    filled: set[str] = set()
    unexpected: list[str] = []
    for tensor in stored:
        name = weight_name(tensor.name)
        piece = build.pieces.get(name) or build.fused.get(name)
        if piece is not None:
            if tensor.shape != tuple(piece.weight.shape):
                raise BadModel(
                    f"{tensor.name} has the shape {list(tensor.shape)} in the checkpoint, and"
                    f" {list(piece.weight.shape)} by its configuration.",
                    hint="Give the config.json that was saved with these weights.",
                )
            if tensor.dtype not in _READABLE:
                formats = ", ".join(_READABLE)
                problem = f"{tensor.name} is kept as {tensor.dtype}."
                raise BadModel(problem, hint=f"Give a checkpoint in one of {formats}.")
            filled.update(piece.holds or (name,))
        elif not (
            tensor.is_buffer or _OTHER_PARTS.match(tensor.name) or (architecture.tied and name == "lm_head.weight")
        ):
            unexpected.append(tensor.name)
    missing = [name for name in build.pieces if name not in filled]
    for problem, names in (("lacks", missing), ("has, and the architecture has not,", unexpected)):
        if names:
            more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
            hint = f"Give a whole checkpoint of the {architecture.family} that config.json describes."
            raise BadModel(f"The checkpoint {problem} {names[0]}{more}.", hint=hint)


def weight_name(stored: str) -> str:
    """Return the name used here for a tensor that files call `stored`."""
    for pattern, name in _RENAMED:
        stored = pattern.sub(name, stored, count=1)
    return stored


# Prefixes that PEFT adds to the names of a base model.
_AROUND = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)")


def share_decoder(module: nn.Module, *, context: int | None = None) -> Decoder:
    """Return the decoder of a causal language model, on its device and in its precision."""
    config: Any = module.config
    architecture = architecture_of(config.to_dict())
    return Decoder(architecture, SharingBuilder(module), context or architecture.positions)


class SharingBuilder(Builder):
    """Returns a module's parameters instead of empty weights."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = {weight_name(_AROUND.sub("", name)): one for name, one in module.named_parameters()}
        embedding = self._parameter("model.embed_tokens.weight")
        super().__init__(embedding.device, embedding.dtype, None)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return the parameter itself."""
        return self._counted(self._parameter(name, shape).data)

    def matrix(self, prefix: str, parts: Sequence[tuple[str, int]], columns: int, *, bias: bool) -> Dense | EightBit:
        """Return the parameter itself for one part, else one matrix of which the parameters are views."""
        weight = self._merged([(f"{prefix}{name}.weight", (rows, columns)) for name, rows in parts])
        return Dense(
            weight, self._merged([(f"{prefix}{name}.bias", (rows,)) for name, rows in parts]) if bias else None
        )

    def stack(
        self, prefix: str, fused: str, parts: Sequence[tuple[str, int]], columns: int, experts: int
    ) -> ExpertStack:
        """Return the experts, which are one parameter in transformers too."""
        weight = self.tensor(prefix + fused, experts, sum(rows for _, rows in parts), columns)
        return ExpertStack(weight, None, self.dtype)

    def _merged(self, named: Sequence[tuple[str, tuple[int, ...]]]) -> Tensor:
        parameters = [self._parameter(name, shape) for name, shape in named]
        if len(parameters) == 1:
            return self._counted(parameters[0].data)
        merged = torch.cat([one.data for one in parameters])
        for one, rows in zip(parameters, merged.split([one.shape[0] for one in parameters]), strict=True):
            one.data = rows
        return self._counted(merged)

    def _parameter(self, name: str, shape: tuple[int, ...] = ()) -> nn.Parameter:
        found = self._parameters.get(name)
        if found is None or (shape and tuple(found.shape) != shape):
            what = "has no such parameter" if found is None else f"has it in the shape {list(found.shape)}"
            problem = f"The engine wants {name}, and the module {what}."
            raise BadModel(problem, hint="Give an unquantised model of transformers.")
        if found.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise BadModel(f"{name} is kept as {found.dtype}.", hint="Load the model in 16 or 32 bits.")
        return found

    def _counted(self, weight: Tensor) -> Tensor:
        self.bytes += weight.nbytes
        return weight
