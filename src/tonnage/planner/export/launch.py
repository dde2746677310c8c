"""What an exported file starts: a plan for training or serving, in plain numbers, independent of file formats."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tonnage.budget.serving.memory import ServingConfiguration
from tonnage.hardware import Cluster
from tonnage.models.presets import hub_id
from tonnage.models.shape import ModelShape

if TYPE_CHECKING:
    # It imports NumPy, which launching a server does not need.
    from tonnage.budget.training.configuration import Configuration

# Nothing in a plan depends on it: a starting point, the same in every file.
LEARNING_RATE = 1e-4
CLIP_NORM = 1.0

Engine = Literal["ddp", "fsdp2", "deepspeed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The numbers of a `Configuration`."""

    seq: int
    micro_batch: int
    accumulate: int
    tp: int
    pp: int
    cp: int
    ep: int
    data: int
    shard: int

    @property
    def gpus(self) -> int:
        """GPUs that it uses."""
        return self.tp * self.cp * self.pp * self.data

    @property
    def global_batch(self) -> int:
        """Sequences in one optimizer step."""
        return self.micro_batch * self.accumulate * self.data

    @property
    def replicas(self) -> int:
        """Copies of what is sharded: more than one in hybrid sharding."""
        return self.data // self.shard


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A training run: one configuration with plain numbers on a cluster. `model` is as the user named it."""

    model: str
    shape: ModelShape
    cluster: Cluster
    configuration: "Configuration"

    @property
    def sizes(self) -> Sizes:
        """The configuration's numbers."""
        from tonnage.budget.training.configuration import NUMBERS

        return Sizes(**{name: int(getattr(self.configuration, name)) for name in NUMBERS})

    @property
    def engine(self) -> Engine:
        """The library that implements data parallelism."""
        config = self.configuration
        if config.framework == "deepspeed":
            return "deepspeed"
        if config.zero == 0 or self.sizes.data * self.sizes.cp == 1:
            return "ddp"
        # Plain PyTorch can shard optimizer states alone only in code.
        return "fsdp2" if config.framework == "fsdp2" or config.zero > 1 else "deepspeed"

    @property
    def offloaded(self) -> bool:
        """Whether parameters or optimizer states are offloaded."""
        return {self.configuration.parameter_place, self.configuration.optimizer_place} != {"gpu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLaunch(ServingConfiguration):
    """A server: `copies` replicas of a resolved configuration, for `users` in all. `block` 0 lets vLLM choose.

    `stored` is the checkpoint's format, `tokenizer` the model whose tokenizer a GGUF file uses. `stage_layers` are set
    if unequal. `card` to `ledger` describe the plan for readers.
    """

    model: str
    stored: str = ""
    tokenizer: str = ""
    copies: int = 1
    gpus_per_host: int = 8
    card: str = ""
    card_bytes: int = 0
    cache_tokens: int = 0
    ledger: tuple[tuple[str, int], ...] = ()

    @property
    def gpus(self) -> int:
        """GPUs of one replica: llama.cpp gives every one of a host its layers."""
        return self.gpus_per_host if self.engine == "llama.cpp" else self.tp * self.pp

    @property
    def hosts(self) -> int:
        """Hosts of one replica."""
        return -(-self.gpus // self.gpus_per_host)

    @property
    def host_gpus(self) -> int:
        """GPUs of one replica on one host."""
        return min(self.gpus, self.gpus_per_host)

    @property
    def copies_on_a_host(self) -> int:
        """Replicas on one host; 1 if a replica fills its hosts."""
        return min(self.copies, max(self.gpus_per_host // self.gpus, 1))


def reasons(*claims: tuple[bool, str]) -> list[str]:
    """Return the text of the claims that hold."""
    return [words for holds, words in claims if holds]


def served_model(launch: ServingLaunch) -> str:
    """Return a name on the hub, or a folder's absolute path: engines do not read a lone config.json."""
    path = Path(launch.model)
    return str((path.parent if path.is_file() else path).resolve()) if path.exists() else hub_id(launch.model)


def shell_script(name: str, words: list[str], rest: str, *, given: tuple[str, ...] = (), here: bool = False) -> str:
    """Return a script that runs these words with `rest` and its caller's arguments.

    `given` are environment variables that it requires; `here`: it changes to its own folder, to read files there.
    """
    usage = " ".join([*(f"{variable}=..." for variable in given), f"bash {name} [FLAG]..."])
    asked = "".join(f': "${{{variable}:?set {variable}}}"\n' for variable in given)
    lines = [shlex.quote(words[0])]
    for word in words[1:]:
        # A flag begins a line, with its value beside it.
        lines[-1:] = [lines[-1], shlex.quote(word)] if word.startswith("-") else [f"{lines[-1]} {shlex.quote(word)}"]
    body = " \\\n  ".join([*lines, rest, '"$@"'])
    folder = 'cd "$(dirname "$0")"\n' if here else ""
    return f"#!/usr/bin/env bash\n# {usage}\nset -euo pipefail\n{folder}{asked}exec {body}\n"
