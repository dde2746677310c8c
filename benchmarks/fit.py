"""What `tonnage.fit` does on one GPU, against what people set by hand: `python benchmarks/fit.py ladder reduction …`.

Each part prints a table and writes benchmarks/results/fit-PART.json with card, versions and commit. On a machine without a
GPU, `--virtual h200` predicts the same tables: no rivals, no speed, the peaks that the virtual GPU counts.
"""

import argparse
import contextlib
import functools
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import tonnage
from tonnage.fit.fitted import Fitted
from tonnage.fit.modules import find_blocks
from tonnage.fit.stepping.step import take_step
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.technique import make
from tonnage.fit.training import Training

Rival = Callable[[Any, dict[str, Tensor], int], dict[str, Any]]
GIB = 2**30
RESULTS = Path(__file__).parent / "results"
LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0,
}  # fmt: skip
LLAMA_1B = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True, "rope_theta": 500000.0,
}  # fmt: skip
LLAMA_15B = {
    "vocab_size": 32000, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48,
    "num_attention_heads": 40, "num_key_value_heads": 40,
}  # fmt: skip
DENSE_32B = {
    "vocab_size": 152064, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
    "num_attention_heads": 40, "num_key_value_heads": 8,
}  # fmt: skip
BATCH, LENGTH = 8, 4096
BUDGETS_GIB = (130, 100, 80, 60, 40, 24)


def build(shape: dict[str, Any], dtype: torch.dtype, *, attention: str = "sdpa", length: int = LENGTH) -> nn.Module:
    """A Llama of this shape on the GPU with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**shape, max_position_embeddings=max(8192, length), use_cache=False)
    config._attn_implementation = attention
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            return LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(torch.float32)


def tokens(shape: dict[str, Any], rows: int, length: int = LENGTH) -> dict[str, Tensor]:
    ids = torch.randint(0, shape["vocab_size"], (rows, length), device="cuda")
    return {"input_ids": ids, "labels": ids}


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, **options)


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f}]", *words, flush=True)


STARTED = time.perf_counter()


def measure(step: Callable[[], Tensor], token_count: int, *, steps: int = 2, warm: int = 1) -> dict[str, Any]:
    """Tokens a second and peaks over some steps, after the first."""
    for _ in range(warm):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    losses = [step().detach() for _ in range(steps)]
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / steps
    return {
        "tokens_per_s": token_count / seconds,
        "step_s": seconds,
        "allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "losses": [round(float(loss), 4) for loss in losses],
    }


@contextlib.contextmanager
def clean() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def of_fit(fitted: Fitted) -> dict[str, Any]:
    measured = fitted.measured
    return {
        "predicted_gib": fitted.plan.peak_bytes / GIB,
        "predicted_step_s": fitted.plan.step_s,
        "rehearsed_allocated_gib": measured.peak_allocated_bytes / GIB if measured else None,
        "rehearsed_reserved_gib": measured.peak_reserved_bytes / GIB if measured else None,
        "host_gib": fitted.plan.host_bytes / GIB,
        "techniques": [technique.name for technique in fitted.techniques],
        "account": str(fitted),
    }


# ladder


def ladder(virtual: bool) -> dict[str, Any]:
    model = build(LLAMA_8B, torch.bfloat16)
    batch = tokens(LLAMA_8B, BATCH)
    results: dict[str, Any] = {"shape": LLAMA_8B, "batch": [BATCH, LENGTH], "fit": {}, "rivals": {}}
    fit_ladder(model, batch, results, virtual)
    if not virtual:
        for name, (run, sizes) in RIVALS.items():
            for rows in sizes:
                key = f"{name}, {rows} row{'s' if rows > 1 else ''}"
                results["rivals"][key] = attempt(lambda run=run, rows=rows: run(model, batch, rows))
                say(key, _short(results["rivals"][key]))
        del model
        gc.collect()
        torch.cuda.empty_cache()
        results["rivals"]["fsdp2 offload, 4 rows"] = attempt(lambda: fsdp2_offload(batch, 4))
        say("fsdp2 offload", _short(results["rivals"]["fsdp2 offload, 4 rows"]))
    show_ladder(results)
    return results


def fit_ladder(model: nn.Module, batch: dict[str, Tensor], results: dict[str, Any], virtual: bool) -> None:
    fitted: Fitted | None = None
    for budget in BUDGETS_GIB:
        try:
            with clean():
                if fitted is None:
                    optimizer = adamw(model, fused=True)
                    fitted = tonnage.fit(
                        model,
                        optimizer,
                        loss=own_loss,
                        sample=batch,
                        budget=f"{budget} GiB",
                        host="100 GiB",
                        verbose=True,
                    )
                else:
                    fitted = fitted.refit(f"{budget} GiB")
                row = of_fit(fitted)
                if not virtual:
                    row |= measure(functools.partial(fitted.step, batch), batch["input_ids"].numel())
                results["fit"][budget] = row
                say(budget, _short(row))
        except Exception as error:
            results["fit"][budget] = {"failed": f"{type(error).__name__}: {error}"}
            say(budget, results["fit"][budget])
            fitted = None
    if fitted is not None:
        print(fitted)
        fitted.undo()


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        result = run()
    except Exception as error:
        result = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    gc.collect()
    torch.cuda.empty_cache()
    return result


def by_hand(model: nn.Module, batch: dict[str, Tensor], rows: int, **options: Any) -> dict[str, Any]:
    """Micro-batches of `rows`, fused AdamW, the model's own loss."""
    optimizer = options.pop("optimizer", None) or adamw(model, fused=True)
    around = options.pop("around", contextlib.nullcontext)
    parts = [{name: part[start : start + rows] for name, part in batch.items()} for start in range(0, BATCH, rows)]

    def step() -> Tensor:
        total = torch.zeros((), device="cuda")
        for part in parts:
            with around():
                loss = own_loss(model, part) / len(parts)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    try:
        return measure(step, batch["input_ids"].numel(), steps=1) | {"micro_batch": rows}
    finally:
        model.zero_grad(set_to_none=True)


