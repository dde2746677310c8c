"""What a training framework keeps beside what the mathematics needs. The facts are data."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from tonnage.budget.configuration import Configuration, FrameworkName, Quantity

_DATA = Path(__file__).parent / "data" / "frameworks.toml"
# DeepSpeed's default: parameters that ZeRO-3 keeps gathered.
MAX_LIVE_PARAMETERS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One row of `data/frameworks.toml`, which says what the words mean."""

    working_bytes: int
    gradient_bytes: int
    master_bytes: int
    keeps_gradients: bool
    parameters_sharded_from: int
    gradients_sharded_from: int
    loss_forward_bytes: int
    loss_backward_bytes: int
    parallel: Literal["torch", "own"]
    written: Literal["transformers", "fused", "native"]
    clips: bool
    bucket_bytes: float
    gathers_at_once: bool
    pipeline_messages: int
    pipeline_operators: int
    split_operators: tuple[int, int]
    selective: Literal["scores", "operators"]
    fuses_sums: bool
    cuts_products: bool
    architectures: tuple[str, ...]


def framework_of(configuration: Configuration) -> Framework:
    """The one that trains this configuration."""
    return _frameworks()[configuration.framework]


@cache
def _frameworks() -> dict[str, Framework]:
    tables = tomllib.loads(_DATA.read_text("utf-8"))
    lists = ("split_operators", "architectures")
    return {name: Framework(**row | {key: tuple(row[key]) for key in lists}) for name, row in tables.items()}


def architectures(name: FrameworkName) -> tuple[str, ...]:
    """Those that a framework has blocks for; nothing where it takes any."""
    return _frameworks()[name].architectures


def reduces_once(configuration: Configuration) -> Quantity:
    """1 where a pipeline's schedule turns FSDP2's reductions and resharding off until the last micro-batch is through, else 0."""
    sharded = configuration.framework == "fsdp2" and configuration.zero > 0
    return (np.asarray(configuration.pp) > 1) * float(sharded)


def working_bytes(configuration: Configuration) -> int:
    """Of one trained parameter as it is computed with or gathered from."""
    return framework_of(configuration).working_bytes if configuration.mixed else configuration.parameter_bytes


def gradient_bytes(configuration: Configuration) -> int:
    """Of one gradient as it is kept."""
    if not configuration.mixed:
        return configuration.parameter_bytes
    return 2 if configuration.bf16_gradients else framework_of(configuration).gradient_bytes


def made_bytes(configuration: Configuration) -> int:
    """Of one gradient as the backward pass makes it: as wide as the parameter that was computed with."""
    if configuration.framework == "fsdp2":
        return configuration.compute_bytes
    return working_bytes(configuration)


def master_bytes(configuration: Configuration) -> int:
    """Of the FP32 copy beside a 16-bit parameter, or of what the parameter lacks of it; 0 where there is none."""
    kept = framework_of(configuration).master_bytes if configuration.mixed else 0
    return kept // 2 if configuration.bf16_moments else kept


def state_bytes(configuration: Configuration) -> int:
    """Of one number of an optimizer's state: as wide as what it updates."""
    return 2 if configuration.precision == "bf16" or configuration.bf16_moments else 4
