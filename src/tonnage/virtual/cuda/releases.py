"""The versions of CUDA and its libraries that each PyTorch release was built with (`releases.toml`)."""

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TorchRelease:
    """One row of the table, valid until the next version listed."""

    torch: tuple[int, int]
    cuda: str
    cudnn: tuple[int, int, int]
    cusparselt: int
    nccl: tuple[int, int, int]
    architectures: str

    @property
    def cuda_number(self) -> int:
        """The version as an integer: "13.0" is 13000."""
        major, minor = self.cuda.split(".")
        return int(major) * 1000 + int(minor) * 10

    @property
    def cudnn_number(self) -> int:
        """The version as an integer: (9, 19, 0) is 91900."""
        major, minor, patch = self.cudnn
        return major * 10_000 + minor * 100 + patch


def release_of(torch_version: tuple[int, int]) -> TorchRelease:
    """Return the newest row that is not newer than this version, or else the oldest."""
    rows = tomllib.loads((Path(__file__).parent / "releases.toml").read_text())["release"]
    releases = []
    for row in rows:
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in row.items()}
        releases.append(TorchRelease(**values))
    return max((r for r in releases if r.torch <= torch_version), key=lambda r: r.torch, default=releases[0])


def release_of_wheel(torch_version: tuple[int, int], cuda: str, requirements: Iterable[str]) -> TorchRelease:
    """Return the versions of one wheel: PyTorch has wheels for several CUDA versions, and the table lists one of them."""
    found: dict[str, Any] = {}
    for requirement in requirements:
        if match := re.match(r"nvidia-(cudnn|nccl|cusparselt)-cu\d+ ?\(?==(\d+)\.(\d+)\.(\d+)", requirement):
            major, minor, patch = (int(number) for number in match.groups()[1:])
            is_number = match[1] == "cusparselt"
            found[match[1]] = major * 10_000 + minor * 100 + patch if is_number else (major, minor, patch)
    return replace(release_of(torch_version), cuda=cuda, **found)
