"""How long kernels take on a GPU: launches in, seconds out. It does not import torch."""
