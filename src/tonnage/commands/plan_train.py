"""`tonnage plan train`: the fastest way to train a model on these GPUs that fits.

Its words are parsed by argparse, as those of `tonnage run` are: typer takes longer to load than the plan takes to make.
"""

import re
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from tonnage.commands import plan_diffusion
from tonnage.commands.options import (
    Parser,
    add_campaign,
    add_objective,
    add_page_options,
    campaign_of,
    objective_from,
    page_of,
)
from tonnage.commands.which_cards import check_cards_named, publish
from tonnage.errors import BadLayout, OutputExists, RequestError

if TYPE_CHECKING:
    from tonnage.hardware import Cluster
    from tonnage.models import ModelShape
    from tonnage.planner.lengths import Lengths
    from tonnage.planner.request import Offload, TrainingRequest
    from tonnage.planner.search import PlanSearch

SUMMARY = "What training a model takes on these GPUs, and the fastest configuration that fits."
_EPILOG = "A flag that is given is fixed; one that is left out is searched. Exits 1 where nothing fits."
_DEFAULT_SEQ = 4096
_PAGED = "paged-"
_DEFAULT_RANK = 16  # a common one


def command(words: list[str]) -> int:
    """Parse the words after `tonnage plan train`, plan, report; the exit status."""
    if plan_diffusion.is_asked(words):
        return plan_diffusion.train(words)
    options = _parser().parse_args(words)
    _check_export(options)
    check_cards_named(options)
    page = page_of(options)
    if not options.gpus:
        return _which_cards(options)
    start = time.perf_counter()
    findings = _search(options)
    _publish(findings, options, page, time.perf_counter() - start)
    if options.export is not None and findings.best is not None:
        _export(findings, options)
    return 0 if findings.fits else 1


def planned(words: list[str]) -> "PlanSearch":
    """What is found for the words after `tonnage plan train`, --gpus among them; nothing is printed."""
    return _search(_parser().parse_args(words))


def _search(options: Namespace) -> "PlanSearch":
    from tonnage.planner.search import search

    shape = shape_of(options)
    request = request_of(options, shape)
    return search(request.objective.trained(shape), cluster_of(options), request)


def _which_cards(options: Namespace) -> int:
    """No cards were named: say which hold it."""
    from tonnage.planner.holders import training_holders

    if options.beside:
        raise RequestError("--beside needs --gpus.", hint="Name the cards, like --gpus rtx-4090.")

    shape = shape_of(options)
    request = request_of(options, shape)
    shape = request.objective.trained(shape)
    holders = training_holders(shape, request)
    return publish(shape, holders, options, what=f"training at {request.seq:,} tokens", most="micro-batch")


