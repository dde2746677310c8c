"""`tonnage plan train`: the fastest way to train a model on these GPUs that fits.

Its words are parsed by argparse, as those of `tonnage run` are: typer takes longer to load than the plan takes to make.
"""

import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from tonnage.commands.campaign import add_campaign, campaign_of
from tonnage.commands.pages import add_page_options, page_of
from tonnage.errors import BadLayout, OutputExists

if TYPE_CHECKING:
    from tonnage.planner.remedies import Remedy
    from tonnage.planner.request import TrainingRequest
    from tonnage.planner.search import Findings

SUMMARY = "What training a model takes on these GPUs, and the fastest configuration that fits."
_EPILOG = "A flag that is given is fixed; one that is left out is searched. Exits 1 where nothing fits."
_DEFAULT_SEQ = 4096


def command(words: list[str]) -> int:
    """Parse the words after `tonnage plan train`, plan, report; the exit status."""
    options = _parser().parse_args(words)
    _check_export(options)
    page = page_of(options)
    from tonnage.hardware import find_cluster
    from tonnage.models import find_model
    from tonnage.planner.search import search

    cluster, shape = find_cluster(options.gpus), find_model(options.model, online=options.online)
    start = time.perf_counter()
    findings = search(shape, cluster, request_of(options, shape.max_positions))
    _publish(findings, options, page, time.perf_counter() - start)
    if options.export is not None and findings.best is not None:
        _export(findings, options)
    return 0 if findings.fits else 1


def _parser() -> ArgumentParser:
    from tonnage.budget import configuration as kinds
    from tonnage.planner.request import FRAMEWORK_STAGES

    usage = "tonnage plan train MODEL --gpus 8xh200 [--seq 8k] [FLAG]..."
    parser = ArgumentParser("tonnage plan train", usage=usage, description=SUMMARY, epilog=_EPILOG, allow_abbrev=False)
    add = parser.add_argument
    add("model", metavar="MODEL", help="a preset, a config.json, a folder or a checkpoint")
    add("--gpus", required=True, help="cards, like h200, 8xh200, 2x8xh100 or dgx-h100")
    add("--seq", default="", help="tokens of a sequence, like 8192 or 8k (default: 4k, or all that the model sees)")
    add("--micro-batch", type=int, metavar="N", help="sequences in one pass of one GPU")
    add("--global-batch", type=int, metavar="N", help="sequences in one step (default: about half a million tokens)")
    add("--precision", choices=get_args(kinds.Precision), default="bf16-mixed")
    add("--optimizer", choices=get_args(kinds.Optimizer), default="adamw")
    add("--optimizer-kernel", choices=get_args(kinds.OptimizerKernel))
    add("--checkpoint", metavar="{none,selective,full,every-K}", help="what is recomputed")
    add("--attention", choices=get_args(kinds.AttentionKernel), default="flash")
    add("--loss", choices=get_args(kinds.Loss))
    add("--zero", type=int, choices=(0, 1, 2, 3), help="what data-parallel ranks share: states, gradients, parameters")
    for name, words in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context"), ("ep", "expert")):
        add(f"--{name}", type=int, metavar="N", help=f"{words} parallelism")
    add("--shard", type=int, metavar="N", help="ranks that share one copy (default: all, or those of a host)")
    add("--no-sequence-parallel", action="store_true", help="with --tp: norms and residuals whole on each GPU")
    add("--framework", choices=tuple(FRAMEWORK_STAGES), help="who trains (default: by ZeRO stage and layout)")
    add(
        "--offload", nargs="?", const="optimizer", metavar="WHAT", help="optimizer, parameters, activations, all; :nvme"
    )
    add("--lora", type=int, metavar="RANK", help="train adapters of that rank")
    add("--qlora", action="store_true", help="with --lora: the base in 4 bits")
    add("--compile", action="store_true", help="under torch.compile")
    add("--online", action="store_true", help="look a model up on the hub where it is no preset")
    add("--explain", action="store_true", help="print the arithmetic, term by term, and every reason")
    add("--export", type=Path, metavar="DIR", help="write the files that launch it")
    add("--force", action="store_true", help="replace files that are there")
    add("--json", default="", metavar="FILE", help="write the figures as JSON ('-': standard output)")
    add_page_options(parser)
    add_campaign(parser)
    return parser


def request_of(options: Namespace, max_positions: int) -> "TrainingRequest":
    """The flags as the planner takes them."""
    from tonnage.planner.request import TrainingRequest, parse_offload
    from tonnage.units import parse_count

    if options.lora is not None and options.lora < 1:
        raise BadLayout(f"--lora {options.lora}: a rank is at least 1.", hint="Write --lora 16, or leave it out.")
    names = ["micro_batch", "global_batch", "precision", "optimizer", "optimizer_kernel", "checkpoint", "attention"]
    names += ["loss", "zero", "tp", "pp", "cp", "ep", "shard", "framework", "compile"]
    return TrainingRequest(
        seq=parse_count(options.seq) if options.seq else min(max_positions or _DEFAULT_SEQ, _DEFAULT_SEQ),
        lora_rank=options.lora or 0,
        quantized_base=options.qlora,
        sequence_parallel=not options.no_sequence_parallel,
        offload=None if options.offload is None else parse_offload(options.offload),
        **{name: getattr(options, name) for name in names},
    )


def _check_export(options: Namespace) -> None:
    """Before the work, so that no one waits for a mistake."""
    folder = options.export
    if folder is not None and folder.exists() and not folder.is_dir():
        raise OutputExists(f"{folder} is a file.", hint="Name a folder for --export.")


def _publish(findings: "Findings", options: Namespace, page: Path | None, seconds: float) -> None:
    from tonnage.planner.offers import offers
    from tonnage.planner.reasons import rejected
    from tonnage.report.plan import print_plan

    reasons, changes, offered = rejected(findings), _remedies(findings), offers(findings)
    campaign = campaign_of(options)
    if options.json:
        from tonnage.report.output import write_json
        from tonnage.report.plan_figures import plan_figures

        write_json(options.json, plan_figures(findings, reasons, changes, offered, seconds, campaign))
    if page is not None:
        from tonnage.report.html.plan_page import render_plan_page
        from tonnage.report.output import write_page

        text = render_plan_page(findings, reasons, changes, offered, campaign)
        write_page(page, text, opens=options.open, json_target=options.json)
    elif options.json != "-":
        how = {"explain": options.explain, "seconds": seconds, "campaign": campaign}
        print_plan(findings, reasons, changes, offered, stream=sys.stdout, **how)


def _remedies(findings: "Findings") -> "list[Remedy]":
    if findings.fits:
        return []
    from tonnage.planner.remedies import remedies

    return remedies(findings)


def _export(findings: "Findings", options: Namespace) -> None:
    from tonnage.planner.export import Launch, export_training

    assert findings.best is not None
    chosen = findings.best.configuration
    launch = Launch(model=options.model, shape=findings.shape, cluster=findings.cluster, configuration=chosen)
    written = export_training(launch, options.export, force=options.force)
    stream = sys.stderr if options.json == "-" else sys.stdout
    stream.write("".join(f"  wrote {path}\n" for path in written) + "\n")