def full_checkpointing(model: Any, batch: dict[str, Tensor], rows: int) -> dict[str, Any]:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        return by_hand(model, batch, rows)
    finally:
        model.gradient_checkpointing_disable()


def every_second_block(model: Any, batch: dict[str, Tensor], rows: int) -> dict[str, Any]:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers[1::2]:
        layer.gradient_checkpointing = False
    try:
        return by_hand(model, batch, rows)
    finally:
        model.gradient_checkpointing_disable()


def save_on_cpu(model: nn.Module, batch: dict[str, Tensor], rows: int) -> dict[str, Any]:
    return by_hand(model, batch, rows, around=lambda: torch.autograd.graph.save_on_cpu(pin_memory=True))


def compiled(budget: float) -> Rival:
    """Each block compiled, with this share of activations kept. (The whole model at once compiles for minutes.)"""

    def run(model: Any, batch: dict[str, Tensor], rows: int) -> dict[str, Any]:
        import torch._functorch.config as functorch

        torch._dynamo.reset()
        before, functorch.activation_memory_budget = functorch.activation_memory_budget, budget
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, dynamic=False)
        try:
            return by_hand(model, batch, rows)
        finally:
            functorch.activation_memory_budget = before
            for layer in model.model.layers:
                del layer.forward

    return run


# Each at the micro-batches that a person would try; the fastest that fits a budget is the one to beat there.
RIVALS: dict[str, tuple[Rival, tuple[int, ...]]] = {
    "full checkpointing": (full_checkpointing, (1, 2)),
    "every second block": (every_second_block, (1, 2)),
    "compile, budget 1": (compiled(1.0), (1, 2)),
    "compile, budget 0.5": (compiled(0.5), (1, 2)),
    "compile, budget 0.2": (compiled(0.2), (1, 2)),
    "save_on_cpu": (save_on_cpu, (1,)),
}


def fsdp2_offload(batch: dict[str, Tensor], rows: int) -> dict[str, Any]:
    import os

    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    try:
        model: Any = build(LLAMA_8B, torch.bfloat16)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for module in (*model.model.layers, model):
            fully_shard(module, offload_policy=CPUOffloadPolicy())
        return by_hand(model, batch, rows, optimizer=adamw(model, fused=True))
    finally:
        torch.distributed.destroy_process_group()


