"""Calls of operators and cards, for tests of the kernels' modules."""

from dataclasses import replace
from typing import Any

from tonnage.clock.launch import Settings
from tonnage.clock.operators import OperatorCall
from tonnage.hardware import Gpu, find_gpu

BF16, FP32, INDEX, FLAG = "c10::BFloat16", "float", "long int", "bool"
SETTINGS = Settings()
H200 = find_gpu("h200")


def call(name: str, *arguments: Any, kernels: tuple[str, ...] = ()) -> OperatorCall:
    """Arguments as (shape, type), (shape, type, strides) or a text."""
    tensors = [argument if isinstance(argument, tuple) else ((), "Scalar") for argument in arguments]
    return OperatorCall(
        name=name,
        shapes=tuple(tensor[0] for tensor in tensors),
        strides=tuple(tensor[2] if len(tensor) > 2 else () for tensor in tensors),
        types=tuple(tensor[1] for tensor in tensors),
        values=tuple(argument if isinstance(argument, str) else "" for argument in arguments),
        kernels=kernels,
    )


def with_bandwidth(gpu: Gpu, factor: float) -> Gpu:
    return replace(gpu, bandwidth_bytes_per_s=gpu.bandwidth_bytes_per_s * factor)
