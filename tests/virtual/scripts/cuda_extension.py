"""Compiles a CUDA kernel of its own."""

from torch.utils.cpp_extension import load_inline

load_inline(name="mine", cpp_sources="", cuda_sources="__global__ void k() {}", functions=[])
