"""`tonnage gpu`: the catalogue, and cards side by side."""

import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from tonnage.hardware import Cluster


def gpu(
    names: list[str] = typer.Argument(None, metavar="NAME", help="Cards, hosts (dgx-h100) or files (mine.toml)."),
    hosts: bool = typer.Option(False, "--hosts", help="List hosts and cloud shapes instead of cards."),
    json: str = typer.Option("", "--json", metavar="FILE", help="Write the figures as JSON ('-': standard output)."),
) -> None:
    """What a GPU has: its memory hierarchy, rates, links; or the list of all GPUs."""
    from tonnage.hardware import all_gpus, all_hosts, find_cluster
    from tonnage.report import cards

    clusters = [find_cluster(name) for name in names or ()]
    if json:
        _write(json, clusters)
    if json == "-":
        return
    words = sys.stdout
    if clusters:
        cards.print_cards(clusters, stream=words)
    elif hosts:
        cards.print_hosts(all_hosts(), stream=words)
    else:
        cards.print_catalogue(all_gpus(), stream=words)


def _write(target: str, clusters: "list[Cluster]") -> None:
    from tonnage.hardware import all_gpus, all_hosts
    from tonnage.report.card_figures import catalogue_figures, cluster_figures
    from tonnage.report.output import write_json

    write_json(target, cluster_figures(clusters) if clusters else catalogue_figures(all_gpus(), all_hosts()))
