"""`tonnage plan train`: the fastest way to train a model on these GPUs that fits.

The words of all plans are parsed by argparse: typer takes longer to load than a plan takes to make.
"""

import re
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from tonnage.budget.training.adapters import parse_targets
from tonnage.commands import plan_diffusion
from tonnage.commands.options import campaign_of, check_cards_named, page_of, parser_of, publish_holders
from tonnage.errors import BadLayout, OutputExists, RequestError
from tonnage.hardware import Cluster, find_cluster
from tonnage.models import ModelShape, find_model
from tonnage.models.freezing import freeze
from tonnage.models.pictures import with_pictures
from tonnage.planner.training.lengths import Lengths, parse_lengths
from tonnage.planner.training.offers import offers
from tonnage.planner.training.reasons import rejected
from tonnage.planner.training.remedies import next_plan, remedies
from tonnage.planner.training.request import NO_OFFLOAD, TrainingRequest, asked_objective, parse_offload
from tonnage.planner.training.search import PlanSearch, batching_choices, search
from tonnage.report.output import write_json, write_page
from tonnage.report.plans.notes import length_figures, refusal_lines
from tonnage.report.plans.training import TrainingAnswer, plan_figures, print_plan
from tonnage.units import parse_bytes, parse_count, parse_gib

_DEFAULT_SEQ = 4096
_PAGED = "paged-"
_DEFAULT_RANK = 16  # a common one


def command(words: list[str]) -> int:
    """Parse the words after `tonnage plan train`, plan, report; the exit status."""
    if plan_diffusion.is_asked(words):
        return plan_diffusion.train(words)
    options = parser_of("plan train").parse_args(words)
    # Before the work, so that no one waits for a mistake.
    folder = options.export
    if folder is not None and options.objective != "next-token":
        hint = "Leave --export out: --json has every choice of the plan."
        raise BadLayout(f"--export writes scripts that train on next tokens, not by {options.objective}.", hint=hint)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise OutputExists(f"{folder} is a file.", hint="Name a folder for --export.")
    flag = "--freeze" if options.freeze is not None else "--lengths" if options.lengths else ""
    if folder is not None and flag:
        problem = f"--export writes what trains all of a model, on samples of one length: it knows no {flag}."
        raise BadLayout(problem, hint="Leave one of the two out.")
    check_cards_named(options)
    page = page_of(options)
    if not options.gpus:
        from tonnage.planner.holders import training_holders

        if options.beside:
            raise RequestError("--beside needs --gpus.", hint="Name the cards, like --gpus rtx-4090.")
        shape, request = _asked(options)
        holders = training_holders(shape, request)
        what = f"training at {request.seq:,} tokens"
        return publish_holders(shape, holders, options, what=what, most="micro-batch")
    start = time.perf_counter()
    findings = _search(options)
    _publish(findings, options, page, time.perf_counter() - start)
    if options.export is not None:
        _export(findings, options)
    return 0 if findings.fits else 1


def _export(findings: PlanSearch, options: Namespace) -> None:
    """Write the files that launch the plan, or say why there are none."""
    from tonnage.planner.export import TrainingRun, export_training

    plan, stream = findings.closest, sys.stderr if options.json == "-" else sys.stdout
    if not plan.fits:
        stream.writelines(f"{line}\n" for line in refusal_lines(options.export, plan.shortages))
        return
    launch = TrainingRun(
        model=options.model, shape=findings.shape, cluster=findings.cluster, configuration=plan.configuration
    )
    written = export_training(launch, options.export, force=options.force)
    stream.write("".join(f"  wrote {path}\n" for path in written) + "\n")


def planned(words: list[str]) -> PlanSearch:
    """What is found for the words after `tonnage plan train`, --gpus among them; nothing is printed."""
    return _search(parser_of("plan train").parse_args(words))


def _search(options: Namespace) -> PlanSearch:
    shape, request = _asked(options)
    return search(shape, cluster_of(options), request)


def cluster_of(options: Namespace) -> Cluster:
    """The cards, in hosts as they are sold or as the flags say."""
    cluster = find_cluster(options.gpus)
    if options.beside:
        cluster = cluster.without(sum(map(parse_bytes, options.beside)))
    if options.host_memory is None and options.drive in (None, "none"):
        return cluster
    # Memory is sold in GiB and drives in GB, whatever people write after the number.
    memory, drive = options.host_memory, None if options.drive == "none" else options.drive
    memory_bytes = None if memory is None else parse_gib(memory)
    rate = re.sub(r"(?<=[kmgt])(b?)(/s)?$", "B", (drive or "").strip(), flags=re.I)
    return cluster.with_host(memory_bytes=memory_bytes, nvme_bytes_per_s=None if drive is None else parse_bytes(rate))


