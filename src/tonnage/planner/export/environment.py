"""Environment variables that a plan for training counts on. It does not know who reads them.

PyTorch before 2.9 reads the allocator's settings from PYTORCH_CUDA_ALLOC_CONF: both names are set to the same.
"""

from tonnage.planner.export.launch import Launch

FILE = "environment.sh"
# Segments that grow in place, so that blocks of one size do not wait for others of that size.
ALLOCATOR = "expandable_segments:True"


def obstacles(launch: Launch) -> list[str]:
    """Every plan has it."""
    return []


def notes(launch: Launch) -> list[str]:
    """Nothing differs."""
    return []


def render(launch: Launch) -> str:
    """Lines for a shell to source."""
    lines = [f"export {name}={value}" for name, value in variables(launch).items()]
    return "\n".join(["# shellcheck shell=bash disable=SC2155", *lines]) + "\n"


def variables(launch: Launch) -> dict[str, str]:
    """Names and values, in the order that they are written."""
    chosen = {"PYTORCH_ALLOC_CONF": ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR}
    if launch.configuration.optimizer_place != "gpu":
        # torchrun gives a process one thread, and an optimizer on the host would crawl.
        chosen["OMP_NUM_THREADS"] = f'"$(($(nproc) / {launch.cluster.gpus_per_host}))"'
    if launch.configuration.precision == "tf32":
        chosen["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] = "1"
    return chosen
