"""A server to launch, and a parser with vLLM's own flags, kept as data."""

import json
from argparse import ArgumentParser, BooleanOptionalAction
from pathlib import Path
from typing import Any

from tonnage.planner.export import ServingLaunch

KNOWN = json.loads((Path(__file__).parent / "planner" / "export" / "data" / "vllm-0.32.0.json").read_text())
FLAGS = KNOWN["flags"] | KNOWN["server"]
SERVED = ServingLaunch(
    model="llama-3.1-70b", tp=4, context=32768, users=0, max_seqs=64, batched_tokens=8192, weights="bf16", kv="bf16",
    utilization=0.9,
)  # fmt: skip


def parser() -> ArgumentParser:
    """With vLLM's flags and what each takes."""
    made = ArgumentParser(allow_abbrev=False, exit_on_error=False)
    made.add_argument("model")
    # A switch's negation comes with it.
    for name, kind in FLAGS.items():
        if not name.startswith("--") or (kind == "switch" and name.startswith("--no-")):
            continue
        choices = kind if isinstance(kind, list) else None
        taken: dict[str, Any] = {"choices": choices, "type": {"int": int, "float": float}.get(str(kind), str)}
        made.add_argument(name, **({"action": BooleanOptionalAction} if kind == "switch" else taken))
    return made
