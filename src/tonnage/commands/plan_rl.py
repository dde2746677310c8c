"""`tonnage plan rl`: one step of reinforcement learning as a timeline, and the fastest way to run it that fits.

Its words are parsed by argparse, as those of `tonnage plan train` are.
"""

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, get_args

from tonnage.commands.options import Parser, add_page_options, page_of
from tonnage.errors import BadLayout, RequestError

if TYPE_CHECKING:
    from tonnage.budget.rl import Movable, Reference
    from tonnage.models import ModelShape
    from tonnage.planner.request import TrainingRequest
    from tonnage.planner.rl import RlRequest

SUMMARY = "GRPO, PPO and kin: the phases of a step, what each takes, and the fastest way that fits."
_EPILOG = (
    "A flag that is given is fixed; one that is left out is searched, or has its default. Exits 1 where nothing fits."
)
# Completions of a prompt and samples of a step: TRL's `num_generations`, verl's `rollout.n` of 1 where a critic is the baseline.
_GROUP, _SAMPLES = 8, 256
_UNGROUPED = ("ppo", "reinforce++")
_OFFLOADS: "dict[str, Movable]" = {"reference": "frozen", "optimizer": "optimizer", "weights": "weights"}


def command(words: list[str]) -> int:
    """Parse the words after `tonnage plan rl`, plan, report; the exit status."""
    options = _parser().parse_args(words)
    from tonnage.commands.plan_train import cluster_of
    from tonnage.models import find_model
    from tonnage.planner.rl import plan_rl
    from tonnage.report.lines import print_lines
    from tonnage.report.rl import rl_figures, rl_lines

    if not options.gpus:
        raise RequestError("No cards are named.", hint="Add --gpus h200, say, or --gpus 8xh100.")
    page = page_of(options)
    shape, cluster = find_model(options.model, online=options.online), cluster_of(options)
    found = plan_rl(shape, cluster, request_of(options, shape))
    if options.json:
        from tonnage.report.output import write_json

        write_json(options.json, rl_figures(found))
    if page is not None:
        from tonnage.report.html.rl_page import render_rl_page
        from tonnage.report.output import write_page

        write_page(page, render_rl_page(found), opens=options.open, json_target=options.json)
    elif options.json != "-":
        print_lines(rl_lines(found, explain=options.explain), sys.stdout)
    return 0 if found.fits else 1


