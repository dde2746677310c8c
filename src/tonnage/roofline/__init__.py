"""Whether a kernel or layer is bound by memory, arithmetic or latency: profiles or models against a GPU's ceilings."""

from tonnage.roofline.analysis import Analysis, Bound, analyse
from tonnage.roofline.ceilings import catalogue_ceilings, read_ceilings
from tonnage.roofline.layers import model_profile
from tonnage.roofline.readers import read_profile

__all__ = ["Analysis", "Bound", "analyse", "catalogue_ceilings", "model_profile", "read_ceilings", "read_profile"]
