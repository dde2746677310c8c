"""What a plan says of a model of several parts: its images, and what of it is frozen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tonnage.budget.configuration import Configuration
    from tonnage.models.shape import ModelShape


def part_words(shape: ModelShape, configuration: Configuration) -> Iterator[str]:
    """Notes below the headline; none of a model that is trained whole and sees text alone."""
    tower = next((stack for stack in shape.stacks[:-1] if stack.picture), None)
    if tower is not None and shape.projector is not None and shape.projector.tokens:
        seen = f"{tower.sequences} × {tower.tokens:,}" if tower.sequences > 1 else f"{tower.tokens:,}"
        inside = f"{shape.projector.tokens:,} of the {configuration.seq:,} of a sequence"
        yield f"images of a sample: {seen} tokens in their tower, {inside}"
    if shape.unfrozen is not None:
        trained = shape.trained_parameters
        frozen = f"{_count(shape.parameters - trained)} parameters are frozen"
        if configuration.lora_rank:
            yield f"{frozen} with no adapters beside them"
            return
        held = "16 bits" if configuration.compute_bytes == 2 else "FP32"
        yield f"{_count(trained)} parameters are trained; {frozen}, in {held}, without gradients and states"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:,.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:,.1f} M"
