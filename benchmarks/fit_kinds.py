"""What `tonnage.fit` does with trainings that are not Llamas, against what people set by hand.

`python benchmarks/fit_kinds.py gpt2 vit …` fits each kind at its budgets and, with `--by-hand`, runs every setting that a
person would try: plain, accumulation, checkpointing, compiled blocks, torch's activation budgets, and their combinations.
Results go to benchmarks/results/fit-kinds.json, kind by kind. `--warm` only compiles what `--by-hand` will need, with two
blocks of the model: several kinds can do that at once, and share Inductor's cache.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

import tonnage
from fit import LLAMA_1B, RESULTS, adamw, attempt, facts, measure, of_fit, own_loss, say
from tonnage.fit.modules import find_blocks

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Kind:
    """A training: how to build it with so many blocks, its batch, and the budgets to fit it to."""

    build: Callable[[int], tuple[nn.Module, Batch]]
    blocks: int
    budgets_gib: tuple[float, ...]
    loss: Loss = own_loss
    options: dict[str, Any] = field(default_factory=dict)


def narrow_loss(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return own_loss(model, batch)


def tokens(rows: int, length: int, vocabulary: int) -> Batch:
    ids = torch.randint(2, vocabulary, (rows, length), device="cuda")
    return {"input_ids": ids, "labels": ids}


def images(rows: int) -> Batch:
    return {
        "pixel_values": torch.randn(rows, 3, 224, 224, device="cuda"),
        "labels": torch.randint(0, 1000, (rows,), device="cuda"),
    }


def gpt2(blocks: int) -> tuple[nn.Module, Batch]:
    from transformers import GPT2Config, GPT2LMHeadModel

    without_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(n_embd=1024, n_layer=blocks, n_head=16, use_cache=False, **without_dropout)
    return GPT2LMHeadModel(config), tokens(32, 1024, 50000)


def bert(blocks: int) -> tuple[nn.Module, Batch]:
    from transformers import BertConfig, BertForMaskedLM

    batch = tokens(64, 512, 30000)
    masked = torch.rand(64, 512, device="cuda") < 0.15
    labels = torch.where(masked, batch["labels"], -100)
    return BertForMaskedLM(BertConfig(num_hidden_layers=blocks)), batch | {"labels": labels}


def vit(blocks: int) -> tuple[nn.Module, Batch]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=blocks, num_attention_heads=16, num_labels=1000
    )
    return ViTForImageClassification(config), images(256)


def moe(blocks: int) -> tuple[nn.Module, Batch]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=1024, intermediate_size=2048, num_hidden_layers=blocks, num_attention_heads=16,
        num_key_value_heads=4, num_local_experts=8, vocab_size=32000, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config).to(torch.bfloat16), tokens(16, 1024, 32000)


def llama(blocks: int, rows: int, length: int) -> tuple[nn.Module, Batch]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **LLAMA_1B | {"num_hidden_layers": blocks, "tie_word_embeddings": False, "max_position_embeddings": 65536}
    )
    return LlamaForCausalLM(config).to(torch.bfloat16), tokens(rows, length, 128000)


def long_context(blocks: int) -> tuple[nn.Module, Batch]:
    return llama(blocks, 1, 32768)


def lora(blocks: int) -> tuple[nn.Module, Batch]:
    from peft import LoraConfig, get_peft_model

    model, batch = llama(blocks, 8, 2048)
    return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")), batch


def resnet(blocks: int) -> tuple[nn.Module, Batch]:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=1000)), images(256)


def swin(blocks: int) -> tuple[nn.Module, Batch]:
    from transformers import SwinConfig, SwinForImageClassification

    return SwinForImageClassification(SwinConfig(drop_path_rate=0.0, num_labels=1000)), images(128)


def convnext(blocks: int) -> tuple[nn.Module, Batch]:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(ConvNextConfig(num_labels=1000)), images(128)


def t5(blocks: int) -> tuple[nn.Module, Batch]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=768, d_kv=64, d_ff=3072, num_layers=blocks, num_heads=12, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), tokens(32, 512, 32000) | {"labels": tokens(32, 128, 32000)["labels"]}


KINDS = {
    "gpt2": Kind(gpt2, 24, (40, 16, 9, 5), narrow_loss),
    "vit": Kind(vit, 24, (40, 16, 8, 4), narrow_loss),
    "bert": Kind(bert, 12, (14, 6, 3, 2), narrow_loss, {"dropout": "resampled"}),
    "moe": Kind(moe, 12, (16, 10, 7, 5)),
    "bert-same": Kind(bert, 12, (8,), narrow_loss),
    "lora": Kind(lora, 16, (9,)),
    "long": Kind(long_context, 16, (28,)),
    "resnet": Kind(resnet, 0, (12,), narrow_loss),
    "t5": Kind(t5, 12, (8,), narrow_loss),
    "swin": Kind(swin, 0, (8,), narrow_loss),
    "convnext": Kind(convnext, 0, (8,), narrow_loss),
}


def fits(kind: Kind, budgets: list[float], limit_s: float, *, verbose: bool) -> dict[str, Any]:
    """The training at each budget; Inductor's cache is cold for the first of them alone."""
    found: dict[str, Any] = {}
    for budget in budgets or kind.budgets_gib:
        if time.perf_counter() < limit_s:
            found[f"{budget:g}"] = attempt(lambda budget=budget: fit_to(kind, budget, verbose=verbose))
            say(f"{budget:g} GiB", _short(found[f"{budget:g}"]))
    return found


