"""A script around torchrun: standalone on one host, with a rendezvous address on several.

The script runs what follows it: `bash torchrun.sh train.py tokens.pt`, or `bash torchrun.sh -m torchtitan.train ...`.
"""

from tonnage.planner.export.launch import TrainingRun

FILE = "torchrun.sh"
PORT = 29500


def obstacles(launch: TrainingRun) -> list[str]:
    """Return nothing: every plan can be expressed."""
    return []


def notes(launch: TrainingRun) -> list[str]:
    """Return nothing: nothing differs."""
    return []


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
