"""GRPO on one GPU in one process, with `tonnage serve`'s engine on the trainer's own weights: `python benchmarks/grpo.py`.

A plain loop: the engine generates `--group` completions for each of `--prompts` prompts and sleeps; a function rewards them;
advantages are normalised by group; the actor is trained by the clipped ratio, with KL to a frozen copy or to the base
without its adapters where `--reference` says so. Models have random weights and the shape of a published one, prompts are
random, and every completion is as long as `--completion`, so nothing is downloaded and a plan can be exact.

Each phase's peak of allocated and reserved memory and its seconds are taken after the first step, which allocates the
optimizer's states, and are written to `--out` beside what `tonnage plan rl` predicts of the same words. `--plan` only
predicts. `--tiny --device cpu` tries it out anywhere; `tonnage run --gpu h200 benchmarks/grpo.py ...` on a GPU that is not there.
"""

import argparse
import copy
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from tonnage.budget.rl import Phase
from tonnage.hardware import find_cluster
from tonnage.models import find_model
from tonnage.models.config import from_config
from tonnage.models.presets import preset_config
from tonnage.models.shape import ModelShape
from tonnage.planner.rl.search import RlPlan, RlRequest, plan_rl
from tonnage.planner.training.request import TrainingRequest
from tonnage.serve import Engine, Sampling
from tonnage.serve.config import EngineConfig

TINY = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
BLOCK, BATCHED_TOKENS, MOST_SEQS, LOSS_CHUNKS = 16, 4096, 1024, 8
CLIP, BETA = 0.2, 0.04
MIB = 2**20


@dataclass
class Measured:
    """Peaks and seconds by phase, each the largest or the mean of the steps after the first."""

    device: torch.device
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    counted: bool = False
    counts: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Whatever runs within."""
        cuda = self.device.type == "cuda"
        if cuda:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        began = time.perf_counter()
        yield
        if cuda:
            torch.cuda.synchronize(self.device)
        if not self.counted:
            return
        seconds = time.perf_counter() - began
        row = self.phases.setdefault(name, {"allocated_bytes": 0, "reserved_bytes": 0, "seconds": 0.0})
        count = self.counts[name] = self.counts.get(name, 0) + 1
        row["seconds"] += (seconds - row["seconds"]) / count
        if cuda:
            row["allocated_bytes"] = max(row["allocated_bytes"], torch.cuda.max_memory_allocated(self.device))
            row["reserved_bytes"] = max(row["reserved_bytes"], torch.cuda.max_memory_reserved(self.device))


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Plan, run, compare; what was written."""
    options = _parser().parse_args(words)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    config = TINY if options.tiny else preset_config(options.model)
    shape = from_config(config, "tiny") if options.tiny else find_model(options.model)
    plan = predicted(shape, options)
    found: dict[str, Any] = {"words": vars(options), "planned": planned_figures(plan)}
    if not options.plan:
        loop = Loop(config, options, device, plan)
        for step in range(options.steps + 1):
            loop.measured.counted = step > 0
            reward = loop.step()
            print(f"step {step}  reward {reward:.4f}", file=sys.stderr)
        found |= {"measured": loop.measured.phases, "torch": torch.__version__, "device": str(device)}
        found["gpu"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print("\n".join(comparison(found)))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1, default=str) + "\n")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="qwen3-0.6b", help="a preset")
    add("--tiny", action="store_true", help="a model of 2 layers instead")
    for name, number in (
        ("prompts", 8),
        ("group", 8),
        ("prompt", 128),
        ("completion", 512),
        ("micro-batch", 4),
        ("steps", 2),
    ):
        add(f"--{name}", type=int, default=number)
    add("--reference", choices=("none", "copy", "adapters-off"), default="none")
    add("--lora", type=int, default=0, metavar="RANK")
    add("--checkpoint", choices=("none", "full"), default="none")
    add("--loss", choices=("full", "chunked"), default="full")
    add("--learning-rate", type=float, default=1e-6)
    add("--no-sleep", action="store_true", help="the engine keeps its cache while the actor trains")
    add("--eager", action="store_true", help="no CUDA graphs")
    add("--device", default="")
    add("--card", default="h200", help="the card to plan for")
    add("--plan", action="store_true", help="predict only")
    add("--out", type=Path)
    return parser


