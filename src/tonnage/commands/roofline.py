"""`tonnage roofline`: kernels of a profile, or layers of a model, against a card's ceilings."""

import sys
from pathlib import Path

import typer

from tonnage.errors import RequestError


def roofline(
    file: Path = typer.Argument(None, help="A PyTorch profiler trace (.json, .json.gz) or Nsight Compute's CSV."),
    model: str = typer.Option(
        "", "--model", metavar="NAME", help="A model instead: a preset, a config.json or a folder."
    ),
    gpu: str = typer.Option("", "--gpu", metavar="NAME", help="The card (default: the one that the profile names)."),
    batch: int = typer.Option(1, "--batch", help="With --model: sequences."),
    seq: str = typer.Option("4k", "--seq", metavar="TOKENS", help="With --model: tokens of each, like 8192 or 8k."),
    phase: str = typer.Option("decode", "--phase", metavar="PHASE", help="With --model: prefill, decode or train."),
    online: bool = typer.Option(False, "--online", help="With --model: look it up on the hub where it is no preset."),
    ceilings: Path = typer.Option(None, "--ceilings", metavar="FILE", help="The card's own, measured by a probe."),
    rows: int = typer.Option(16, "--rows", min=1, help="Lines of the table."),
    json: str = typer.Option("", "--json", metavar="FILE", help="Write the figures as JSON ('-': standard output)."),
    html: Path = typer.Option(None, "--html", metavar="FILE", help="Write a page with the plot."),
    opens: bool = typer.Option(False, "--open", help="Show the page in the browser."),
    force: bool = typer.Option(False, "--force", help="Replace the page that is there."),
) -> None:
    """Is it bound by memory, arithmetic or latency: each kernel or layer, how near its bound, and what to do."""
    if bool(file) == bool(model):
        asked = "both a file and --model" if file else "nothing"
        hint = "tonnage roofline profile.json.gz, or tonnage roofline --model llama-3.1-8b --gpu h200"
        raise RequestError(f"A roofline is of one profile or of one model; {asked} was given.", hint=hint)
    from tonnage.hardware import find_gpu
    from tonnage.report.lines import print_lines
    from tonnage.report.output import page_target, wants_report, write_json, write_page
    from tonnage.report.roofline import roofline_figures, roofline_lines
    from tonnage.roofline import analyse, catalogue_ceilings, model_profile, read_ceilings, read_profile
    from tonnage.roofline.layers import PHASES

    page = page_target(html, opens=opens, force=force)
    if file:
        profile = read_profile(file)
    else:
        from tonnage.models import find_model
        from tonnage.units import parse_count

        if phase not in PHASES:
            raise RequestError(f"There is no phase {phase!r}.", hint=f"Use one of: {', '.join(PHASES)}.")
        profile = model_profile(find_model(model, online=online), phase, batch=batch, seq=parse_count(seq))
    name = gpu or profile.gpu
    if ceilings is not None:
        limits = read_ceilings(ceilings, find_gpu(name) if name else None)
    elif name:
        limits = catalogue_ceilings(find_gpu(name))
    else:
        raise RequestError(f"{profile.source} does not say on which card.", hint="Pass --gpu h200, say.")
    analysis = analyse(profile, limits)
    if json:
        write_json(json, roofline_figures(analysis))
    if wants_report(json, page):
        print_lines(roofline_lines(analysis, rows=rows), sys.stdout)
    if page is not None:
        from tonnage.report.roofline_page import roofline_page

        write_page(page, roofline_page(analysis), opens=opens, json_target=json)
