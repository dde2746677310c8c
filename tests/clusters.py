"""Clusters made by hand: ranks with recordings that went through the real allocator."""

from dataclasses import replace
from typing import Any

from hostile_recordings import HOSTILE, hostile_recording
from support import training_run
from tonnage.hardware.cluster import find_cluster
from tonnage.recording import ClusterRecording
from tonnage.virtual.cluster import RankRun, recorded

ENGINES = {"unsharded parameters": 2**27, "all-gather buffers": 2**28}


def rank_run(rank: int, stands_for: tuple[int, ...] = (), *, stopped: bool = False, **training: Any) -> RankRun:
    """A rank whose training is told by `training`."""
    return RankRun(rank, stands_for or (rank,), training_run(**training), dict(ENGINES), stopped, 12)


def cluster_of(gpus: str, *runs: RankRun, trouble: str = "") -> ClusterRecording:
    """Such ranks as a cluster's recording."""
    return recorded(find_cluster(gpus), runs, trouble)


def one_odd() -> ClusterRecording:
    """Seven ranks alike, of which two ran; the last one has more layers and a larger batch."""
    return cluster_of("8xh200", rank_run(0, (0, 1, 2)), rank_run(3, (3, 4, 5, 6)), rank_run(7, batch=16, layers=6))


def one_dies() -> ClusterRecording:
    """The last rank runs out of memory, which stops the others."""
    small = {"gpu": "t4", "layers": 1}
    stopped = {"outcome": "error", "error": "PeerError: rank 1 ran out of memory"}
    return cluster_of(
        "2xt4", rank_run(0, stopped=True, **small, **stopped), rank_run(1, gpu="t4", batch=512, layers=32)
    )


def hostile_cluster() -> ClusterRecording:
    """Each word that a page shows is markup."""
    recording = hostile_recording()
    recording.header.settings = ""  # else they are refused, in words
    run = replace(rank_run(0), recording=recording, engine_bytes={HOSTILE: 7})
    found = cluster_of("2xh200", run, replace(run, rank=1, stands_for=(1,), stopped=True), trouble=HOSTILE)
    words = {"words": HOSTILE, "gpu_name": HOSTILE, "script": HOSTILE, "arguments": (HOSTILE,)}
    return replace(found, summary=replace(found.summary, **words))