# -- the plan


def predicted(shape: ModelShape, options: argparse.Namespace) -> RlPlan:
    """What `tonnage plan rl` says of the same words."""
    training = TrainingRequest(
        seq=1, tp=1, pp=1, cp=1, precision="bf16", micro_batch=options.micro_batch, checkpoint=options.checkpoint,
        loss=options.loss, lora_rank=options.lora, zero=0, framework="torch",
    )  # fmt: skip
    request = RlRequest(
        training=training, prompts=options.prompts, group=options.group, prompt=options.prompt,
        completion=options.completion, reference=options.reference, engine="tonnage", share_weights=True,
        sleep=0 if options.no_sleep else 1, rollout_gpus=0, offload=frozenset(), eager=options.eager,
    )  # fmt: skip
    return plan_rl(shape, find_cluster(options.card), request).best


def planned_figures(plan: RlPlan) -> dict[str, Any]:
    """By phase: what torch would call allocated and reserved, and seconds."""
    return {phase.name: _figures(phase) for phase in plan.phases} | {"blocks": plan.engine.kv.blocks}


def _figures(phase: Phase) -> dict[str, float]:
    reserved = phase.total_bytes - phase.context_bytes
    return {"allocated_bytes": phase.allocated_bytes, "reserved_bytes": reserved, "seconds": phase.seconds}


def comparison(found: dict[str, Any]) -> Iterator[str]:
    """A table: measured, planned, and by how much they differ."""
    sizes = "".join(f"{name:>15}{'planned':>12}{'':>8}" for name in ("allocated MiB", "reserved MiB"))
    yield f"{'phase':<14}{sizes}{'s':>8}{'planned':>9}"
    for name, planned in found["planned"].items():
        if name == "blocks":
            continue
        measured = found.get("measured", {}).get(name, {})
        cells = []
        for key in ("allocated_bytes", "reserved_bytes"):
            was, said = measured.get(key, 0), planned[key]
            off = f"{100 * (said / was - 1):+.1f} %" if was else ""
            cells.append(f"{was / MIB:>15,.0f}{said / MIB:>12,.0f}{off:>8}")
        yield f"{name:<14}{''.join(cells)}{measured.get('seconds', 0.0):>8.2f}{planned['seconds']:>9.2f}"


# -- the loop