def _asked(options: Namespace) -> tuple[ModelShape, TrainingRequest]:
    """The model, with the images of its samples and what of it is frozen; and the flags as the planner takes them."""
    shape, tokens = with_pictures(find_model(options.model, online=options.online), options.images, options.image_size)
    seq = parse_count(options.seq) if options.seq else _DEFAULT_SEQ
    if tokens > seq:
        problem = f"{tokens:,} tokens of a sample are its images', and a sequence has {seq:,}."
        raise BadLayout(problem, hint=f"Write --seq {2 * tokens}, say, or fewer or smaller images.")
    if options.freeze is not None:
        shape = freeze(shape, options.freeze)

    adapters = adapters_of(options)
    lengths = _lengths(options)
    most = shape.fixed_tokens or min(shape.max_positions or _DEFAULT_SEQ, _DEFAULT_SEQ)
    objective = asked_objective(
        options.objective, adapters=bool(options.lora or options.qlora), reference=options.reference,
        teacher=find_model(options.teacher, online=options.online) if options.teacher else None,
        teacher_base=options.teacher_weights, negatives=options.negatives, grad_cache=options.grad_cache,
    )  # fmt: skip
    # Nothing is offloaded where states are paged or gradients are used at once, unless something is asked.
    paged = options.optimizer.startswith(_PAGED)
    offload = NO_OFFLOAD if options.step_in_backward or paged else None
    names = ["micro_batch", "global_batch", "optimizer_kernel", "checkpoint", "attention"]
    names += ["zero", "tp", "ep", "pp_chunks", "shard", "framework", "compile", "liger", "step_in_backward"]
    names += ["bf16_gradients", "bf16_moments", "tiled_mlp", "dropout", "lora_dropout"]
    return objective.trained(shape), TrainingRequest(
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
        paged=paged,
        offload=parse_offload(options.offload) if options.offload is not None else offload,
        pp=1 if shape.unfrozen and options.pp is None else options.pp,
        **{name: getattr(options, name) for name in names},
    )


def adapters_of(options: Namespace) -> dict[str, Any]:
    """The rank, the targets and the base of adapters, as the planner takes them."""
    if options.lora is not None and options.lora < 1:
        raise BadLayout(f"--lora {options.lora}: a rank is at least 1.", hint="Write --lora 16, or leave it out.")
    if options.lora_targets and not options.lora and not options.qlora:
        raise BadLayout(f"--lora-targets {options.lora_targets}: no adapters are trained.", hint="Add --lora 16.")
    return {
        "lora_rank": options.lora or (_DEFAULT_RANK if options.qlora else 0),
        "lora_targets": parse_targets(options.lora_targets or "all-linear"),
        "base": options.base or ("nf4" if options.qlora else "16-bit"),
    }


def _lengths(options: Namespace) -> Lengths | None:
    """Of samples, cut where a sequence ends."""
    if not options.lengths:
        if not options.batching:
            return None
        hint = "Add --lengths mean 600 max 4096, say, or a file of lengths."
        raise BadLayout(f"--batching {options.batching}: all samples are as long.", hint=hint)
    lengths = replace(parse_lengths(" ".join(options.lengths), options.samples), batching=options.batching or "pad")
    seq = parse_count(options.seq) if options.seq else lengths.longest
    if seq < 1:
        raise BadLayout(f"--seq {seq}: there must be at least one.", hint="Write --seq 4096, or leave it out.")
    return lengths.limited(seq)


def _publish(findings: PlanSearch, options: Namespace, page: Path | None, seconds: float) -> None:
    reasons, offered = rejected(findings), offers(findings)
    changes = [] if findings.fits else remedies(findings)
    campaign, batchings = campaign_of(options), batching_choices(findings)
    following = next_plan(findings, changes)
    answer = TrainingAnswer(findings, reasons, changes, offered, seconds, campaign, batchings, following)
    if options.json:
        write_json(options.json, plan_figures(answer) | length_figures(findings, batchings))
    if page is not None:
        from tonnage.report.html.plan_page import render_plan_page

        write_page(page, render_plan_page(answer), opens=options.open, json_target=options.json)
    elif options.json != "-":
        print_plan(answer, stream=sys.stdout, explain=options.explain)
