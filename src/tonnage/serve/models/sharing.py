"""A decoder that shares the weights of a live transformers model: one copy, trained by one and served by the other.

A tensor that the pass reads as it is stays the module's own. Merged ones (query, key and value; gate and up) are
concatenated once, and the module's parameters become views of the result: an optimizer that updates them in place,
as PyTorch's do, changes what is served. PEFT adapters are not served unless merged into the base.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tonnage.errors import BadModel
from tonnage.serve.models.architecture import architecture_of
from tonnage.serve.models.decoder import Decoder
from tonnage.serve.models.experts import ExpertStack
from tonnage.serve.models.load import weight_name
from tonnage.serve.models.weights import Builder, Dense, EightBit

# Prefixes that PEFT adds to the names of a base model.
_AROUND = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)")


def share_decoder(module: nn.Module, *, context: int | None = None) -> Decoder:
    """Return the decoder of a causal language model, on its device and in its precision."""
    config: Any = module.config
    architecture = architecture_of(config.to_dict())
    build = SharingBuilder(module)
    return Decoder(architecture, build, context or architecture.positions)


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
        start = 0
        for one in parameters:
            one.data = merged[start : start + one.shape[0]]
            start += one.shape[0]
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
