"""A cluster's run as a recording that can be kept and shown without torch."""

from tonnage.recording import ClusterRecording, ClusterSummary, RankSummary
from tonnage.virtual.cluster.cluster import ClusterRun


def recorded(run: ClusterRun) -> ClusterRecording:
    """All ranks that ran, each with its summary."""
    recordings = {rank.rank: rank.recording for rank in run.ranks}
    cluster, gpu = run.cluster, run.cluster.gpu
    header = run.worst.recording.header if run.worst else None
    summary = ClusterSummary(
        words=cluster.words,
        gpu=gpu.key,
        gpu_name=gpu.name,
        capacity_bytes=gpu.memory_bytes,
        gpus=cluster.gpus,
        hosts=cluster.hosts,
        gpus_per_host=cluster.gpus_per_host,
        outcome=run.outcome,
        exit_status=run.exit_status,
        trouble=run.trouble,
        dies_first=run.dies_first.rank if run.dies_first else None,
        worst=run.worst.rank if run.worst else None,
        script=header.program if header else "",
        arguments=header.arguments if header else (),
        ranks=tuple(
            RankSummary.of(
                rank.rank, rank.stands_for, rank.recording, rank.engine_bytes, rank.stopped, rank.whole_model
            )
            for rank in run.ranks
        ),
    )
    return ClusterRecording(summary, recordings.__getitem__)
