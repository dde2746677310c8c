"""How many tokens an image has in the vision tower and in the language model (`data/pictures.toml` and configurations).

A tower of fixed size resizes images, or cuts them into tiles and an overview; others round sides to whole merged patches.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tonnage.errors import BadLayout
from tonnage.models import roles
from tonnage.models.fields import Fields
from tonnage.models.shape import ModelShape, Picture
from tonnage.models.templates import ConfigValues, Tensor

_DATA = Path(__file__).parent / "data" / "pictures.toml"
_LARGEST_SIDE = 2**14
_MOST_PICTURES = 2**12


class PictureTokens(NamedTuple):
    """Per image: sequences of the tower, the tokens of each, and tokens of the language model."""

    sequences: int
    tower: int
    language: int


def picture_of(values: ConfigValues, fields: Fields, outside: Sequence[Tensor]) -> Picture | None:
    """Return how a tower splits images, if its fields have a patch size; None for other stacks."""
    # Of two sides that are given separately, the first.
    sides = (fields.get(name) for name in ("patch_size", "image_size"))
    patch, side = (value[0] if isinstance(value, list | tuple) and value else value for value in sides)
    text = fields.find("vocab") and "vision" not in fields.part
    if not isinstance(patch, int) or patch < 1 or text or not (isinstance(side, int) or "vision" in fields.part):
        return None
    rules = _rules()
    stated = next((value for name in rules["stated"] if isinstance(value := values(name), int)), 0)
    merge = next((value for name in rules["merge"] if isinstance(value := values(name), int)), 1)
    shrunk = next((value for name in rules["shrunk"] if isinstance(value := values(name), float) and value > 0), 1.0)
    fixed = isinstance(side, int) and fields.get("model_type") not in rules["any_size"]
    return Picture(
        patch=patch,
        side=side if fixed else 0,
        beside=sum(tensor.elements // tensor.shape[-1] for tensor in outside if roles.is_extra_token(tensor.name)),
        merge=max(merge, round(1 / shrunk)),
        tokens=stated,
        tiles=rules["tiles"].get(str(values("model_type")), 1),
    )


def picture_tokens(picture: Picture, width: int = 0, height: int = 0) -> PictureTokens:
    """Return the tokens of an image of that size; by default of the tower's own size or a usual one."""
    usual = picture.side or _rules()["usual_side"]
    width, height = width or usual, height or usual
    if not picture.side:
        unit = picture.patch * picture.merge
        across, down = max(round(width / unit), 1), max(round(height / unit), 1)
        patches = across * down * picture.merge**2
        return PictureTokens(1, patches + picture.beside, across * down)
    side = picture.side // picture.patch
    tiles = min(-(-width // picture.side) * -(-height // picture.side), picture.tiles)
    sequences = tiles + 1 if tiles > 1 else 1
    each = picture.tokens or (side // picture.merge) ** 2
    return PictureTokens(sequences, side**2 + picture.beside, sequences * each)


def with_pictures(shape: ModelShape, pictures: int | None, size: str) -> tuple[ModelShape, int]:
    """Return the shape for samples with these images ("1024", "1280x720"), and the image tokens per sample."""
    tower = next((stack for stack in shape.stacks if stack.picture), None)
    if tower is None or tower.picture is None:
        for flag, given in (("--images", pictures is not None), ("--image-size", bool(size))):
            if given:
                raise BadLayout(f"{flag}: {shape.name} sees no images.", hint="Leave it out.")
        return shape, 0
    width, height = _sides(size)
    alone = len(shape.stacks) == 1
    if alone and pictures is not None:
        raise BadLayout("--images: a sample of a vision model is one image.", hint="Write --micro-batch for more.")
    if pictures is not None and not 0 <= pictures <= _MOST_PICTURES:
        raise BadLayout(f"--images {pictures}: a sample has 0 to {_MOST_PICTURES}.", hint="Write --images 1, say.")
    count = 1 if pictures is None else pictures
    picture = replace(tower.picture, side=0) if alone and width else tower.picture
    tokens = picture_tokens(picture, width, height)
    stacks = tuple(
        replace(stack, tokens=tokens.tower, sequences=count * tokens.sequences) if stack.picture else stack
        for stack in shape.stacks
    )
    mine = 0 if alone else count * tokens.language
    projector = shape.projector and replace(shape.projector, tokens=mine)
    return replace(shape, stacks=stacks, projector=projector), mine


def _sides(size: str) -> tuple[int, int]:
    sides = size.lower().split("x") if size else ["0"]
    if len(sides) > 2 or not all(side.isascii() and side.isdigit() for side in sides):
        raise BadLayout(f"--image-size {size}: that is no size.", hint="Write 1024 or 1280x720, in pixels.")
    width, height = int(sides[0]), int(sides[-1])
    if size and not (0 < width <= _LARGEST_SIDE and 0 < height <= _LARGEST_SIDE):
        raise BadLayout(f"--image-size {size}: sides have 1 to {_LARGEST_SIDE:,} pixels.", hint="Write 1024, say.")
    return width, height


@cache
def _rules() -> dict[str, Any]:
    return tomllib.loads(_DATA.read_text("utf-8"))
