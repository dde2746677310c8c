"""`tonnage plan rl`: one step of reinforcement learning as a timeline, and the fastest way to run it that fits."""

import sys
from argparse import Namespace

from tonnage.budget.rl import KEEPS_REFERENCE, Movable, Reference
from tonnage.commands.options import page_of, parser_of
from tonnage.commands.plan_train import adapters_of, cluster_of
from tonnage.errors import BadLayout, RequestError
from tonnage.models import ModelShape, find_model
from tonnage.planner.rl.search import RlRequest, plan_rl
from tonnage.planner.training.request import TrainingRequest
from tonnage.report.lines import print_lines
from tonnage.report.output import write_json, write_page
from tonnage.report.plans.rl import rl_figures, rl_lines
from tonnage.units import parse_count

# Completions of a prompt and samples of a step: TRL's `num_generations`, verl's `rollout.n` of 1 where a critic is the baseline.
_GROUP, _SAMPLES = 8, 256
_UNGROUPED = ("ppo", "reinforce++")
_OFFLOADS: dict[str, Movable] = {"reference": "frozen", "optimizer": "optimizer", "weights": "weights"}


def command(words: list[str]) -> int:
    """Parse the words after `tonnage plan rl`, plan, report; the exit status."""
    options = parser_of("plan rl").parse_args(words)
    if not options.gpus:
        raise RequestError("No cards are named.", hint="Add --gpus h200, say, or --gpus 8xh100.")
    page = page_of(options)
    shape, cluster = find_model(options.model, online=options.online), cluster_of(options)
    found = plan_rl(shape, cluster, _request(options, shape))
    if options.json:
        write_json(options.json, rl_figures(found))
    if page is not None:
        from tonnage.report.html.plan_page import render_rl_page

        write_page(page, render_rl_page(found), opens=options.open, json_target=options.json)
    elif options.json != "-":
        print_lines(rl_lines(found, explain=options.explain), sys.stdout)
    return 0 if found.fits else 1


def _request(options: Namespace, shape: ModelShape) -> RlRequest:
    """The flags as the planner takes them."""
    # Of the actor; the planner puts in the length and the number of samples.
    training = TrainingRequest(
        seq=1, tp=1, pp=1, cp=1, precision=options.precision or "bf16-mixed", optimizer=options.optimizer,
        **adapters_of(options),
        loss=options.loss or ("fused" if options.liger else None), liger=options.liger,
        micro_batch=options.micro_batch, checkpoint=options.checkpoint, zero=options.zero, framework=options.framework,
    )  # fmt: skip
    group = options.group if options.group is not None else 1 if options.algorithm in _UNGROUPED else _GROUP
    critic = shape if options.algorithm == "ppo" else None
    if options.critic:
        critic = find_model(options.critic, online=options.online)
    if options.sleep and options.no_sleep:
        raise BadLayout("--sleep and --no-sleep exclude each other.", hint="Leave one of them out.")
    own = options.engine == "tonnage" and options.sleep == 2
    return RlRequest(
        training=training, algorithm=options.algorithm, group=group,
        prompts=options.prompts if options.prompts is not None else max(1, _SAMPLES // max(group, 1)),
        prompt=parse_count(options.prompt), completion=parse_count(options.completion), iterations=options.iterations,
        reference=_reference(options), critic=critic, engine=options.engine, engine_tp=options.engine_tp,
        reward=None if options.reward == "function" else find_model(options.reward, online=options.online),
        utilization=options.utilization, rollout_gpus=options.rollout_gpus,
        sleep=0 if options.no_sleep else 1 if own else options.sleep, offload=_offload(options.offload),
        share_weights=options.share_weights, own_process=options.own_process, overlap=options.overlap,
    )  # fmt: skip


def _reference(options: Namespace) -> Reference:
    """As asked; else as TRL has it: where the loss has a KL term, a copy, or the base without its adapters."""
    given: Reference | None = options.reference
    if given is not None:
        return given
    if not KEEPS_REFERENCE[options.algorithm]:
        return "none"
    return "adapters-off" if options.lora or options.qlora else "copy"


def _offload(text: str | None) -> frozenset[Movable] | None:
    if text is None:
        return None
    names = {"none": [], "all": list(_OFFLOADS)}.get(text, [part.strip() for part in text.split(",")])
    unknown = [name for name in names if name not in _OFFLOADS]
    if unknown:
        hint = "Write reference (and the reward model), optimizer, weights, several with commas; all or none."
        raise BadLayout(f"--offload {text}: {unknown[0]!r} cannot be offloaded.", hint=hint)
    return frozenset(_OFFLOADS[name] for name in names)