def fit_to(kind: Kind, budget_gib: float, *, verbose: bool = False) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = kind.build(kind.blocks)
    model = model.to("cuda").train()
    optimizer = adamw(model, fused=True)
    started = time.perf_counter()
    fitted = tonnage.fit(
        model,
        optimizer,
        loss=kind.loss,
        sample=batch,
        budget=f"{budget_gib} GiB",
        host="60 GiB",
        verbose=verbose,
        **kind.options,
    )
    took_s = time.perf_counter() - started
    torch.cuda.empty_cache()
    found = of_fit(fitted) | measure(lambda: fitted.step(batch), rows_of(batch), steps=4, warm=2)
    print(fitted)
    settings = {"micro_batches": fitted.training.micro_batches, "left_out": fitted.left_out, "proof": str(fitted.proof)}
    return found | settings | {"fit_s": round(took_s, 1)}


def rows_of(batch: Batch) -> int:
    return len(next(iter(batch.values())))


@dataclass(frozen=True)
class Setting:
    """What a person sets: parts of a batch, checkpointing, compiled blocks and the share of activations that they keep."""

    parts: int
    checkpointed: bool = False
    compiled: bool = False
    share: float = 1.0

    def __str__(self) -> str:
        words = [f"{self.parts} parts"] if self.parts > 1 else []
        words += ["checkpointed"] if self.checkpointed else []
        words += ["compiled"] if self.compiled else []
        words += [f"activation budget {self.share}"] if self.share < 1 else []
        return ", ".join(words) or "plain"


def settings(rows: int, *, shares: bool) -> Iterator[Setting]:
    """Those with most memory first. `shares`: with torch's own activation budgets too."""
    for parts in (parts for parts in (1, 2, 4, 8, 16) if parts <= rows):
        for compiled, checkpointed in product((False, True), repeat=2):
            if parts <= 8 or not checkpointed:
                yield Setting(parts, checkpointed, compiled)
        if parts <= 4 and shares:
            yield from (Setting(parts, compiled=True, share=share) for share in (0.5, 0.25))


def by_hand(kind: Kind, limit_s: float, *, warm: bool, shares: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model, batch = kind.build(2 if warm else kind.blocks)
    model = model.to("cuda").train()
    found: dict[str, Any] = {}
    for setting in settings(rows_of(batch), shares=shares):
        if time.perf_counter() < limit_s and (setting.compiled or not warm):
            found[str(setting)] = attempt(lambda setting=setting: run(kind, model, batch, setting, warm=warm))
            say(setting, _short(found[str(setting)]))
    return found


def run(kind: Kind, model: Any, batch: Batch, setting: Setting, *, warm: bool) -> dict[str, Any]:
    import torch._functorch.config as functorch

    torch._dynamo.reset()
    functorch.activation_memory_budget = setting.share
    blocks = find_blocks(model).values() if setting.compiled else []
    for block in blocks:
        block.compile(dynamic=False)
    if setting.checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer, rows = adamw(model, fused=True), rows_of(batch) // setting.parts
    parts = [
        {name: value[start : start + rows] for name, value in batch.items()} for start in range(0, rows_of(batch), rows)
    ]

    def step() -> Tensor:
        for part in parts[: 1 if warm else None]:
            loss = kind.loss(model, part) / setting.parts
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    try:
        return measure(step, rows_of(batch), steps=1 if warm else 4, warm=0 if warm else 2)
    finally:
        model.zero_grad(set_to_none=True)
        for block in blocks:
            block._compiled_call_impl = None
        if setting.checkpointed:
            model.gradient_checkpointing_disable()
        functorch.activation_memory_budget = 1.0


def compare(result: dict[str, Any]) -> None:
    """Show each budget's fit beside the fastest setting that reserves no more."""
    for budget, row in result["fits"].items():
        fitting = {
            name: peer
            for name, peer in result.get("by_hand", {}).items()
            if peer.get("reserved_gib", float("inf")) <= float(budget)
        }
        best = min(fitting, key=lambda name: fitting[name]["step_s"], default=None)
        row["best_by_hand"] = best
        if best and "step_s" in row:
            row["ratio"] = round(fitting[best]["step_s"] / row["step_s"], 3)
        beside = f"{best} {fitting[best]['step_s']:.4f} s, {row.get('ratio', '')} x" if best else "none by hand"
        say(f"{budget:>5} GiB", _short(row), "|", beside)


def _short(row: dict[str, Any]) -> dict[str, Any]:
    shown = ("step_s", "predicted_step_s", "allocated_gib", "reserved_gib", "predicted_gib", "fit_s", "failed")
    return {name: round(row[name], 4) if isinstance(row[name], float) else row[name] for name in shown if name in row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="+", choices=KINDS)
    parser.add_argument("--budget", type=float, action="append", default=[], help="in GiB, instead of the kind's own")
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument("--without-fits", action="store_true")
    parser.add_argument("--without-shares", action="store_true", help="no activation budgets among what is set by hand")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which nothing new is begun")
    parser.add_argument("--out", type=Path, default=RESULTS / "fit-kinds.json")
    arguments = parser.parse_args()
    limit_s = time.perf_counter() + arguments.limit
    for name in arguments.kinds:
        say(name)
        known = json.loads(arguments.out.read_text("utf-8")) if arguments.out.exists() else {}
        result = known.get(name, {"fits": {}}) | facts()
        if not arguments.warm and not arguments.without_fits:
            result["fits"] |= fits(KINDS[name], arguments.budget, limit_s, verbose=arguments.verbose)
        if arguments.by_hand or arguments.warm:
            result["by_hand"] = by_hand(KINDS[name], limit_s, warm=arguments.warm, shares=not arguments.without_shares)
        if not arguments.warm:
            compare(result)
            arguments.out.write_text(json.dumps(known | {name: result}, indent=1) + "\n", "utf-8")
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
