"""A torchrun line in a script: on one host by itself, on many with a meeting point that each host is told.

The script runs what follows it: `bash torchrun.sh train.py tokens.pt`, or `bash torchrun.sh -m torchtitan.train ...`.
"""

from tonnage.planner.export.launch import Launch

FILE = "torchrun.sh"
PORT = 29500


def obstacles(launch: Launch) -> list[str]:
    """Every plan has one."""
    return []


def notes(launch: Launch) -> list[str]:
    """Nothing differs."""
    return []


def render(launch: Launch) -> str:
    """The script."""
    meeting = ': "${HEAD:?set HEAD to the address of the first host, the same on every host}"\n'
    return f"""#!/usr/bin/env bash
# One process a GPU, running what follows the name of this script.
set -euo pipefail
{meeting if launch.cluster.hosts > 1 else ""}exec torchrun {" ".join(words(launch))} "$@"
"""


def words(launch: Launch) -> list[str]:
    """torchrun's own arguments, as the shell reads them."""
    hosts = launch.cluster.hosts
    processes = [f"--nproc-per-node={launch.sizes.gpus // hosts}"]
    if hosts == 1:
        return ["--standalone", *processes]
    meeting = ["--rdzv-backend=c10d", f'--rdzv-endpoint="$HEAD:{PORT}"', "--rdzv-id=tonnage"]
    return [f"--nnodes={hosts}", *processes, *meeting]