class Loop:
    """An actor, its optimizer and an engine on the same weights."""

    def __init__(self, config: dict[str, Any], options: argparse.Namespace, device: torch.device, plan: RlPlan) -> None:
        self.options, self.device, self.measured = options, device, Measured(device)
        self.model = actor(config, options, device)
        self.engine = engine(self.model, options, device, plan)
        if not options.no_sleep:
            self.engine.sleep()
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=options.learning_rate, fused=device.type == "cuda")
        self.reference = frozen_copy(self.model) if options.reference == "copy" else None
        self.vocab = int(config["vocab_size"])
        self.random = random.Random(0)

    def step(self) -> float:
        """One step; the mean reward."""
        options, phase = self.options, self.measured.phase
        with phase("rollout"):
            samples = self.rollout()
        rewards = self.rewards(samples[:, options.prompt :])
        grouped = rewards.view(options.prompts, options.group)
        advantages = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).flatten()
        scores = None
        if options.reference != "none":
            with phase("reference"):
                scores = self.reference_scores(samples)
        with phase("train actor"):
            self.train(samples, advantages.to(self.device), scores)
        return float(rewards.mean())

    def rollout(self) -> Tensor:
        """Prompts with their completions, [prompts × group, prompt + completion]."""
        options = self.options
        prompts = [[self.random.randrange(self.vocab) for _ in range(options.prompt)] for _ in range(options.prompts)]
        if options.lora:
            self.model.merge_adapter()
        self.engine.refresh() if options.no_sleep else self.engine.wake()
        sampling = Sampling(max_tokens=options.completion, n=options.group, temperature=1.0, ignore_eos=True)
        outputs = self.engine.generate(prompts, sampling, progress=False)
        if not options.no_sleep:
            self.engine.sleep()
        if options.lora:
            self.model.unmerge_adapter()
        return torch.tensor([one.prompt_token_ids + one.token_ids for one in outputs], device=self.device)

    def rewards(self, completions: Tensor) -> Tensor:
        """The share of a completion's tokens that are in the lower half of the vocabulary."""
        return (completions.cpu() < self.vocab // 2).float().mean(1)

    def reference_scores(self, samples: Tensor) -> Tensor:
        """Log-probabilities by the frozen copy, or without adapters."""
        model = self.reference or self.model
        aside = self.model.disable_adapter() if self.reference is None else nullcontext()
        with torch.no_grad(), aside:
            return torch.cat([self.log_probs(model, some) for some in samples.split(self.options.micro_batch)])

    def train(self, samples: Tensor, advantages: Tensor, scores: Tensor | None) -> None:
        """One pass over the samples and one step of the optimizer."""
        size = self.options.micro_batch
        count = -(-len(samples) // size)
        for number in range(count):
            some = slice(number * size, (number + 1) * size)
            found = self.log_probs(self.model, samples[some])
            ratio = torch.exp(
                found - found.detach()
            )  # of the weights that generated them: the first pass is the only one
            gain = advantages[some, None]
            loss = -torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
            if scores is not None:
                apart = scores[some] - found
                loss = loss + BETA * (torch.exp(apart) - apart - 1)
            (loss.mean() / count).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def log_probs(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Of the tokens of completions, as predicted by the ones before; logits are made of these alone."""
        base = model.get_base_model() if self.options.lora and hasattr(model, "get_base_model") else model
        first = self.options.prompt
        wanted, places = tokens[:, first:], slice(first - 1, -1)
        if self.options.loss == "full":
            at = torch.arange(first - 1, tokens.shape[1] - 1, device=tokens.device)
            return picked(model(input_ids=tokens, logits_to_keep=at, use_cache=False).logits, wanted)
        hidden = base.model(input_ids=tokens, use_cache=False).last_hidden_state[:, places]
        head = base.lm_head
        parts = zip(hidden.chunk(LOSS_CHUNKS, 1), wanted.chunk(LOSS_CHUNKS, 1), strict=True)
        return torch.cat([checkpoint(_head_log_probs(head), *part, use_reentrant=False) for part in parts], 1)


def picked(logits: Tensor, wanted: Tensor) -> Tensor:
    """Log-probabilities of the wanted tokens: cross-entropy is their negative."""
    return -cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), reduction="none").view(wanted.shape)


def _head_log_probs(head: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda hidden, wanted: picked(head(hidden), wanted)


def actor(config: dict[str, Any], options: argparse.Namespace, device: torch.device) -> nn.Module:
    """Random weights in 16 bits on a GPU, in 32 on the CPU; with adapters where they are asked for."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    made = AutoConfig.for_model(**config)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation="sdpa")
    if options.checkpoint == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    if options.lora:
        from peft import LoraConfig, get_peft_model

        # As precise as the base: PEFT would have them in FP32, and copies of their inputs too.
        adapters = LoraConfig(r=options.lora, target_modules="all-linear")
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    return model


def frozen_copy(model: nn.Module) -> nn.Module:
    """The reference."""
    return copy.deepcopy(model).eval().requires_grad_(False)


def engine(model: nn.Module, options: argparse.Namespace, device: torch.device, plan: RlPlan) -> Engine:
    """With the plan's pool on a GPU, and with as many blocks as all samples need elsewhere."""
    samples = options.prompts * options.group
    counted = samples * -(-(options.prompt + options.completion) // BLOCK) + 2
    settings = EngineConfig(
        blocks=plan.engine.kv.blocks if device.type == "cuda" else counted, block=BLOCK,
        context=options.prompt + options.completion, max_seqs=min(samples, MOST_SEQS),
        batched_tokens=max(BATCHED_TOKENS, samples), eager=options.eager,
    )  # fmt: skip
    return Engine.of_module(model, settings=settings)


if __name__ == "__main__":
    main()
