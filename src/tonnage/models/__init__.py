"""A model's shape from a preset, a configuration or a checkpoint's header, without torch."""

from tonnage.models.config import from_config
from tonnage.models.find import find_model
from tonnage.models.presets import all_presets
from tonnage.models.shape import ModelShape

__all__ = ["ModelShape", "all_presets", "find_model", "from_config"]
