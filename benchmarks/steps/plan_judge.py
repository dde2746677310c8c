"""Hold `tonnage plan train`'s step times against measured ones: `python benchmarks/steps/plan_judge.py [--parts]`.

Every training of `trainings.py` that a model's configuration describes is planned as it was run, beside what an H200 took for it.
No figure is fitted to the times of the judged half; which kernels they launch was looked up, as for the others. After them
come the steps of `truth/steptime.json`, and published speeds of other clusters.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from published_training import NotSaid, rows_of, run_of
from trainings import LLAMAS, TRAININGS, Training

from tonnage.budget.time.step import step_time
from tonnage.budget.training.configuration import Configuration
from tonnage.hardware import find_cluster
from tonnage.models import ModelShape, find_model, from_config

RESULTS = Path(__file__).parents[1] / "results" / "steps-h200.json"
TRUTH = Path(__file__).parents[1] / "truth"
MODELS = {"llama-1b": "llama-3.2-1b", "llama-3b": "llama-3.2-3b", "llama-8b": "llama-3.1-8b"}
PRECISIONS = {"fp32": "fp32", "tf32": "tf32", "amp": "bf16-mixed", "amp-fp16": "fp16-mixed", "bf16": "bf16"}
OPTIMIZERS = {
    "sgd": ("momentum", "foreach"),
    "adamw-fused": ("adamw", "fused"),
    "adamw-foreach": ("adamw", "foreach"),
    "adamw-loop": ("adamw", "loop"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", action="store_true", help="show the milliseconds of each part")
    parser.add_argument("--judged", action="store_true", help="show the rows that are only judged by, too")
    parser.add_argument("--truth", type=Path, default=TRUTH, help="the folder of measurements")
    options = parser.parse_args()
    judge_trainings(options.parts, options.judged)
    judge_phases(json.loads((options.truth / "steptime.json").read_text("utf-8")))
    judge_published(options.truth / "published-training.jsonl")


def judge_trainings(parts: bool, judged: bool) -> None:
    errors: dict[str, list[float]] = {"known": [], "judged": []}
    for name, row in json.loads(RESULTS.read_text("utf-8"))["trainings"].items():
        training = TRAININGS[name]
        shape = planned_shape(training)
        if shape is None or "failed" in row:
            continue
        time = step_time(shape, planned_configuration(training), find_cluster("h200"))
        error = float(time.total_s) / row["step_s"] - 1
        errors["judged" if row["judged"] else "known"].append(error)
        mark = "judged" if row["judged"] else ""
        if row["judged"] and not judged:
            continue
        print(
            f"{name:40}{float(time.total_s) * 1e3:9.1f}{row['step_s'] * 1e3:9.1f}{error:+8.1%}  {mark:8}",
            words(time.parts) if parts else "",
        )
    for half, found in errors.items():
        say(half, found)
    say("all", errors["known"] + errors["judged"])


def judge_phases(rows: list[dict[str, Any]]) -> None:
    found = []
    for row in rows:
        time = step_time(shape_of(row), configuration_of(row), find_cluster("h200"))
        found.append(float(time.total_s) * 1e3 / sum(row["ms"].values()) - 1)
        print(
            f"{row['size']:12}{row['precision']:5}{row['batch']:3}×{row['seq']:<6}{found[-1]:+8.1%}  {words(time.parts)}  ",
            f"measured {row['ms']}",
        )
    say("steptime.json", found)


def shape_of(row: dict[str, Any]) -> ModelShape:
    """The preset that the row trained."""
    shape = find_model(MODELS.get(row["size"], row["size"]))
    assert shape.parameters == row["params"], row["size"]
    return shape


def configuration_of(row: dict[str, Any]) -> Configuration:
    """How the row was trained."""
    return Configuration(
        precision="bf16-mixed" if row["precision"] == "amp" else "bf16",
        optimizer_kernel="fused",
        checkpoint="full" if row["checkpoint"] else "none",
        seq=row["seq"],
        micro_batch=row["batch"],
    )


def judge_published(path: Path) -> None:
    ratios: dict[str, list[float]] = {}
    alike: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for row in rows_of(path):
        if not row.get("tokens_per_s_per_gpu"):
            continue
        try:
            run = run_of(row)
        except NotSaid:
            continue
        findings = run.plan()
        plan, gpus = findings.closest, findings.cluster.gpus
        ratio = plan.tokens_per_s / gpus / row["tokens_per_s_per_gpu"]
        ratios.setdefault(row["family"] + (", adapters" if run.adapters else ""), []).append(ratio)
        same = row["family"], findings.shape.parameters, gpus, findings.cluster.gpu.key, plan.configuration.seq
        alike.setdefault(same, []).append((plan.tokens_per_s / gpus, row["tokens_per_s_per_gpu"]))
        print(f"{ratio:7.2f}  {row['id']:24}{words(plan.parts_s)}")
    every = [ratio for family, each in ratios.items() for ratio in each if not family.endswith("adapters")]
    for family, found in [*ratios.items(), ("all but adapters", every)]:
        near = np.mean([abs(ratio - 1) < 0.2 for ratio in found])
        print(
            f"{family:20} {len(found):3} runs, predicted over reported {median(found):.2f} in the median, {near:.0%} within 20 %"
        )

    judge_order(pair for runs in alike.values() for pair in combinations(runs, 2))


def judge_order(pairs: Iterable[tuple[tuple[float, float], tuple[float, float]]]) -> None:
    """Of two runs of one model on the same GPUs, how often the one that is predicted to be faster was."""
    gains = [(one[0] / other[0], one[1] / other[1]) for one, other in pairs]
    errors = [abs(np.log(predicted / reported)) for predicted, reported in gains]
    print(f"{len(gains)} pairs of layouts: their ratio is off by {np.exp(median(errors)) - 1:.0%} in the median")
    edges = (0, 0.02, 0.05, 0.10, 0.15, 0.25, np.inf)
    for low, high in pairwise(edges):
        right = [(p > 1) == (r > 1) for p, r in gains if low <= max(p, 1 / p) - 1 < high]
        if right:
            print(f"  predicted gains of {low:.0%} to {high:.0%}: {sum(right)} of {len(right)} came out so")


def say(name: str, errors: list[float]) -> None:
    sizes = np.abs(errors)
    print(
        f"{name:14} {len(errors):3} steps: median {np.median(sizes):.1%}, 95th percentile {np.quantile(sizes, 0.95):.1%}"
    )


def words(parts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {float(value) * 1e3:.1f}" for name, value in parts.items() if float(value))


def planned_configuration(training: Training) -> Configuration:
    optimizer, kernel = OPTIMIZERS[training.optimizer]
    adapters = training.settings.get("adapters", 0)
    return Configuration(
        # PEFT keeps adapters in FP32, whatever the base is in.
        precision="bf16-mixed" if adapters else PRECISIONS[training.precision],  # type: ignore[arg-type]
        optimizer=optimizer,  # type: ignore[arg-type]
        optimizer_kernel=kernel,  # type: ignore[arg-type]
        checkpoint="full" if training.checkpointed else "none",
        attention="eager" if training.settings.get("attention") == "eager" else "flash",
        compile=training.compiled,
        lora_rank=adapters,
        seq=training.settings.get("length", 197),
        micro_batch=training.settings.get("batch", 128),
        accumulate=training.accumulate,
    )


def planned_shape(training: Training) -> ModelShape | None:
    """The model's shape by its configuration; None where it has none."""
    settings = training.settings
    make = dict(_configs()).get(training.build.__name__)
    if make is None:
        return None
    shape = from_config(make(settings), training.build.__name__)
    if training.build.__name__ == "t5":  # its labels are shorter
        encoder, decoder = shape.stacks
        return replace(shape, stacks=(encoder, replace(decoder, tokens=128)))
    return shape


