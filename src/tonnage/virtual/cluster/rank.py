"""Runs one rank in its own process: the script on a virtual GPU of the cluster."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tonnage.hardware.cluster import Cluster
from tonnage.recording import Recording
from tonnage.recording.cluster import WholeModel
from tonnage.recording.recording import HOST, HOSTS
from tonnage.recording.records import Outcome
from tonnage.script.launchers import LOCAL_RANK
from tonnage.script.program import Program
from tonnage.script.running import run_as_main
from tonnage.virtual.builds import new_session
from tonnage.virtual.cluster.exchange import HubExchange, PeerError
from tonnage.virtual.imports import quick_imports
from tonnage.virtual.script import recorded

_PORT = 29500  # torchrun's default; nothing listens there


@dataclass(frozen=True)
class RankRun:
    """A rank that ran, and the ranks it represents (including itself)."""

    rank: int
    stands_for: tuple[int, ...]
    recording: Recording
    engine_bytes: dict[str, int]  # that FSDP and DDP hold at the peak for themselves, by name of the ledger's part
    stopped: bool  # ended because another rank failed
    calls: int  # collectives and messages on the card
    whole_model: WholeModel = field(default_factory=WholeModel)

    @property
    def outcome(self) -> Outcome:
        """How the rank ended."""
        return self.recording.header.outcome


def environment_of(rank: int, cluster: Cluster) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank."""
    values: dict[str, object] = {
        "RANK": rank, "LOCAL_RANK": rank % cluster.gpus_per_host, "GROUP_RANK": rank // cluster.gpus_per_host,
        "ROLE_RANK": rank, "ROLE_NAME": "default",
        "WORLD_SIZE": cluster.gpus, "LOCAL_WORLD_SIZE": cluster.gpus_per_host, "GROUP_WORLD_SIZE": cluster.hosts,
        "ROLE_WORLD_SIZE": cluster.gpus,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _PORT,
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_RUN_ID": "tonnage",
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "OMP_NUM_THREADS": 1,
    }  # fmt: skip
    return {name: str(value) for name, value in values.items()}


def run_rank(
    rank: int,
    exchange: HubExchange,
    *,
    cluster: Cluster,
    program: Program,
    arguments: Sequence[str],
    torch_version: str | None,
) -> RankRun:
    """Run the script to its end as this rank; which ranks it stands for is known later."""
    os.environ.update(environment_of(rank, cluster))
    own = [word.replace(LOCAL_RANK, os.environ["LOCAL_RANK"]) for word in arguments]
    session = new_session(cluster.gpu, torch_version, cards=cluster.gpus_per_host)
    session.cluster = cluster
    session.open(capture=True)
    from tonnage.virtual.cluster.distributed import HubStore, install, install_spawn
    from tonnage.virtual.cluster.engines import Engines, WholeModels
    from tonnage.virtual.cluster.member import Member
    from tonnage.virtual.cuda.patches import Patches

    member, engines, patches = Member(rank, cluster.gpus, session, exchange), Engines(session.device), Patches()
    install(member, HubStore(exchange, member.line), patches)
    install_spawn(rank, cluster, patches)
    engines.watch(patches)
    whole = WholeModels(rank, cluster.gpus_per_host)
    whole.watch(patches)
    try:
        ending = run_as_main(program, own, session.torch, quick_imports(), (PeerError,))
    finally:
        patches.undo()
        session.close()
    if not member.groups and cluster.gpus > 1:
        words = "The script never calls init_process_group: no two ranks compute anything together."
        session.stand_ins.assume("torch.distributed", words)
    recording = recorded(session, ending, program, [word for word in arguments if LOCAL_RANK not in word])
    if recording.captured:
        where = {HOSTS: f"{cluster.hosts}x{cluster.gpus_per_host}", HOST: cluster.host.key}
        recording.captured = replace(recording.captured, settings=recording.captured.settings | where)
    stopped = ending.error.startswith(f"{PeerError.__name__}:")
    held = engines.bytes_by_name(recording.live_at_peak)
    return RankRun(rank, (), recording, held, stopped, member.calls, whole.largest)
