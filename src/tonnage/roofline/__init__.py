"""Whether a kernel or layer is bound by memory, arithmetic or latency: profiles or models against a GPU's ceilings."""

from tonnage.roofline.analysis import MEANINGS, Analysis, Bound, RooflineRow, analyse
from tonnage.roofline.ceilings import catalogue_ceilings, read_ceilings
from tonnage.roofline.items import Item, RooflineProfile
from tonnage.roofline.layers import PHASES, model_profile
from tonnage.roofline.readers import read_profile

__all__ = [
    "MEANINGS",
    "PHASES",
    "Analysis",
    "Bound",
    "Item",
    "RooflineProfile",
    "RooflineRow",
    "analyse",
    "catalogue_ceilings",
    "model_profile",
    "read_ceilings",
    "read_profile",
]
