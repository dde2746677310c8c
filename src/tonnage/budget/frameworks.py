"""What each training framework keeps in memory, read from `data/frameworks.toml`."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from tonnage.budget.configuration import Configuration, FrameworkName, Quantity

_DATA = Path(__file__).parent / "data" / "frameworks.toml"
# DeepSpeed's default `stage3_max_live_parameters`.
MAX_LIVE_PARAMETERS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One row of `data/frameworks.toml`, which explains the fields."""

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
    """Return the framework of a configuration."""
    return _frameworks()[configuration.framework]


@cache
def _frameworks() -> dict[str, Framework]:
    tables = tomllib.loads(_DATA.read_text("utf-8"))
    lists = ("split_operators", "architectures")
    return {name: Framework(**row | {key: tuple(row[key]) for key in lists}) for name, row in tables.items()}


def architectures(name: FrameworkName) -> tuple[str, ...]:
    """Return the architectures a framework implements; empty if it takes any."""
    return _frameworks()[name].architectures


def reduces_once(configuration: Configuration) -> Quantity:
    """Return 1 if a pipeline schedule defers FSDP2's reductions and resharding to the last micro-batch, else 0."""
    sharded = configuration.framework == "fsdp2" and configuration.zero > 0
    return (np.asarray(configuration.pp) > 1) * float(sharded)


def working_bytes(configuration: Configuration) -> int:
    """Return the bytes per trained parameter in the dtype it is computed with or gathered from."""
    return framework_of(configuration).working_bytes if configuration.mixed else configuration.parameter_bytes


def gradient_bytes(configuration: Configuration) -> int:
    """Return the bytes per gradient as stored."""
    if not configuration.mixed:
        return configuration.parameter_bytes
    return 2 if configuration.bf16_gradients else framework_of(configuration).gradient_bytes


def made_bytes(configuration: Configuration) -> int:
    """Return the bytes per gradient as the backward pass computes it: the dtype of the parameter it computed with."""
    if configuration.framework == "fsdp2":
        return configuration.compute_bytes
    return working_bytes(configuration)


def master_bytes(configuration: Configuration) -> int:
    """Return the bytes of the FP32 master per 16-bit parameter, or of the part it lacks; 0 if there is none."""
    kept = framework_of(configuration).master_bytes if configuration.mixed else 0
    return kept // 2 if configuration.bf16_moments else kept


def state_bytes(configuration: Configuration) -> int:
    """Return the bytes per element of an optimizer state."""
    return 2 if configuration.precision == "bf16" or configuration.bf16_moments else 4
