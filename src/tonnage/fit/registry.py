"""All techniques by name, imported on demand."""

from importlib import import_module
from typing import Any

from tonnage.errors import RequestError
from tonnage.fit.technique import Technique

_CLASSES = {
    "activation-offload": "ActivationOffload",
    "allocator": "SetAllocator",
    "autocast": "Autocast",
    "chunked-loss": "ChunkedLoss",
    "compile": "Compile",
    "eight-bit-states": "EightBitStates",
    "fp8": "Fp8Linear",
    "fused-attention": "FusedAttention",
    "host-states": "HostStates",
    "master-weights": "MasterWeights",
    "micro-batches": "MicroBatches",
    "nvme": "Nvme",
    "recompute": "Recompute",
    "step-in-backward": "StepInBackward",
    "stochastic-bf16": "StochasticBf16",
    "tiled-attention": "TiledAttention",
    "tiled-mlp": "TiledMlp",
    "tiled-norm": "TiledNorm",
    "weight-streaming": "WeightStreaming",
}
NAMES = tuple(_CLASSES)  # without sharding, which comes with a mesh
# Used only if a plan names them, never chosen for a budget: the alternatives were always cheaper.
BY_PLAN = frozenset({"nvme", "tiled-attention", "weight-streaming"})
_SHARD = "shard"


def technique_class(name: str) -> type[Technique]:
    if name == _SHARD:
        from tonnage.fit.sharding.shard import Shard

        return Shard
    if name not in _CLASSES:
        raise RequestError(f"There is no technique {name!r}.", hint=f"Known are {', '.join(NAMES)}.")
    module = import_module(f"tonnage.fit.techniques.{name.replace('-', '_')}")
    found: type[Technique] = getattr(module, _CLASSES[name])
    return found


def make(name: str, settings: dict[str, Any]) -> Technique:
    """Build a technique from its JSON settings."""
    technique = technique_class(name)
    unknown = sorted(set(settings) - set(technique.__dataclass_fields__))
    if unknown:
        raise RequestError(
            f"{name} has no setting {unknown[0]!r}.", hint="The plan may be of another version of Tonnage."
        )
    return technique(**{key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()})


def find_conflict(techniques: list[Technique]) -> str | None:
    """Return why these techniques cannot be combined, or None."""
    for one in techniques:
        for other in techniques:
            if other.name in one.conflicts and other is not one:
                return f"{one.title} and {other.title} cannot stand together: {one.conflicts[other.name]}"
    return None