def show_ladder(results: dict[str, Any]) -> None:
    print("\nbudget   fit tok/s   peak GiB  predicted   best rival that fits               tok/s   ratio")
    for budget, row in results["fit"].items():
        rivals = {n: r for n, r in results["rivals"].items() if "failed" not in r and r["reserved_gib"] <= budget}
        best = max(rivals, key=lambda name: rivals[name]["tokens_per_s"], default=None)
        if "failed" in row:
            print(f"{budget:>4}     {row['failed'][:70]}")
            continue
        speed, peak = row.get("tokens_per_s", 0.0), row.get("allocated_gib", row["rehearsed_allocated_gib"])
        against = (
            f"{best:<30}{rivals[best]['tokens_per_s']:>10,.0f}{speed / rivals[best]['tokens_per_s']:>8.2f}"
            if best
            else "none"
        )
        row["ratio"] = speed / rivals[best]["tokens_per_s"] if best else None
        print(f"{budget:>4}  {speed:>12,.0f}{peak:>10.2f}{row['predicted_gib']:>10.2f}    {against}")


# reduction


def reduction(virtual: bool) -> dict[str, Any]:
    """The naive script against fit at the same batch."""
    batch = tokens(LLAMA_1B, 2)
    model = build(LLAMA_1B, torch.float32, attention="eager")
    results: dict[str, Any] = {"shape": LLAMA_1B, "batch": [2, LENGTH]}
    with clean():
        results["naive"] = naive_training(model, batch)
    say("naive", _short(results["naive"]))
    with clean():
        budget = int(results["naive"]["reserved_gib"] * GIB / 15.5)
        fitted = tonnage.fit(
            model, adamw(model), loss=own_loss, sample=batch, budget=budget, host="60 GiB", verbose=True
        )
        results["fit"] = of_fit(fitted) | measure(lambda: fitted.step(batch), 2 * LENGTH, steps=4)
        print(fitted)
        fitted.undo()
    results["times_less"] = results["naive"]["reserved_gib"] / results["fit"]["reserved_gib"]
    results["times_faster"] = results["naive"]["step_s"] / results["fit"]["step_s"]
    say(f"{results['times_less']:.1f} x less memory, {results['times_faster']:.2f} x as fast")
    return results


def naive_training(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
    optimizer = adamw(model)

    def step() -> Tensor:
        loss = own_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return measure(step, batch["input_ids"].numel())


# largest model


def largest_exact_model(virtual: bool) -> dict[str, Any]:
    """15 B from FP32 parameters, with exact arithmetic."""
    return one_model(LLAMA_15B, torch.float32, True, virtual)


def largest_model(virtual: bool) -> dict[str, Any]:
    """32 B in BF16; 8-bit states are allowed."""
    return one_model(DENSE_32B, torch.bfloat16, False, virtual)


def one_model(shape: dict[str, Any], dtype: torch.dtype, exact: bool, virtual: bool) -> dict[str, Any]:
    length = 2048
    model, batch = build(shape, dtype), tokens(shape, 1, length)
    count = sum(parameter.numel() for parameter in model.parameters())
    say(f"built {count / 1e9:.1f} B parameters")
    fitted = tonnage.fit(
        model,
        adamw(model, fused=True),
        loss=own_loss,
        sample=batch,
        budget="134 GiB",
        host="100 GiB",
        exact=exact,
        without=("compile", "fp8"),
        verbose=True,
    )
    print(fitted)
    row = {"parameters": count, "shape": shape, "batch": [1, length], "exact": exact} | of_fit(fitted)
    if virtual:
        return row
    losses = [float(fitted.step(batch)) for _ in range(2)]
    row |= measure(lambda: fitted.step(batch), length, steps=3, warm=0)
    return row | {"losses": losses + row["losses"]}


# longest context


def longest_context(virtual: bool) -> dict[str, Any]:
    """One step of 256 K tokens, by a plan that was made on the virtual GPU: benchmarks/fit-context-plan.json."""
    length = 256 * 1024
    plan = Path(__file__).parent / "fit-context-plan.json"
    model, batch = build(LLAMA_8B, torch.bfloat16, length=length), tokens(LLAMA_8B, 1, length)
    if virtual:
        fitted = tonnage.fit(
            model, adamw(model, fused=True), loss=own_loss, sample=batch, budget="130 GiB", host="110 GiB", verbose=True
        )
        print(fitted)
        fitted.save(plan, force=True)
        fitted.undo()
    fitted = tonnage.fit(model, adamw(model, fused=True), loss=own_loss, sample=batch, plan=plan)
    say("plan applied")
    # A first step: the states that stay on the GPU are made at its end, so it peaks below the plan's steps, here and there.
    row = {"length": length} | of_fit(fitted) | measure(lambda: fitted.step(batch), length, steps=1, warm=0)
    say(_short(row))
    return row


# techniques, one at a time

# The 1B shape with its batch of 2 x 4096; those of long sequences with 64 K tokens in one row of four blocks without a head.
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "allocator": ("bf16", {}),
    "fused-attention": ("eager bf16", {}),
    "tiled-attention": ("eager bf16", {}),
    "autocast": ("fp32", {}),
    "master-weights": ("fp32", {}),
    "stochastic-bf16": ("bf16", {}),
    "eight-bit-states": ("fp32", {}),
    "fp8": ("bf16", {}),
    "step-in-backward": ("bf16", {}),
    "weight-streaming": ("bf16", {"blocks": ...}),
    "nvme": ("bf16", {"blocks": ..., "what": "weights", "directory": "/tmp"}),
    "tiled-mlp": ("long", {}),
    "tiled-norm": ("long", {}),
}