def _parser() -> ArgumentParser:
    from tonnage.budget import configuration as kinds
    from tonnage.budget.adapters import Base
    from tonnage.budget.rl import Algorithm, Reference

    usage = "tonnage plan rl MODEL --gpus 8xh100 [--completion 4k] [FLAG]..."
    parser = Parser("tonnage plan rl", usage=usage, description=SUMMARY, epilog=_EPILOG)
    add = parser.add_argument
    add("model", metavar="MODEL", help="a preset, a config.json, a folder or a checkpoint")
    add("--gpus", default="", help="cards, like h200, 8xh100, 2x8xh100 or dgx-h100")
    step = parser.add_argument_group("the step")
    add = step.add_argument
    add("--algorithm", choices=get_args(Algorithm), default="grpo")
    add("--prompts", type=int, metavar="N", help="prompts of a step (default: for 256 completions)")
    add("--group", type=int, metavar="N", help="completions of a prompt (default: 8; ppo, reinforce++: 1)")
    add("--prompt", default="512", metavar="TOKENS", help="of a prompt (default: 512)")
    add("--completion", default="2k", metavar="TOKENS", help="of a completion, at most (default: 2k)")
    add("--iterations", type=int, default=1, metavar="N", help="passes over the samples of a step (default: 1)")
    add(
        "--reference",
        choices=get_args(Reference),
        help="for KL (default: none for grpo and dapo, as in TRL; adapters-off with --lora)",
    )
    add("--reward", default="function", metavar="MODEL", help="a reward model (default: function, which takes no GPU)")
    add("--critic", metavar="MODEL", help="with ppo (default: as large as the actor)")
    engine = parser.add_argument_group("the engine")
    add = engine.add_argument
    add("--engine", choices=("vllm", "tonnage"), default="vllm", help="who generates (default: vllm)")
    add("--rollout-gpus", type=int, metavar="N", help="GPUs of its own; 0: it shares those of the trainer")
    add("--overlap", action="store_true", help="with GPUs of its own: generate the next step beside the training")
    add("--utilization", type=float, metavar="SHARE", help="its share of the card: gpu_memory_utilization")
    add("--engine-tp", type=int, metavar="N", help="its tensor parallelism")
    add(
        "--sleep",
        type=int,
        nargs="?",
        const=2,
        choices=(1, 2),
        help="free its memory between rollouts; 1: weights to the host",
    )
    add("--no-sleep", action="store_true", help="keep its memory between rollouts")
    add("--share-weights", action="store_true", help="with --engine tonnage: serve the trainer's own weights")
    add("--own-process", action="store_true", help="in a process of its own, as verl runs it: another CUDA context")
    trainer = parser.add_argument_group("the trainer")
    add = trainer.add_argument
    add("--offload", metavar="WHAT", help="to the host while not in use: reference, optimizer, weights; all; none")
    add("--micro-batch", type=int, metavar="N", help="sequences in one pass of one GPU")
    add("--precision", choices=get_args(kinds.Precision), help="default: bf16-mixed; fp16-mixed on cards without BF16")
    add("--optimizer", choices=get_args(kinds.Optimizer), default="adamw")
    add("--checkpoint", metavar="{none,selective,full,every-K}", help="what is recomputed")
    add("--loss", choices=get_args(kinds.Loss), help="how log-probabilities are taken")
    add(
        "--zero",
        type=int,
        choices=(0, 1, 2, 3),
        help="what data-parallel ranks share (default: all beside other models)",
    )
    add("--framework", choices=("torch", "fsdp2", "deepspeed"), help="who trains")
    add("--lora", type=int, metavar="RANK", help="train adapters of that rank")
    add("--lora-targets", metavar="WHAT", help="attention, mlp, all-linear (default), experts; or q_proj,v_proj, say")
    add("--base", choices=get_args(Base), help="with --lora: the frozen weights (default: 16-bit)")
    add("--qlora", action="store_true", help="--lora 16 --base nf4")
    add("--liger", action="store_true", help="with Liger's kernels, and --loss fused unless another is given")
    add("--host-memory", metavar="SIZE", help="memory of one host, like 64g, for these GPUs")
    add = parser.add_argument
    add("--online", action="store_true", help="look a model up on the hub where it is no preset")
    add("--explain", action="store_true", help="print what is on the card in every phase, term by term")
    add("--json", default="", metavar="FILE", help="write the figures as JSON ('-': standard output)")
    add("--force", action="store_true", help="replace files that are there")
    add_page_options(parser)
    parser.set_defaults(drive=None, beside=[])
    return parser


def request_of(options: Namespace, shape: "ModelShape") -> "RlRequest":
    """The flags as the planner takes them."""
    from tonnage.models import find_model
    from tonnage.planner.rl import RlRequest
    from tonnage.units import parse_count

    training = _training(options)
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


def _training(options: Namespace) -> "TrainingRequest":
    """Of the actor; the planner puts in the length and the number of samples."""
    from tonnage.commands.plan_train import adapters_of
    from tonnage.planner.request import TrainingRequest

    return TrainingRequest(
        seq=1, tp=1, pp=1, cp=1, precision=options.precision or "bf16-mixed", optimizer=options.optimizer,
        **adapters_of(options),
        loss=options.loss or ("fused" if options.liger else None), liger=options.liger,
        micro_batch=options.micro_batch, checkpoint=options.checkpoint, zero=options.zero, framework=options.framework,
    )  # fmt: skip


def _reference(options: Namespace) -> "Reference":
    """As asked; else as TRL has it: where the loss has a KL term, a copy, or the base without its adapters."""
    from tonnage.budget.rl import KEEPS_REFERENCE

    given: Reference | None = options.reference
    if given is not None:
        return given
    if not KEEPS_REFERENCE[options.algorithm]:
        return "none"
    return "adapters-off" if options.lora or options.qlora else "copy"


def _offload(text: str | None) -> "frozenset[Movable] | None":
    if text is None:
        return None
    names = {"none": [], "all": list(_OFFLOADS)}.get(text, [part.strip() for part in text.split(",")])
    unknown = [name for name in names if name not in _OFFLOADS]
    if unknown:
        hint = "Write reference (and the reward model), optimizer, weights, several with commas; all or none."
        raise BadLayout(f"--offload {text}: {unknown[0]!r} cannot be offloaded.", hint=hint)
    return frozenset(_OFFLOADS[name] for name in names)
