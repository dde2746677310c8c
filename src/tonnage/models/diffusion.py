"""Pipelines that generate images or videos from text: their parts and sizes (`data/diffusion.toml`)."""

import re
import tomllib
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Literal

from tonnage.errors import BadLayout

_DATA = Path(__file__).parent / "data" / "diffusion.toml"
_LATENT = 8  # pixels per side of one latent position
_LATENT_FRAMES = 4
_MOST_SIDE, _MOST_FRAMES = 16384, 1025


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A denoiser, its text encoders and its VAE. The data file explains the fields."""

    name: str
    names: tuple[str, ...] = ()
    denoiser: str
    kind: str
    text: dict[str, int]
    vae: str
    resolution: tuple[int, int]
    side: int
    steps: int
    guidance: Literal["batch", "passes", "none"]
    tile: int
    frames: int = 1
    vae_fp32: bool = False

    @property
    def is_video(self) -> bool:
        """Whether it generates more than one frame."""
        return self.frames > 1


@dataclass(frozen=True, slots=True)
class Size:
    """The size of one image or video, in pixels."""

    height: int
    width: int
    frames: int = 1
    latent_frames: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "latent_frames", 1 + (self.frames - 1) // _LATENT_FRAMES)

    @property
    def area(self) -> int:
        """Positions of one latent frame."""
        return (self.height // _LATENT) * (self.width // _LATENT)

    @property
    def positions(self) -> int:
        """Positions of all latent frames."""
        return self.area * self.latent_frames

    @property
    def pixels(self) -> int:
        """Pixels of all frames."""
        return prod((self.height, self.width, self.frames))

    @property
    def words(self) -> str:
        """The size as text: "1024×1024", "81 frames of 480×832"."""
        image = f"{self.height}×{self.width}"
        return image if self.frames == 1 else f"{self.frames} frames of {image}"


@cache
def pipelines() -> dict[str, Pipeline]:
    """Return all pipelines by name."""
    rows = tomllib.loads(_DATA.read_text("utf-8"))
    return {
        name: Pipeline(
            name=name,
            **row | {"names": tuple(row["names"]), "resolution": (row["resolution"][0], row["resolution"][1])},
        )
        for name, row in rows.items()
    }


def find_pipeline(name: str) -> Pipeline | None:
    """Return the pipeline of that common name; None if there is none."""
    asked = _plain(name)
    return next((each for each in pipelines().values() if asked in map(_plain, (each.name, *each.names))), None)


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())


def size_of(pipeline: Pipeline, resolution: str = "", frames: int | None = None) -> Size:
    """Return the requested size, or the default one."""
    height, width = pipeline.resolution
    if resolution:
        match = re.fullmatch(r"(\d{1,6})(?:[x×](\d{1,6}))?", resolution.strip().lower())
        if match is None:
            hint = "Write --resolution 1024, or 480x832 for height and width."
            raise BadLayout(f"--resolution {resolution} is not a size.", hint=hint)
        height, width = int(match[1]), int(match[2] or match[1])
    for side in (height, width):
        if not pipeline.side <= side <= _MOST_SIDE or side % pipeline.side:
            near = max(pipeline.side, min(round(side / pipeline.side), _MOST_SIDE // pipeline.side) * pipeline.side)
            hint = f"Its sides are multiples of {pipeline.side}, up to {_MOST_SIDE}: {near}, say."
            raise BadLayout(f"--resolution {resolution}: {pipeline.name} has no side of {side} pixels.", hint=hint)
    if frames is not None and not pipeline.is_video and frames != 1:
        raise BadLayout(f"--frames {frames}: {pipeline.name} makes images.", hint="Leave --frames out.")
    count = pipeline.frames if frames is None else frames
    if not 1 <= count <= _MOST_FRAMES or (count - 1) % _LATENT_FRAMES:
        near = min(max(0, round((count - 1) / _LATENT_FRAMES)), _MOST_FRAMES // _LATENT_FRAMES) * _LATENT_FRAMES + 1
        hint = f"Videos have 1 + 4·n frames, up to {_MOST_FRAMES}: {near}, say."
        raise BadLayout(f"--frames {count} is no length of a video.", hint=hint)
    return Size(height, width, count)