def _parser() -> ArgumentParser:
    from tonnage.budget import configuration as kinds
    from tonnage.budget.adapters import Base
    from tonnage.planner.lengths import BATCHINGS
    from tonnage.planner.request import FRAMEWORK_STAGES

    usage = "tonnage plan train MODEL [--gpus 8xh200] [--seq 8k] [FLAG]..."
    parser = Parser("tonnage plan train", usage=usage, description=SUMMARY, epilog=_EPILOG)
    add = parser.add_argument
    add("model", metavar="MODEL", help="a preset, a config.json, a folder or a checkpoint")
    add("--gpus", default="", help="cards, like h200, 8xh200, 2x8xh100 or dgx-h100 (default: say which hold it)")
    add("--seq", default="", help="tokens of a sequence, like 8192 or 8k (default: 4k, or all that the model sees)")
    add("--micro-batch", type=int, metavar="N", help="sequences in one pass of one GPU")
    add(
        "--global-batch",
        type=int,
        metavar="N",
        help="sequences in one step (default: half a million tokens or so; of adapters 32 sequences, as in recipes)",
    )
    add("--precision", choices=get_args(kinds.Precision), help="default: bf16-mixed; fp16-mixed on cards without BF16")
    optimizers = (*get_args(kinds.Optimizer), *(f"{_PAGED}{name}" for name in ("adam", "adamw", "adamw-8bit", "lion")))
    add("--optimizer", choices=optimizers, default="adamw")
    add("--step-in-backward", action="store_true", help="update each parameter as its gradient comes, and free it")
    add("--optimizer-kernel", choices=get_args(kinds.OptimizerKernel))
    add("--checkpoint", metavar="{none,selective,full,every-K}", help="what is recomputed")
    add("--attention", choices=get_args(kinds.AttentionKernel), default="flash")
    add_objective(parser)
    add("--loss", choices=get_args(kinds.Loss))
    add("--zero", type=int, choices=(0, 1, 2, 3), help="what data-parallel ranks share: states, gradients, parameters")
    for name, words in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context"), ("ep", "expert")):
        add(f"--{name}", type=int, metavar="N", help=f"{words} parallelism")
    add("--pp-chunks", type=int, default=1, metavar="N", help="with --pp: parts of a stage that take turns")
    add("--shard", type=int, metavar="N", help="ranks that share one copy (default: all, or those of a host)")
    add("--no-sequence-parallel", action="store_true", help="with --tp: norms and residuals whole on each GPU")
    add("--framework", choices=tuple(FRAMEWORK_STAGES), help="who trains (default: by ZeRO stage and layout)")
    add(
        "--offload", nargs="?", const="optimizer", metavar="WHAT", help="optimizer, parameters, activations, all; :nvme"
    )
    add("--host-memory", metavar="SIZE", help="memory of one host, like 64g, for these GPUs (default: the catalogue's)")
    add("--beside", action="append", default=[], metavar="SIZE", help="memory of each GPU that others hold, like 6GiB")
    add("--drive", metavar="SPEED", help="what a host's drives read a second, like 7g/s; or none")
    add("--lora", type=int, metavar="RANK", help="train adapters of that rank")
    add("--lora-targets", metavar="WHAT", help="attention, mlp, all-linear (default), experts; or q_proj,v_proj, say")
    add(
        "--lora-dropout",
        action="store_true",
        help="with --lora: adapters drop some of their input, and keep what is left",
    )
    add("--base", choices=get_args(Base), help="with --lora: the frozen weights (default: 16-bit)")
    add("--qlora", action="store_true", help="--lora 16 --base nf4, of which either can be given otherwise")
    add(
        "--freeze", metavar="WHAT", help="vision, projector, language, embeddings; or all-but-projector, all-but-last-4"
    )
    add("--images", type=int, metavar="N", help="of a sample of a vision-language model (default: 1)")
    add("--image-size", default="", metavar="SIZE", help="in pixels, like 1024 or 1280x720 (default: the model's own)")
    add("--lengths", nargs="+", metavar="L", help="of samples: a file, 512,1024 or 999x600,32k; or mean 600 max 4096")
    add("--batching", choices=BATCHINGS, help="with --lengths: how samples are put together (default: pad)")
    add("--bf16-gradients", action="store_true", help="with Megatron: summed and reduced in BF16")
    add("--bf16-moments", action="store_true", help="with Megatron and --zero 1: Adam's states in BF16")
    add("--compile", action="store_true", help="under torch.compile")
    add("--dropout", action="store_true", help="after attention and MLP, as Megatron's default (and GPT-2's) is")
    add("--eager-loss", action="store_true", help="with --compile: the loss is not compiled")
    add(
        "--fp32-logits",
        action="store_true",
        help="logits are copied to FP32 and shifted, as in transformers before 4.45",
    )
    add("--tiled-mlp", action="store_true", help="MLPs see a few tokens at a time, and are made again backward (ALST)")
    add("--liger", action="store_true", help="with Liger's kernels, and --loss fused unless another is given")
    add("--online", action="store_true", help="look a model up on the hub where it is no preset")
    add("--explain", action="store_true", help="print the arithmetic, term by term, and every reason")
    add("--export", type=Path, metavar="DIR", help="write the files that launch it")
    add("--force", action="store_true", help="replace files that are there")
    add("--json", default="", metavar="FILE", help="write the figures as JSON ('-': standard output)")
    add_page_options(parser)
    add_campaign(parser)
    return parser


