"""`tonnage plan serve`: what serving a model takes, how many users fit, and the line that launches it.

Its words are parsed by argparse, as those of `tonnage plan train` are: typer takes longer to load than the plan takes to
make.
"""

import shlex
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.commands import plan_diffusion
from tonnage.commands.options import Parser, add_page_options, page_of
from tonnage.commands.which_cards import check_cards_named, publish
from tonnage.errors import OutputExists, RequestError

if TYPE_CHECKING:
    from tonnage.budget.serving import ServingConfiguration
    from tonnage.hardware import Cluster
    from tonnage.planner.beside import Neighbour
    from tonnage.planner.serving import ServingPlan

SUMMARY = "What serving a model takes on these GPUs, how many users fit, and how to launch it."
_EPILOG = (
    "A flag that is given is kept; --tp and --pp are searched, the others have the engine's default. "
    "Exits 1 where not all users fit at once."
)
_DEFAULT_CONTEXT = 8192
_CACHES = ("bf16", "fp8", "int4", "fp16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
_ENGINES = ("vllm", "sglang", "tensorrt-llm", "llama.cpp", "tonnage")
# Layers to keep on the host where all experts are to.
_ALL = 1 << 20


def command(words: list[str]) -> int:
    """Parse the words after `tonnage plan serve`, plan, report; the exit status."""
    if plan_diffusion.is_asked(words):
        return plan_diffusion.serve(words)
    options = _parser().parse_args(words)
    _check_export(options)
    check_cards_named(options)
    page = page_of(options)
    if not options.gpus:
        return _which_cards(options)
    from dataclasses import replace

    from tonnage.models import find_model
    from tonnage.planner.beside import reserved
    from tonnage.planner.serving import plan_serving

    cluster, shape = _cluster(options), find_model(options.model, online=options.online)
    asked = configuration_of(options, shape.max_positions)
    neighbours = _neighbours(options, cluster)
    pp = options.pp or len(asked.stage_layers)
    plan = plan_serving(shape, cluster, reserved(asked, neighbours), model=options.model, tp=options.tp or 0, pp=pp)
    plan = replace(plan, neighbours=tuple(neighbours))
    _publish(plan, options, page)
    if options.export is not None and plan.fits:
        _export(plan, options)
    return 0 if plan.fits else 1


def _cluster(options: Namespace) -> "Cluster":
    """The cards, in hosts with as much memory as was said."""
    from tonnage.hardware import find_cluster
    from tonnage.units import parse_gib

    cluster = find_cluster(options.gpus)
    return cluster if options.host_memory is None else cluster.with_host(memory_bytes=parse_gib(options.host_memory))


def _neighbours(options: Namespace, cluster: "Cluster") -> "list[Neighbour]":
    """What else lies on the cards, in the order that it starts: sizes, then models with words of their own."""
    from tonnage.models import find_model
    from tonnage.planner.beside import of_model, of_size
    from tonnage.units import is_size, parse_bytes

    found = [of_size(words, parse_bytes(words), cluster) for words in options.beside if is_size(words)]
    for words in (words for words in options.beside if not is_size(words)):
        theirs = _parser().parse_args(_words(words))
        given = [name for name in ("gpus", "beside", "export", "json", "html") if getattr(theirs, name)]
        if given:
            raise RequestError(
                f"--{given[0]} has no place within --beside {words!r}.",
                hint="It lies on the same cards; give it --context, --users, --weights and the like.",
            )
        shape = find_model(theirs.model, online=options.online)
        asked = configuration_of(theirs, shape.max_positions)
        found.append(of_model(words, shape, asked, cluster, model=theirs.model, before=found))
    return found


def _words(text: str) -> list[str]:
    """A model and its flags, as a shell takes them apart."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise RequestError(f"--beside {text!r} makes no sense: {error}.", hint="Close its quotes.") from None


def _which_cards(options: Namespace) -> int:
    """No cards were named: say which hold it."""
    if options.beside or options.host_memory:
        flag = "--beside" if options.beside else "--host-memory"
        raise RequestError(f"{flag} needs --gpus.", hint="Name the cards, like --gpus l40s.")
    from tonnage.budget.serving import check
    from tonnage.models import find_model
    from tonnage.planner.holders import serving_holders

    shape = find_model(options.model, online=options.online)
    asked = configuration_of(options, shape.max_positions)
    check(shape, asked)
    holders = serving_holders(shape, asked, tp=options.tp or 0, pp=options.pp or len(asked.stage_layers))
    return publish(shape, holders, options, what=f"serving at {asked.context:,} tokens", most="sequences")


def _parser() -> ArgumentParser:
    usage = "tonnage plan serve MODEL [--gpus 4xh100] [--context 32k] [--users 64] [FLAG]..."
    parser = Parser("tonnage plan serve", usage=usage, description=SUMMARY, epilog=_EPILOG)
    add = parser.add_argument
    add("model", metavar="MODEL", help="a preset, a config.json, a folder or a checkpoint")
    add("--gpus", default="", help="cards, like h100, 4xh100, 2x8xh200 or dgx-h100 (default: say which hold it)")
    add(
        "--context",
        default="",
        help="tokens of the longest sequence, like 8192 or 32k (default: 8k, or all that the model sees)",
    )
    add("--users", type=int, default=1, metavar="N", help="sequences at once (default: 1)")
    add("--prompt-shared", default="0", metavar="TOKENS", help="tokens at the start that all users have in common")
    add("--tp", type=int, metavar="N", help="tensor parallelism")
    add("--pp", type=int, metavar="N", help="pipeline parallelism")
    add("--stage-layers", metavar="N,N", help="layers of each pipeline stage (default: cut for the largest cache)")
    add("--weights", metavar="FORMAT", help="bf16, fp8, int8, int4, nf4, q4_k_m... (default: the checkpoint's)")
    add("--kv", choices=_CACHES, help="the KV cache (default: 16 bits)")
    add("--block", type=int, default=16, metavar="N", help="tokens in a block (default: 16)")
    add("--utilization", type=float, metavar="SHARE", help="the engine's share of the card")
    add("--max-seqs", type=int, metavar="N", help="sequences in one step")
    add("--batched-tokens", metavar="N", help="tokens in one step")
    add("--eager", action="store_true", help="no CUDA graphs")
    add("--engine", choices=_ENGINES, default="vllm", help="whose accounting (default: vllm)")
    add("--engine-version", default="", metavar="V", help="the engine's version (default: the newest that is known)")
    add("--gpu-layers", metavar="N", help="llama.cpp: layers on the GPUs, or all (default: as many as fit)")
    add("--cpu-moe", metavar="N", help="llama.cpp: the first N layers' experts stay on the host, or all")
    add("--no-flash-attention", action="store_true", help="llama.cpp: scores of a whole batch are kept")
    add("--host-memory", metavar="SIZE", help="memory of the host, like 64g (default: the catalogue's)")
    add(
        "--beside", action="append", default=[], metavar="WHAT",
        help='what else lies on the GPUs: 6GiB, or a model, like "bge-m3 --users 16"',
    )  # fmt: skip
    add("--online", action="store_true", help="look a model up on the hub where it is no preset")
    add("--explain", action="store_true", help="print the arithmetic, term by term")
    add("--export", type=Path, metavar="DIR", help="write the files that launch it")
    add("--force", action="store_true", help="replace files that are there")
    add("--json", default="", metavar="FILE", help="write the figures as JSON ('-': standard output)")
    add_page_options(parser)
    return parser


def configuration_of(options: Namespace, max_positions: int) -> "ServingConfiguration":
    """The flags as the budget takes them: what was not given is 0 or empty."""
    from tonnage.budget.serving import ServingConfiguration
    from tonnage.units import parse_count

    batched = parse_count(options.batched_tokens) if options.batched_tokens else None
    numbers = {"tp": options.tp, "pp": options.pp, "max-seqs": options.max_seqs, "batched-tokens": batched}
    for name, number in (numbers | {"utilization": options.utilization}).items():
        if number is not None and not number > 0:
            raise RequestError(
                f"--{name} {number} makes no sense.", hint=f"Give --{name} more than 0, or leave it out."
            )
    return ServingConfiguration(
        stage_layers=_stage_layers(options.stage_layers or ""),
        engine=options.engine,
        engine_version=options.engine_version,
        context=parse_count(options.context)
        if options.context
        else min(max_positions or _DEFAULT_CONTEXT, _DEFAULT_CONTEXT),
        users=options.users,
        shared_prefix=parse_count(options.prompt_shared),
        weights=options.weights or "",
        kv=options.kv or "",
        block=options.block,
        utilization=options.utilization or 0.0,
        max_seqs=options.max_seqs or 0,
        batched_tokens=batched or 0,
        eager=options.eager,
        gpu_layers=_layers("--gpu-layers", options.gpu_layers, options.engine, -1),
        cpu_experts=_layers("--cpu-moe", options.cpu_moe, options.engine, 0),
        flash_attention=not options.no_flash_attention,
    )


def _layers(flag: str, text: str | None, engine: str, unsaid: int) -> int:
    """A number of layers, or all."""
    if text is None or (text == "auto" and flag == "--gpu-layers"):
        return unsaid
    if engine != "llama.cpp":
        raise RequestError(f"{flag} is llama.cpp's.", hint="Add --engine llama.cpp, or leave it out.")
    if text == "all":
        return _ALL
    if not text.isdecimal() or len(text) > 6:
        raise RequestError(f"{flag} {text} makes no sense.", hint=f"Write {flag} 20, or {flag} all.")
    return int(text)


def _stage_layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(",") if text)
    except ValueError:
        raise RequestError(
            f"--stage-layers {text} makes no sense.", hint="Give one number for each stage, like 31,32,32,31."
        ) from None


def _check_export(options: Namespace) -> None:
    """Before the work, so that no one waits for a mistake."""
    folder = options.export
    if folder is not None and options.engine == "tonnage":
        raise RequestError(
            "Tonnage is launched by no files.", hint="Use another --engine, or the line that is printed."
        )
    if folder is not None and folder.exists() and not folder.is_dir():
        raise OutputExists(f"{folder} is a file.", hint="Name a folder for --export.")


def _publish(plan: "ServingPlan", options: Namespace, page: Path | None) -> None:
    from tonnage.report.lines import print_lines
    from tonnage.report.serving import serving_figures, serving_lines

    if options.json:
        from tonnage.report.output import write_json

        write_json(options.json, serving_figures(plan))
    if page is not None:
        from tonnage.report.html.serving_page import render_serving_page
        from tonnage.report.output import write_page

        write_page(page, render_serving_page(plan), opens=options.open, json_target=options.json)
    if page is not None or options.json == "-":
        return
    print_lines(serving_lines(plan, explain=options.explain), sys.stdout)


def _export(plan: "ServingPlan", options: Namespace) -> None:
    from tonnage.planner.export import export_serving

    stream = sys.stderr if options.json == "-" else sys.stdout
    for path in export_serving(plan.launch, options.export, force=options.force):
        stream.write(f"  wrote {path}\n")
