"""Cards and hosts as figures for programs: every field of the catalogue under its own name, and the levels of memory."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from tonnage import __version__
from tonnage.hardware import Cluster, Gpu, Host
from tonnage.hardware.hierarchy import levels_of


def cluster_figures(clusters: Sequence[Cluster]) -> dict[str, object]:
    """Cards in their hosts."""
    return {"tonnage": __version__, "gpus": [_cluster_figures(cluster) for cluster in clusters]}


def catalogue_figures(gpus: Sequence[Gpu], hosts: Sequence[Host]) -> dict[str, object]:
    """Everything there is."""
    return {
        "tonnage": __version__,
        "gpus": [_gpu_figures(gpu) for gpu in gpus],
        "hosts": [asdict(host) for host in hosts],
    }


def _cluster_figures(cluster: Cluster) -> dict[str, Any]:
    rates = cluster.gpu.rates
    levels = [
        asdict(level)
        | {
            "latency_ns": level.latency_ns,
            "flop_per_byte": {precision: level.intensity(rate) for precision, rate in rates.items()},
        }
        for level in levels_of(cluster)
    ]
    return _gpu_figures(cluster.gpu) | {
        "levels": levels,
        "host": asdict(cluster.host),
        "gpus_per_host": cluster.gpus_per_host,
        "hosts": cluster.hosts,
    }


def _gpu_figures(gpu: Gpu) -> dict[str, Any]:
    figures = {field.name: getattr(gpu, field.name) for field in fields(gpu)}
    overheads = {library: asdict(overhead) for library, overhead in gpu.overheads.items()}
    return figures | {"rates": dict(gpu.rates), "overheads": overheads}