def cluster_of(options: Namespace) -> "Cluster":
    """The cards, in hosts as they are sold or as the flags say."""
    from tonnage.hardware import find_cluster
    from tonnage.units import parse_bytes, parse_gib

    cluster = find_cluster(options.gpus)
    if options.beside:
        cluster = cluster.without(sum(map(parse_bytes, options.beside)))
    if options.host_memory is None and options.drive in (None, "none"):
        return cluster
    # Memory is sold in GiB and drives in GB, whatever people write after the number.
    memory, drive = options.host_memory, None if options.drive == "none" else options.drive
    return cluster.with_host(
        memory_bytes=None if memory is None else parse_gib(memory),
        nvme_bytes_per_s=None
        if drive is None
        else parse_bytes(re.sub(r"(?<=[kmgt])(b?)(/s)?$", "B", drive.strip(), flags=re.I)),
    )


def shape_of(options: Namespace) -> "ModelShape":
    """The model, with the images of its samples and what of it is frozen."""
    from tonnage.models import find_model
    from tonnage.models.freezing import freeze
    from tonnage.models.pictures import with_pictures
    from tonnage.units import parse_count

    shape, tokens = with_pictures(find_model(options.model, online=options.online), options.images, options.image_size)
    seq = parse_count(options.seq) if options.seq else _DEFAULT_SEQ
    if tokens > seq:
        problem = f"{tokens:,} tokens of a sample are its images', and a sequence has {seq:,}."
        raise BadLayout(problem, hint=f"Write --seq {2 * tokens}, say, or fewer or smaller images.")
    return freeze(shape, options.freeze) if options.freeze is not None else shape


def request_of(options: Namespace, shape: "ModelShape") -> "TrainingRequest":
    """The flags as the planner takes them."""
    from tonnage.planner.request import TrainingRequest
    from tonnage.units import parse_count

    adapters = adapters_of(options)
    lengths = _lengths(options)
    most = shape.fixed_tokens or min(shape.max_positions or _DEFAULT_SEQ, _DEFAULT_SEQ)
    names = ["micro_batch", "global_batch", "optimizer_kernel", "checkpoint", "attention"]
    names += ["zero", "tp", "ep", "pp_chunks", "shard", "framework", "compile", "liger", "step_in_backward"]
    names += ["bf16_gradients", "bf16_moments", "tiled_mlp", "dropout", "lora_dropout"]
    objective = objective_from(options)
    return TrainingRequest(
        objective=objective,
        seq=lengths.seq if lengths else parse_count(options.seq) if options.seq else most,
        lengths=lengths,
        cp=1 if lengths and options.cp is None else options.cp,
        precision=options.precision or "bf16-mixed",  # or what the cards have in its place
        **adapters,
        loss=options.loss or (("fused" if options.liger else None) if objective.has_logits else "full"),
        compile_loss=not options.eager_loss,
        wide_logits=options.fp32_logits,
        drives=options.drive != "none",
        sequence_parallel=not options.no_sequence_parallel,
        optimizer=options.optimizer.removeprefix(_PAGED),
        paged=options.optimizer.startswith(_PAGED),
        offload=_offload(options),
        pp=1 if shape.unfrozen and options.pp is None else options.pp,
        **{name: getattr(options, name) for name in names},
    )


def adapters_of(options: Namespace) -> dict[str, Any]:
    """The rank, the targets and the base of adapters, as the planner takes them."""
    from tonnage.budget.adapters import parse_targets

    if options.lora is not None and options.lora < 1:
        raise BadLayout(f"--lora {options.lora}: a rank is at least 1.", hint="Write --lora 16, or leave it out.")
    if options.lora_targets and not options.lora and not options.qlora:
        raise BadLayout(f"--lora-targets {options.lora_targets}: no adapters are trained.", hint="Add --lora 16.")
    return {
        "lora_rank": options.lora or (_DEFAULT_RANK if options.qlora else 0),
        "lora_targets": parse_targets(options.lora_targets or "all-linear"),
        "base": options.base or ("nf4" if options.qlora else "16-bit"),
    }


