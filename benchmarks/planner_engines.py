"""Hold SGLang's pools and llama.cpp's buffers, as they are predicted, against start-ups that people published.

    .venv/bin/python benchmarks/planner_engines.py [--markdown]

Of a row only the model, the cards, the version and the flags are used; and what SGLang found free at its start, where it is
logged: nobody says what else lay on the card. What it measured afterwards (weights, graphs) is compared, not used.
"""

import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tonnage.budget.serving.gguf import GgufRecipe
from tonnage.budget.serving.llama_cpp import llama_budget
from tonnage.budget.serving.memory import ServingConfiguration, serving_budget
from tonnage.hardware import find_gpu
from tonnage.models import find_model
from tonnage.units import GIB, MIB

TRUTH = Path(__file__).parent / "truth"
Figure = tuple[int, str, str, float, float]  # row, model, what, logged, predicted


def rows(name: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The rows of a file, with their numbers."""
    lines = (TRUTH / name).read_text("utf-8").splitlines()
    return ((number, json.loads(line)) for number, line in enumerate(lines))


def sglang_figures() -> Iterator[Figure]:
    """Tokens of the pool, and what was logged beside them."""
    for number, row in rows("published-sglang.jsonl"):
        card, tp = find_gpu(row["gpu"]), row["tp"]
        asked = ServingConfiguration(
            engine="sglang", engine_version=row["engine_version"], tp=tp, weights=row["weights"],
            utilization=row.get("mem_fraction_static", 0.0),
        )  # fmt: skip
        shape = find_model(row["model"])
        budget = serving_budget(shape, asked, card)
        if "free_at_start_gib" in row:
            # What others held of the card, so that as much is free when the model begins to load.
            free = budget.limit_bytes / budget.configuration.utilization
            card = replace(card, memory_bytes=card.memory_bytes + round(row["free_at_start_gib"] * GIB - free))
            share = budget.configuration.utilization
            budget = serving_budget(shape, replace(asked, utilization=share), card)
        if "tokens" in row:
            yield number, row["model"], "tokens", row["tokens"], budget.kv.tokens
        if "kv_bytes" in row:
            yield number, row["model"], "KV GiB", row["kv_bytes"] / GIB, budget.kv.available_bytes / GIB
        if "weights_gib" in row:
            weights = sum(int(t.size_bytes) for t in budget.terms if str(t.category) == "parameters")
            yield number, row["model"], "weights GiB", row["weights_gib"], weights / GIB


def llama_figures() -> Iterator[Figure]:
    """Buffers in MiB, files in GiB."""
    for number, row in rows("published-llamacpp.jsonl"):
        shape, name = find_model(row["model"]), row["model"].split("/")[-1]
        if "file_gib" in row:
            yield number, name, "file GiB", row["file_gib"], GgufRecipe(shape, row["weights"]).file_bytes / GIB
            continue
        asked = ServingConfiguration(
            engine="llama.cpp", engine_version=row["build"], weights=row["weights"], context=row["context"],
            batched_tokens=row.get("ubatch", 0), gpu_layers=row.get("gpu_layers", 999),
            flash_attention=row.get("flash_attention", True),
        )  # fmt: skip
        gpu, gpus = find_gpu("h200"), row.get("gpus", 1)
        budget = llama_budget(shape, asked, gpu, gpus=gpus, host_bytes=1 << 44)
        for what, held in (("card", "weights"), ("kv", "cache"), ("compute", "compute")):
            for card, logged in enumerate(row.get(f"{what}_mib", ())):
                yield number, name, f"{what} MiB", logged, getattr(budget.cards[card], held) / MIB
        for key, predicted in (
            ("host_mib", budget.host.weights),
            ("host_compute_mib", budget.host.compute),
            ("card_sum_mib", sum(card.weights for card in budget.cards)),
            ("kv_sum_mib", sum(card.cache for card in budget.cards)),
            ("card_last_mib", budget.cards[-1].weights),
        ):
            if key in row:
                yield number, name, key.replace("_", " "), row[key], predicted / MIB


def main() -> None:
    """Print both tables."""
    for title, figures in (("SGLang", list(sglang_figures())), ("llama.cpp", list(llama_figures()))):
        print(f"\n{title}\n")
        if "--markdown" in sys.argv:
            print("| row | model | what | logged | predicted | error |\n|---|---|---|---|---|---|")
        for number, model, what, logged, predicted in figures:
            cells = (
                str(number),
                model[:34],
                what,
                f"{logged:,.2f}",
                f"{predicted:,.2f}",
                f"{predicted / logged - 1:+.1%}",
            )
            print(
                f"| {' | '.join(cells)} |" if "--markdown" in sys.argv else "  ".join(f"{cell:<20}" for cell in cells)
            )
        for what in sorted({figure[2] for figure in figures}):
            errors = [abs(predicted / logged - 1) for _, _, each, logged, predicted in figures if each == what]
            print(
                f"{what}: {len(errors)} figures, median error {statistics.median(errors):.1%}, largest {max(errors):.1%}"
            )


if __name__ == "__main__":
    main()
