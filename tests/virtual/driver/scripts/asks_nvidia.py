"""Asks CUDA's libraries for things: what the card is, what NVML says, and a function that nobody gave a meaning."""

import ctypes

import pynvml
import torch

torch.zeros(1 << 20, device="cuda")
pynvml.nvmlInit()
card = pynvml.nvmlDeviceGetHandleByIndex(0)
print(
    "nvml", pynvml.nvmlDeviceGetName(card), pynvml.nvmlDeviceGetMemoryInfo(card).total == torch.cuda.mem_get_info()[1]
)
print("curand", ctypes.CDLL("libcurand.so.10").curandGenerateSeeds(None))
