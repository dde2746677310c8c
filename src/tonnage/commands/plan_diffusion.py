"""`tonnage plan train` and `plan serve` of a model that makes images or videos: flags of its own, and a plan of its own."""

import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tonnage.commands.options import parser_of
from tonnage.errors import BadLayout

if TYPE_CHECKING:
    from tonnage.hardware import Cluster
    from tonnage.models.diffusion import Pipeline, Size
    from tonnage.planner.diffusion import DiffusionSearch


def is_asked(words: list[str]) -> bool:
    """Whether the model among the words makes images or videos."""
    from tonnage.models.diffusion import find_pipeline

    return any(find_pipeline(word) for word in words if not word.startswith("-"))


def train(words: list[str]) -> int:
    """Plan the training, report; the exit status."""
    from tonnage.planner.diffusion import DiffusionRequest, plan_training, usual_precision

    options = parser_of("diffusion train").parse_args(words)
    pipeline, size = _asked(options)
    if options.lora is not None and options.lora < 1:
        raise BadLayout(f"--lora {options.lora}: a rank is at least 1.", hint="Write --lora 16, or leave it out.")
    request = DiffusionRequest(
        size=size, precision=options.precision or usual_precision(pipeline), optimizer=options.optimizer,
        lora_rank=options.lora or 0, base=options.base, ema=options.ema, micro_batch=options.micro_batch,
        checkpoint=options.checkpoint, text=options.text_encoders, vae=options.vae,
    )  # fmt: skip
    what = f"training at {size.words}"
    return _publish(pipeline, options, what, lambda cluster: plan_training(pipeline, cluster, request))


def serve(words: list[str]) -> int:
    """Plan how images are made, report; the exit status."""
    from tonnage.planner.diffusion import ImageRequest, plan_images

    options = parser_of("diffusion serve").parse_args(words)
    pipeline, size = _asked(options)
    request = ImageRequest(
        size=size, batch=options.batch, steps=pipeline.steps if options.steps is None else options.steps,
        guided=pipeline.guidance != "none" and not options.no_guidance, weights=options.weights, slicing=options.vae_slicing,
        tiling=True if options.vae_tiling else None, offload=options.offload,
    )  # fmt: skip
    return _publish(pipeline, options, size.words, lambda cluster: plan_images(pipeline, cluster, request))


def _asked(options: Namespace) -> "tuple[Pipeline, Size]":
    from tonnage.models.diffusion import find_pipeline, pipelines, size_of

    pipeline = find_pipeline(options.model)
    if pipeline is None:
        hint = f"Known are {', '.join(pipelines())}."
        raise BadLayout(f"{options.model} is no model that makes images.", hint=hint)
    return pipeline, size_of(pipeline, options.resolution, options.frames)


def _publish(pipeline: "Pipeline", options: Namespace, what: str, plan: "Callable[[Cluster], DiffusionSearch]") -> int:
    from tonnage.hardware import find_cluster
    from tonnage.planner.diffusion import remedies
    from tonnage.report.lines import print_lines
    from tonnage.report.output import write_json
    from tonnage.report.plans import diffusion as report

    if not options.gpus:
        found = _on_common_cards(plan)
        if options.json:
            write_json(options.json, report.holder_figures(pipeline, found))
        if options.json != "-":
            print_lines(report.holder_lines(pipeline, found, what), sys.stdout)
        return 0 if any(each is not None and each.fits for _, each in found) else 1
    findings = plan(find_cluster(options.gpus))
    if not findings.fits:
        findings = replace(findings, remedies=remedies(findings))
    if options.json:
        write_json(options.json, report.plan_figures(findings))
    if options.json != "-":
        print_lines(report.plan_lines(findings, explain=options.explain), sys.stdout)
    return 0 if findings.fits else 1


def _on_common_cards(plan: "Callable[[Cluster], DiffusionSearch]") -> "list[tuple[Cluster, DiffusionSearch | None]]":
    """One of each, by memory; None where a card cannot do it at all."""
    from tonnage.hardware import find_cluster
    from tonnage.hardware.catalogue import common_cards

    found: list[tuple[Cluster, DiffusionSearch | None]] = []
    problems = []
    for name, _ in common_cards():
        cluster = find_cluster(name)
        try:
            found.append((cluster, plan(cluster)))
        except BadLayout as problem:
            problems.append(problem)
            found.append((cluster, None))
    if len(problems) == len(found):  # the request itself is wrong
        raise problems[0]
    return sorted(found, key=lambda row: row[0].gpu.memory_bytes)
