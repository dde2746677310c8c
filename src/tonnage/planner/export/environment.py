"""Environment variables that a training plan relies on.

PyTorch before 2.9 reads the allocator's settings from PYTORCH_CUDA_ALLOC_CONF, so both names are set.
"""

from tonnage.planner.export.launch import TrainingRun

FILE = "environment.sh"
# Segments that grow in place, which reduces fragmentation.
ALLOCATOR = "expandable_segments:True"


def obstacles(launch: TrainingRun) -> list[str]:
    """Return nothing: every plan can be expressed."""
    return []


def notes(launch: TrainingRun) -> list[str]:
    """Return nothing: nothing differs."""
    return []


def render(launch: TrainingRun) -> str:
    """Return lines for a shell to source."""
    lines = [f"export {name}={value}" for name, value in variables(launch).items()]
    return "\n".join(["# shellcheck shell=bash disable=SC2155", *lines]) + "\n"


def variables(launch: TrainingRun) -> dict[str, str]:
    """Return names and values in the order they are written."""
    chosen = {"PYTORCH_ALLOC_CONF": ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR}
    if launch.configuration.optimizer_place != "gpu":
        # torchrun gives a process one thread, which is too slow for an optimizer on the host.
        chosen["OMP_NUM_THREADS"] = f'"$(($(nproc) / {launch.cluster.gpus_per_host}))"'
    if launch.configuration.precision == "tf32":
        chosen["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] = "1"
    return chosen
