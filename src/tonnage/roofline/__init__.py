"""Whether a kernel or layer is bound by memory, arithmetic or latency: items from profiles or models against a GPU's
ceilings.
"""

from tonnage.clock.operators import Work
from tonnage.roofline.analysis import MEANINGS, Analysis, Bound, RooflineRow, Verdict, analyse, judge
from tonnage.roofline.ceilings import Ceilings, catalogue_ceilings, read_ceilings
from tonnage.roofline.items import GpuTime, Item, RooflineProfile
from tonnage.roofline.layers import PHASES, Phase, model_profile
from tonnage.roofline.readers import read_profile

__all__ = [
    "MEANINGS",
    "PHASES",
    "Analysis",
    "Bound",
    "Ceilings",
    "GpuTime",
    "Item",
    "Phase",
    "RooflineProfile",
    "RooflineRow",
    "Verdict",
    "Work",
    "analyse",
    "catalogue_ceilings",
    "judge",
    "model_profile",
    "read_ceilings",
    "read_profile",
]
