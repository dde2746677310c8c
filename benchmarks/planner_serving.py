"""Hold predicted KV caches against start-ups of vLLM that people published.

    .venv/bin/python benchmarks/planner_serving.py [--markdown] [FILE]

A row is predicted where it names a model whose shape is known, a card (or its memory) and a version, or says what stands
in for one. What a row says is used (utilisation, memory, tokens, sequences); what it does not say is vLLM's default.
Nothing that vLLM measured in the run (weights, peak, graphs) is used.
"""

import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tonnage.budget.serving.memory import ServingBudget, ServingConfiguration, serving_budget
from tonnage.errors import RequestError
from tonnage.hardware import Gpu, find_gpu
from tonnage.models import ModelShape, find_model, from_config
from tonnage.units import GIB

TRUTH = Path(__file__).parent / "truth"
MODELS = json.loads((TRUTH / "serving-models.json").read_text("utf-8"))
LIMIT = 0.10
# Rows without a version say in their notes what it was, or carry a flag.
STATED = {
    "~v0.6.4": "0.6.4",
    "before v0.6.5": "0.6.4",
    "v0.9.2": "0.9.2",
    "latest of 2026-08": "0.27.1",
    "early 2024": "0.4",
}
CARDS = {
    "NVIDIA H100 80GB": "h100", "NVIDIA H200": "h200", "NVIDIA B200": "b200", "AMD MI300X": "mi300x", "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s", "NVIDIA RTX 3090 24GB": "rtx-3090", "NVIDIA RTX PRO 6000": "rtx-pro-6000",
    "NVIDIA A100-SXM4-80GB": "a100-80", "NVIDIA A100 (GCE a2-highgpu-1g)": "a100-40",
    "NVIDIA H100 80GB HBM3": "h100", "NVIDIA L40S 48GB": "l40s", "NVIDIA L40S (46068 MiB)": "l40s",
    "NVIDIA L4 (23034 MiB)": "l4", "NVIDIA RTX 2000 Ada 16GB": "rtx-2000-ada",
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """A row beside its prediction, or why there is none."""

    number: int
    row: Mapping[str, Any]
    budget: ServingBudget | None
    reason: str = ""

    @property
    def predicted_gib(self) -> float:
        return self.budget.kv.available_bytes / GIB if self.budget else 0.0

    @property
    def reported_tokens(self) -> int:
        blocks = self.row.get("gpu_blocks") or 0
        return self.row.get("kv_cache_tokens") or blocks * (self.row.get("block_size") or 16)

    @property
    def concurrency_error(self) -> float | None:
        """Of "Maximum concurrency", where it was logged."""
        reported = self.row.get("max_concurrency")
        if self.budget is None or not reported:
            return None
        return self.budget.kv.max_concurrency(self.budget.configuration.context) / reported - 1

    @property
    def error(self) -> float | None:
        """Of the tokens, or of the bytes where no tokens were logged."""
        if self.budget is None:
            return None
        if self.reported_tokens:
            return self.budget.kv.tokens / self.reported_tokens - 1
        reported = self.row.get("available_kv_gib")
        return self.predicted_gib / reported - 1 if reported else None


def outcomes(path: Path = TRUTH / "published-serving.jsonl") -> Iterator[Outcome]:
    """Every row of the file."""
    for number, line in enumerate(path.read_text("utf-8").splitlines()):
        row = {key: value for key, value in json.loads(line).items() if value is not None}
        try:
            yield Outcome(number, row, serving_budget(_shape(row), _configuration(row), _card(row)))
        except (RequestError, LookupError) as error:
            yield Outcome(number, row, None, str(error).split("\n")[0])


def _shape(row: Mapping[str, Any]) -> ModelShape:
    name = row["model"]
    if name in MODELS["configs"]:
        return from_config(MODELS["configs"][name], name)
    return find_model(MODELS["same_as"].get(name) or MODELS["text_part_of"].get(name) or name)


def _card(row: Mapping[str, Any]) -> Gpu:
    if "gpu" not in row and "gpu_total_gib_logged" not in row:
        raise LookupError("no card")
    total = row.get("gpu_total_gib_logged")
    card = find_gpu(CARDS[row["gpu"]]) if "gpu" in row else _by_memory(total)
    return replace(card, memory_bytes=round(total * GIB)) if total else card


def _by_memory(total_gib: float) -> Gpu:
    """Rows without a name: 79 GiB is an H100 or an A100-80, 22 GiB an A10 or an L4."""
    return find_gpu("h100" if total_gib > 70 else "l4")


def _configuration(row: Mapping[str, Any]) -> ServingConfiguration:
    pp = row.get("pipeline_parallel_size", 1)
    shape = _shape(row)
    return ServingConfiguration(
        engine_version=_version(row),
        tp=row.get("tensor_parallel_size") or row["num_gpus"] // pp,
        pp=pp,
        context=row.get("max_model_len") or shape.max_positions or 4096,
        weights=_weights(row),
        kv="fp8" if row.get("kv_cache_dtype") == "fp8" else "",
        utilization=row.get("gpu_memory_utilization") or row.get("util_default_by_version") or 0,
        max_seqs=row.get("max_num_seqs", 0),
        batched_tokens=row.get("max_num_batched_tokens", 0),
        eager=bool(row.get("enforce_eager")),
    )


def _version(row: Mapping[str, Any]) -> str:
    flags = row.get("flags", [])
    stated = row.get("vllm_version") or next((v for k, v in STATED.items() if k in row.get("notes", "")), "")
    if "V0" in flags and (not stated or stated.startswith("0.8")):
        return "0.7.3"
    if not stated:
        raise LookupError("no version")
    return stated


def _weights(row: Mapping[str, Any]) -> str:
    quantized = str(row.get("quantization", ""))
    if any(word in quantized for word in ("awq", "gptq", "bitsandbytes")):
        return "int4"
    if "w8a8" in row["model"]:
        return "int8"
    if quantized or "-FP8" in row["model"]:
        return "fp8"
    return {"float32": "fp32", "float16": "fp16"}.get(row.get("dtype", ""), "bf16")


def _line(outcome: Outcome, markdown: bool) -> str:
    row, budget = outcome.row, outcome.budget
    assert budget is not None
    reported = row.get("available_kv_gib")
    size = f"{reported:.2f}" if reported else "–"
    tokens = f"{outcome.reported_tokens:,}" if outcome.reported_tokens else "–"
    error = f"{outcome.error:+.1%}" if outcome.error is not None else "–"
    cells = [
        str(outcome.number), row["model"].split("/")[-1][:30], CARDS.get(row.get("gpu", ""), "?"),
        f"{budget.configuration.tp}×{budget.configuration.pp}", budget.configuration.engine_version[:8],
        size, f"{outcome.predicted_gib:.2f}", tokens, f"{budget.kv.tokens:,}", error,
    ]  # fmt: skip
    if markdown:
        return "| " + " | ".join(cells) + " |"
    widths = (3, -30, -9, -4, -8, 7, 7, 10, 10, 7)
    return " ".join(f"{c:>{w}}" if w > 0 else f"{c:<{-w}}" for c, w in zip(cells, widths, strict=True))


def main(words: list[str]) -> int:
    """Print the table; 1 where the median misses the bar."""
    markdown = "--markdown" in words
    paths = [Path(word) for word in words if not word.startswith("--")]
    found = list(outcomes(*paths))
    judged = [outcome for outcome in found if outcome.error is not None]
    if markdown:
        print(
            "| row | model | card | TP×PP | vLLM | GiB logged | GiB predicted | tokens logged | tokens predicted | error |"
        )
        print("|" + "---|" * 10)
    for outcome in judged:
        print(_line(outcome, markdown))
    errors = sorted(abs(outcome.error or 0) for outcome in judged)
    within = sum(error <= LIMIT for error in errors)
    median = statistics.median(errors)
    print(f"\n{len(judged)} of {len(found)} rows predicted; median error {median:.1%}, {within} within {LIMIT:.0%}")
    logged = [abs(outcome.concurrency_error) for outcome in found if outcome.concurrency_error is not None]
    print(f"maximum concurrency: median error {statistics.median(logged):.1%} over {len(logged)} rows that log it")
    for outcome in found:
        if outcome.error is None:
            print(
                f"not predicted: row {outcome.number} {outcome.row['model']}: {outcome.reason or 'nothing to compare'}"
            )
    return int(median > LIMIT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
