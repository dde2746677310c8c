"""Operators whose host code asks how many blocks of a kernel run at once, on several threads: prints the kernels of torch.

A question waits for no other thread that may hold the GIL, so this ends.
"""

import ctypes
import json
import sys
import threading

import torch


class Kernel(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in "registers shared local constant threads binary ptx".split()]


core = ctypes.CDLL("libtonnage-driver.so")
core.tn_kernel_named.restype = Kernel


def work():
    for _ in range(5):
        x = torch.ones(5000, device="cuda")
        x.nonzero(), x.topk(10), x.sort(), x.cumsum(0)


threads = [threading.Thread(target=work) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
found = {}
for name in sys.argv[1:]:
    kernel = core.tn_kernel_named(name.encode())
    found[name] = [kernel.registers, kernel.shared, kernel.local, kernel.threads, kernel.binary, kernel.ptx]
print(json.dumps(found))
