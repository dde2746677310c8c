"""The environment that torchrun gives to a rank."""

from tonnage.hardware.cluster import Cluster

_PORT = 29500  # torchrun's default; nothing listens there


def environment_of(rank: int, cluster: Cluster) -> dict[str, str]:
    """What a script finds in `os.environ`."""
    local, host = rank % cluster.gpus_per_host, rank // cluster.gpus_per_host
    values: dict[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "GROUP_RANK": host,
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
        "WORLD_SIZE": cluster.gpus,
        "LOCAL_WORLD_SIZE": cluster.gpus_per_host,
        "GROUP_WORLD_SIZE": cluster.hosts,
        "ROLE_WORLD_SIZE": cluster.gpus,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": _PORT,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "tonnage",
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "OMP_NUM_THREADS": 1,
    }
    return {name: str(value) for name, value in values.items()}
