"""A script around torchrun, standalone on one host, with a rendezvous address on several; and variables that a plan needs.

The script runs what follows it: `bash torchrun.sh train.py tokens.pt`, or `bash torchrun.sh -m torchtitan.train ...`.
PyTorch before 2.9 reads the allocator's settings from PYTORCH_CUDA_ALLOC_CONF, so both names are set.
"""

from tonnage.planner.export.launch import TrainingRun

FILE = "torchrun.sh"
ENVIRONMENT = "environment.sh"
PORT = 29500
# Segments that grow in place, which reduces fragmentation.
ALLOCATOR = "expandable_segments:True"


def render(launch: TrainingRun) -> str:
    """Return the script."""
    meeting = ': "${HEAD:?set HEAD to the address of the first host, the same on every host}"\n'
    return f"""#!/usr/bin/env bash
# One process a GPU, running what follows the name of this script.
set -euo pipefail
{meeting if launch.cluster.hosts > 1 else ""}exec torchrun {" ".join(words(launch))} "$@"
"""


def words(launch: TrainingRun) -> list[str]:
    """Return torchrun's own arguments, as the shell reads them."""
    hosts = launch.cluster.hosts
    processes = [f"--nproc-per-node={launch.sizes.gpus // hosts}"]
    if hosts == 1:
        return ["--standalone", *processes]
    meeting = ["--rdzv-backend=c10d", f'--rdzv-endpoint="$HEAD:{PORT}"', "--rdzv-id=tonnage"]
    return [f"--nnodes={hosts}", *processes, *meeting]


def environment(launch: TrainingRun) -> str:
    """Return lines for a shell to source."""
    chosen = {"PYTORCH_ALLOC_CONF": ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR}
    if launch.configuration.optimizer_place != "gpu":
        # torchrun gives a process one thread, which is too slow for an optimizer on the host.
        chosen["OMP_NUM_THREADS"] = f'"$(($(nproc) / {launch.cluster.gpus_per_host}))"'
    if launch.configuration.precision == "tf32":
        chosen["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] = "1"
    lines = [f"export {name}={value}" for name, value in chosen.items()]
    return "\n".join(["# shellcheck shell=bash disable=SC2155", *lines]) + "\n"
