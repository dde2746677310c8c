"""Runs another script as under a torch before 2.9, where kernels cannot be had: python older_torch.py SCRIPT"""

import runpy
import sys

import tonnage
from tonnage.hardware import find_gpu
from tonnage.virtual.driver import loading

loading.prepare(find_gpu("h200"))
import torch  # noqa: E402 (it must come after the stand-ins)

del torch.library.get_kernel
with tonnage.virtual_gpu("h200"):
    runpy.run_path(sys.argv[1], run_name="__main__")