def techniques(virtual: bool) -> dict[str, Any]:
    """Each technique alone against the plain model of its kind."""
    results: dict[str, Any] = {"shape": LLAMA_1B, "plain": {}, "alone": {}}
    for kind in dict.fromkeys(kind for kind, _ in ALONE.values()):
        training = plain_training(kind)
        step = functools.partial(take_step, training, training.sample)
        count = training.sample["input_ids"].numel()
        results["plain"][kind] = attempt(lambda step=step, count=count: measure(step, count))
        say(f"plain, {kind}", _short(results["plain"][kind]))
        for name, settings in ((n, s) for n, (k, s) in ALONE.items() if k == kind):
            results["alone"][name] = attempt(lambda n=name, s=settings, t=training: one_technique(n, s, t)) | {
                "of": kind
            }
            say(name, _short(results["alone"][name]))
        del training, step
        gc.collect()
        torch.cuda.empty_cache()
    return results


def plain_training(kind: str) -> Training:
    shape, rows, length = (LLAMA_1B | {"num_hidden_layers": 4}, 1, 65536) if kind == "long" else (LLAMA_1B, 2, LENGTH)
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    model = build(shape, dtype, attention="eager" if "eager" in kind else "sdpa", length=length)
    batch = tokens(shape, rows, length)
    optimizer = adamw(model, fused=True)
    loss = body_loss if kind == "long" else own_loss
    return Training(model, optimizer, loss, batch, torch.device("cuda"), Stepper(optimizer))


def body_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Of the blocks alone: the head would hide them at this length."""
    return model.model(batch["input_ids"]).last_hidden_state.float().square().mean()


def one_technique(name: str, settings: dict[str, Any], training: Training) -> dict[str, Any]:
    blocks = tuple(find_blocks(training.model))
    technique = make(name, {key: blocks if value is ... else value for key, value in settings.items()})
    undo = technique.apply(training)
    try:
        return measure(lambda: take_step(training, training.sample), training.sample["input_ids"].numel())
    finally:
        undo()
        training.model.zero_grad(set_to_none=True)


def _short(row: dict[str, Any]) -> dict[str, Any]:
    kept = (
        "tokens_per_s",
        "step_s",
        "allocated_gib",
        "reserved_gib",
        "predicted_gib",
        "predicted_step_s",
        "losses",
        "failed",
    )
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items() if name in kept}


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "ladder": ladder,
    "reduction": reduction,
    "model-15b": largest_exact_model,
    "model-32b": largest_model,
    "context": longest_context,
    "techniques": techniques,
}


def facts() -> dict[str, Any]:
    import transformers

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS)
    return {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit.stdout.strip() or None,
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=list(PARTS))
    parser.add_argument("--virtual", help="a card to predict for, where there is none")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tonnage.virtual_gpu(arguments.virtual) if arguments.virtual else contextlib.nullcontext():
        for part in arguments.parts:
            result = PARTS[part](bool(arguments.virtual)) | facts()
            name = f"fit-{part}{'-virtual' if arguments.virtual else ''}.json"
            (arguments.out / name).write_text(json.dumps(result, indent=1) + "\n", "utf-8")
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
