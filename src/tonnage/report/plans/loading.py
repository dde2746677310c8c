"""What loading takes, as text and as JSON values, for training and serving."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tonnage.budget.loading import Loading, Way
from tonnage.units import GIB

if TYPE_CHECKING:
    from tonnage.hardware import Cluster

_WAYS: dict[Way, str] = {
    "every rank": "every rank builds the whole model",
    "first rank": "a host's first rank hands the model on; transformers 5 copies it on the others",
    "own part": "each rank reads its own part",
    "split": "ranks split each tensor, and order their parts on the host",
    "mapped": "weights go from mapped files to the card, one by one",
}
_REMEDIES: dict[Way, str] = {
    "every rank": "load onto the card (device_map), start fewer ranks at once, or shard with --framework fsdp2",
    "first rank": "load a distributed checkpoint, of which each rank reads its part, or use transformers 4",
    "own part": "give the hosts more memory, or split tensors further with --tp",
    "split": "give the hosts more memory, or shard over more of them",
    "mapped": "load a checkpoint that is quantised already, or shard it over more cards",
}


def loading_words(loading: Loading, cluster: "Cluster") -> Iterator[str]:
    """Yield one line, and a second with a remedy if a host or GPU has too little memory."""
    memory = cluster.host_memory_bytes
    of = f" of a host's {memory / GIB:,.0f}" if memory else " of the memory that the host shares with it"
    host = f"{loading.host_bytes / GIB:,.1f} GiB{of}"
    if not loading.host_bytes:
        host = f"file cache for {loading.checkpoint_bytes / GIB:,.1f} GiB, which the host may drop"
    yield f"loading: {host}, {loading.card_bytes / GIB:,.1f} GiB on the card; {_WAYS[loading.way]}"
    if lacks := loading.too_large_for(cluster):
        yield f"loading does not fit the {lacks}: {_REMEDIES[loading.way]}"


def loading_figures(loading: Loading, cluster: "Cluster") -> dict[str, Any]:
    """Return JSON values, by rank of one host."""
    return {
        "way": loading.way,
        "fits": not loading.too_large_for(cluster),
        "host_bytes": loading.host_bytes,
        "host_bytes_by_rank": list(loading.host_bytes_by_rank),
        "host_capacity_bytes": cluster.host_memory_bytes,
        "checkpoint_bytes": loading.checkpoint_bytes,
        "card_bytes": loading.card_bytes,
    }