def _configs() -> Iterator[tuple[str, Any]]:
    yield "gpt2", lambda s: {
        "model_type": "gpt2", "n_embd": s.get("width", 768), "n_layer": s.get("layers", 12), "n_head": s.get("heads", 12),
        "vocab_size": 50257,
    }  # fmt: skip
    yield (
        "llama",
        lambda s: (
            {"model_type": "llama"}
            | dict(
                zip(
                    (
                        "hidden_size",
                        "intermediate_size",
                        "num_hidden_layers",
                        "num_attention_heads",
                        "num_key_value_heads",
                        "vocab_size",
                    ),
                    LLAMAS[s.get("size", "1b")],
                    strict=True,
                )
            )
        ),
    )
    yield "qwen3", lambda s: {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    }  # fmt: skip
    yield "mixtral", lambda s: {
        "model_type": "mixtral", "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 16, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2,
        "vocab_size": 32000,
    }  # fmt: skip
    for kind in ("bert", "vit"):
        yield kind, lambda s, kind=kind: {
            "model_type": kind, "hidden_size": s.get("width", 768), "num_hidden_layers": s.get("layers", 12),
            "num_attention_heads": s.get("heads", 12), "intermediate_size": 4 * s.get("width", 768), "vocab_size": 30522,
        }  # fmt: skip
    yield "t5", lambda s: {
        "model_type": "t5", "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": 32128,
    }  # fmt: skip


if __name__ == "__main__":
    main()
