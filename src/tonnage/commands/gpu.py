"""`tonnage gpu`: the catalogue, and cards side by side."""

import sys

import typer


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
        from tonnage.report.output import write_json

        of_all = not clusters
        write_json(
            json, cards.catalogue_figures(all_gpus(), all_hosts()) if of_all else cards.cluster_figures(clusters)
        )
    if json == "-":
        return
    if clusters:
        cards.print_cards(clusters, stream=sys.stdout)
    elif hosts:
        cards.print_hosts(all_hosts(), stream=sys.stdout)
    else:
        cards.print_catalogue(all_gpus(), stream=sys.stdout)
