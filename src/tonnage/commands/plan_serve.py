"""`tonnage plan serve`: what serving a model takes, how many users fit, and the line that launches it."""

import shlex
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from tonnage.budget.serving.memory import ServingConfiguration, check
from tonnage.commands import plan_diffusion
from tonnage.commands.options import check_cards_named, page_of, parser_of, publish_holders
from tonnage.errors import OutputExists, RequestError
from tonnage.hardware import Cluster, find_cluster
from tonnage.models import find_model
from tonnage.planner.serving.beside import Neighbour, of_model, of_size, reserved
from tonnage.planner.serving.search import ServingPlan, plan_serving
from tonnage.report.lines import print_lines
from tonnage.report.output import write_json, write_page
from tonnage.report.plans.notes import refusal_lines
from tonnage.report.plans.serving import serving_figures, serving_lines
from tonnage.units import is_size, parse_bytes, parse_count, parse_gib

_DEFAULT_CONTEXT = 8192
# Layers to keep on the host where all experts are to.
_ALL = 1 << 20


def command(words: list[str]) -> int:
    """Parse the words after `tonnage plan serve`, plan, report; the exit status."""
    if plan_diffusion.is_asked(words):
        return plan_diffusion.serve(words)
    options = parser_of("plan serve").parse_args(words)
    folder = options.export
    # Before the work, so that no one waits for a mistake.
    if folder is not None and options.engine == "tonnage":
        hint = "Use another --engine, or the line that is printed."
        raise RequestError("Tonnage is launched by no files.", hint=hint)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise OutputExists(f"{folder} is a file.", hint="Name a folder for --export.")
    check_cards_named(options)
    page = page_of(options)
    if not options.gpus:
        return _which_cards(options)
    cluster = find_cluster(options.gpus)
    if options.host_memory is not None:
        cluster = cluster.with_host(memory_bytes=parse_gib(options.host_memory))
    shape = find_model(options.model, online=options.online)
    asked = configuration_of(options, shape.max_positions)
    neighbours = _neighbours(options, cluster)
    pp = options.pp or len(asked.stage_layers)
    plan = plan_serving(shape, cluster, reserved(asked, neighbours), model=options.model, tp=options.tp or 0, pp=pp)
    plan = replace(plan, neighbours=tuple(neighbours))
    _publish(plan, options, page)
    if folder is not None:
        _export(plan, folder, options)
    return 0 if plan.fits else 1


def _export(plan: ServingPlan, folder: Path, options: Namespace) -> None:
    """Write the scripts that launch the plan, or say why there are none."""
    from tonnage.planner.export import export_serving

    stream = sys.stderr if options.json == "-" else sys.stdout
    if not plan.fits:
        stream.writelines(f"{line}\n" for line in refusal_lines(folder, plan.shortages))
        return
    for path in export_serving(plan.launch, folder, force=options.force):
        stream.write(f"  wrote {path}\n")


def _neighbours(options: Namespace, cluster: Cluster) -> list[Neighbour]:
    """What else lies on the cards, in the order that it starts: sizes, then models with words of their own."""
    found = [of_size(words, parse_bytes(words), cluster) for words in options.beside if is_size(words)]
    for words in (words for words in options.beside if not is_size(words)):
        try:
            theirs = parser_of("plan serve").parse_args(shlex.split(words))
        except ValueError as error:
            raise RequestError(f"--beside {words!r} makes no sense: {error}.", hint="Close its quotes.") from None
        given = [name for name in ("gpus", "beside", "export", "json", "html") if getattr(theirs, name)]
        if given:
            hint = "It lies on the same cards; give it --context, --users, --weights and the like."
            raise RequestError(f"--{given[0]} has no place within --beside {words!r}.", hint=hint)
        shape = find_model(theirs.model, online=options.online)
        asked = configuration_of(theirs, shape.max_positions)
        found.append(of_model(words, shape, asked, cluster, model=theirs.model, before=found))
    return found


def _which_cards(options: Namespace) -> int:
    """No cards were named: say which hold it."""
    if options.beside or options.host_memory:
        flag = "--beside" if options.beside else "--host-memory"
        raise RequestError(f"{flag} needs --gpus.", hint="Name the cards, like --gpus l40s.")
    from tonnage.planner.holders import serving_holders

    shape = find_model(options.model, online=options.online)
    asked = configuration_of(options, shape.max_positions)
    check(shape, asked)
    holders = serving_holders(shape, asked, tp=options.tp or 0, pp=options.pp or len(asked.stage_layers))
    return publish_holders(shape, holders, options, what=f"serving at {asked.context:,} tokens", most="sequences")


def configuration_of(options: Namespace, max_positions: int) -> ServingConfiguration:
    """The flags as the budget takes them: what was not given is 0 or empty."""
    batched = parse_count(options.batched_tokens) if options.batched_tokens else None
    numbers = {"tp": options.tp, "pp": options.pp, "max-seqs": options.max_seqs, "batched-tokens": batched}
    for name, number in (numbers | {"utilization": options.utilization}).items():
        if number is not None and not number > 0:
            hint = f"Give --{name} more than 0, or leave it out."
            raise RequestError(f"--{name} {number} makes no sense.", hint=hint)
    stages = options.stage_layers
    try:
        stage_layers = tuple(map(int, stages.split(","))) if stages else ()
    except ValueError:
        hint = "Give one number for each stage, like 31,32,32,31."
        raise RequestError(f"--stage-layers {stages} makes no sense.", hint=hint) from None
    usual = min(max_positions or _DEFAULT_CONTEXT, _DEFAULT_CONTEXT)
    names = ("engine", "engine_version", "users", "block", "eager")
    return ServingConfiguration(
        stage_layers=stage_layers,
        context=parse_count(options.context) if options.context else usual,
        shared_prefix=parse_count(options.prompt_shared),
        weights=options.weights or "",
        kv=options.kv or "",
        utilization=options.utilization or 0.0,
        max_seqs=options.max_seqs or 0,
        batched_tokens=batched or 0,
        **{name: getattr(options, name) for name in names},
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


def _publish(plan: ServingPlan, options: Namespace, page: Path | None) -> None:
    if options.json:
        write_json(options.json, serving_figures(plan))
    if page is not None:
        from tonnage.report.html.plan_page import render_serving_page

        write_page(page, render_serving_page(plan), opens=options.open, json_target=options.json)
    elif options.json != "-":
        print_lines(serving_lines(plan, explain=options.explain), sys.stdout)