def _lengths(options: Namespace) -> "Lengths | None":
    """Of samples, cut where a sequence ends."""
    from tonnage.planner.lengths import parse_lengths
    from tonnage.units import parse_count

    if not options.lengths:
        if options.batching:
            hint = "Add --lengths mean 600 max 4096, say, or a file of lengths."
            raise BadLayout(f"--batching {options.batching}: all samples are as long.", hint=hint)
        return None
    lengths = replace(parse_lengths(" ".join(options.lengths), options.samples), batching=options.batching or "pad")
    seq = parse_count(options.seq) if options.seq else lengths.longest
    if seq < 1:
        raise BadLayout(f"--seq {seq}: there must be at least one.", hint="Write --seq 4096, or leave it out.")
    return lengths.limited(seq)


def _offload(options: Namespace) -> "Offload | None":
    """As asked; nothing where states are paged or gradients are used at once, unless something is asked."""
    from tonnage.planner.request import NO_OFFLOAD, parse_offload

    if options.offload is not None:
        return parse_offload(options.offload)
    return NO_OFFLOAD if options.step_in_backward or options.optimizer.startswith(_PAGED) else None


def _check_export(options: Namespace) -> None:
    """Before the work, so that no one waits for a mistake."""
    folder = options.export
    if folder is not None and options.objective != "next-token":
        hint = "Leave --export out: --json has every choice of the plan."
        raise BadLayout(f"--export writes scripts that train on next tokens, not by {options.objective}.", hint=hint)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise OutputExists(f"{folder} is a file.", hint="Name a folder for --export.")
    for flag, given in (("--freeze", options.freeze is not None), ("--lengths", bool(options.lengths))):
        if folder is not None and given:
            problem = f"--export writes what trains all of a model, on samples of one length: it knows no {flag}."
            raise BadLayout(problem, hint="Leave one of the two out.")


def _publish(findings: "PlanSearch", options: Namespace, page: Path | None, seconds: float) -> None:
    from tonnage.planner.offers import offers
    from tonnage.planner.reasons import rejected
    from tonnage.planner.search import batching_choices
    from tonnage.report.plan import print_plan

    reasons, offered, changes = rejected(findings), offers(findings), []
    if not findings.fits:
        from tonnage.planner.remedies import remedies

        changes = remedies(findings)
    campaign, batchings = campaign_of(options), batching_choices(findings)
    if options.json:
        from tonnage.report.lengths import length_figures
        from tonnage.report.output import write_json
        from tonnage.report.plan_figures import plan_figures

        figures = plan_figures(findings, reasons, changes, offered, seconds, campaign)
        write_json(options.json, figures | length_figures(findings, batchings))
    if page is not None:
        from tonnage.report.html.plan_page import render_plan_page
        from tonnage.report.output import write_page

        text = render_plan_page(findings, reasons, changes, offered, campaign)
        write_page(page, text, opens=options.open, json_target=options.json)
    elif options.json != "-":
        how = {"explain": options.explain, "seconds": seconds, "campaign": campaign}
        print_plan(findings, reasons, changes, offered, stream=sys.stdout, batchings=batchings, **how)


def _export(findings: "PlanSearch", options: Namespace) -> None:
    from tonnage.planner.export import TrainingRun, export_training

    assert findings.best is not None
    chosen = findings.best.configuration
    launch = TrainingRun(model=options.model, shape=findings.shape, cluster=findings.cluster, configuration=chosen)
    written = export_training(launch, options.export, force=options.force)
    stream = sys.stderr if options.json == "-" else sys.stdout
    stream.write("".join(f"  wrote {path}\n" for path in written) + "\n")
