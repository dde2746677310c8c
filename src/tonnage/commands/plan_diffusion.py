"""`tonnage plan train` and `plan serve` of a model that makes images or videos: flags of its own, and a plan of its own."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, get_args

from tonnage.commands.options import Parser
from tonnage.errors import BadLayout

if TYPE_CHECKING:
    from tonnage.hardware import Cluster
    from tonnage.models.diffusion import Pipeline, Size
    from tonnage.planner.diffusion import DiffusionSearch

_EPILOG = "A flag that is given is fixed; one that is left out is searched. Exits 1 where nothing fits."


def is_asked(words: list[str]) -> bool:
    """Whether the model among the words makes images or videos."""
    from tonnage.models.diffusion import find_pipeline

    return any(find_pipeline(word) for word in words if not word.startswith("-"))


def train(words: list[str]) -> int:
    """Plan the training, report; the exit status."""
    from tonnage.planner.diffusion import DiffusionRequest, plan_training, usual_precision

    options = _training_parser().parse_args(words)
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

    options = _image_parser().parse_args(words)
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


def _common(name: str, description: str) -> ArgumentParser:
    usage = f"tonnage plan {name} MODEL [--gpus rtx-4090] [--resolution 1024] [FLAG]..."
    parser = Parser(f"tonnage plan {name}", usage=usage, description=description, epilog=_EPILOG)
    add = parser.add_argument
    add("model", metavar="MODEL", help="sd-1.5, sdxl, sd3-medium, sd3.5-large, flux-dev, flux-schnell, wan-2.1-14b...")
    add("--gpus", default="", help="cards, like rtx-4090 or 8xh100 (default: say which hold it)")
    add("--resolution", default="", metavar="SIZE", help="pixels of a side, or 480x832: height and width")
    add("--frames", type=int, metavar="N", help="of a video (default: 81)")
    return parser


def _training_parser() -> ArgumentParser:
    from tonnage.planner.diffusion import Kept, Loop, TrainedBy, TrainedIn

    parser = _common("train", "What training a model that makes images takes, and the fastest way that fits.")
    add = parser.add_argument
    add("--micro-batch", type=int, metavar="N", help="images in one pass of one GPU")
    add("--lora", type=int, metavar="RANK", help="train adapters of that rank on the denoiser's attention")
    add("--base", choices=get_args(Kept), default="bf16", help="with --lora: the frozen denoiser (default: bf16)")
    add("--precision", choices=get_args(TrainedIn), help="default: FP32 weights under autocast; of the largest, BF16")
    add("--optimizer", choices=get_args(TrainedBy), default="adamw")
    add("--checkpoint", choices=("none", "full"), help="what is recomputed: blocks of the denoiser")
    add("--text-encoders", choices=get_args(Loop), help="embeddings cached before, or the encoders in the loop, frozen")
    add("--vae", choices=get_args(Loop), help="latents cached before, or the VAE in the loop")
    add("--ema", action="store_true", help="keep a moving average of what is trained")
    _outputs(parser)
    return parser


def _image_parser() -> ArgumentParser:
    from tonnage.planner.diffusion import Kept, Offload

    parser = _common("serve", "What making images takes on these GPUs, with the least that must be moved.")
    add = parser.add_argument
    add("--batch", type=int, default=1, metavar="N", help="images at once (default: 1)")
    add("--steps", type=int, metavar="N", help="of the sampler (default: the pipeline's)")
    add("--no-guidance", action="store_true", help="one pass a step, where the model would need two")
    add("--weights", choices=get_args(Kept), default="bf16", help="of the denoiser and the text encoders")
    add(
        "--offload",
        choices=get_args(Offload),
        help="what waits in the host: parts, blocks or layers (default: searched)",
    )
    add("--vae-tiling", action="store_true", help="decode in tiles (default: where it must)")
    add("--vae-slicing", action="store_true", help="decode one image at a time")
    _outputs(parser)
    return parser


def _outputs(parser: ArgumentParser) -> None:
    parser.add_argument("--explain", action="store_true", help="print the arithmetic, term by term")
    parser.add_argument("--json", default="", metavar="FILE", help="write the figures as JSON ('-': standard output)")


def _publish(pipeline: "Pipeline", options: Namespace, what: str, plan: "Callable[[Cluster], DiffusionSearch]") -> int:
    from tonnage.hardware import find_cluster
    from tonnage.report import diffusion as report
    from tonnage.report.lines import print_lines
    from tonnage.report.output import write_json

    if not options.gpus:
        found = _on_common_cards(plan)
        if options.json:
            write_json(options.json, report.holder_figures(pipeline, found))
        if options.json != "-":
            print_lines(report.holder_lines(pipeline, found, what), sys.stdout)
        return 0 if any(each is not None and each.fits for _, each in found) else 1
    findings = plan(find_cluster(options.gpus))
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
