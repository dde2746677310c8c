"""Steps of other objectives on the virtual GPU: what the planner's memory is held against.

    PYTHONPATH=src:FOLDER_WITH_TRL .venv/bin/python benchmarks/objectives/run.py [--only WORD]

Cases that are in the results already are not run again. `tests/budget/training/test_objectives.py` reads the file.
"""

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "objectives.json"
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")
CASES = """
trl dpo llama --batch 4 --seq 1024
trl dpo llama --batch 4 --seq 512 --precision fp32
trl dpo llama --batch 4 --seq 1024 --precision bf16 --checkpoint full
trl dpo qwen3 --batch 4 --seq 1024 --checkpoint full
trl dpo qwen3 --batch 4 --seq 1024 --lora 16
trl dpo llama --batch 8 --seq 1024 --lora 16 --precision bf16 --checkpoint full
trl dpo llama --batch 4 --seq 1024 --precomputed
trl ipo qwen3 --batch 2 --seq 1024 --precision bf16
trl kto llama --batch 8 --seq 1024
trl kto qwen3 --batch 8 --seq 1024 --precision bf16 --checkpoint full
trl kto llama --batch 8 --seq 1024 --lora 16
trl orpo llama --batch 4 --seq 1024
trl orpo qwen3 --batch 4 --seq 1024 --precision bf16 --checkpoint full
trl cpo qwen3 --batch 4 --seq 1024
trl simpo llama --batch 4 --seq 1024 --precision bf16
trl simpo qwen3 --batch 4 --seq 1024 --checkpoint full
trl reward llama --batch 4 --seq 1024
trl reward qwen3 --batch 8 --seq 1024 --precision bf16 --checkpoint full
trl reward llama --batch 8 --seq 1024 --lora 16
plain distill qwen3 --teacher teacher --batch 4 --seq 1024
plain distill qwen3 --teacher teacher --batch 4 --seq 1024 --precision bf16 --checkpoint full
plain distill qwen3 --teacher teacher --batch 2 --seq 1024 --precision fp32
plain distill qwen3 --teacher teacher --batch 4 --seq 1024 --lora 16
plain contrastive bert --batch 64 --seq 256
plain contrastive bert --batch 64 --seq 512 --precision fp32
plain contrastive bert --batch 256 --seq 256 --precision bf16 --checkpoint full
plain contrastive bert --batch 16 --seq 256 --negatives 7
plain contrastive bert --batch 512 --seq 256 --grad-cache 32
plain contrastive qwen3 --batch 32 --seq 256 --precision bf16
plain classify bert --batch 64 --seq 256
plain classify llama --batch 8 --seq 1024 --precision bf16
"""


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases with this word in them")
    options = parser.parse_args()
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"gpu": "h200", "cases": {}}
    known["versions"] = {name: importlib.metadata.version(name) for name in PACKAGES}
    for case in filter(None, CASES.splitlines()):
        if case in known["cases"] or options.only not in case:
            continue
        figures = measured(case.split())
        print(case, figures, flush=True)
        if figures:
            known["cases"][case] = figures
            RESULTS.write_text(json.dumps(known, indent=1) + "\n")


def measured(words: list[str]) -> dict[str, object] | None:
    """What one case would take of an H200; nothing where it fails."""
    script, objective, *rest = words
    files = {name: str(HERE / f"{name}.json") for name in ("llama", "qwen3", "bert", "teacher")}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [
            "-m",
            "tonnage",
            "run",
            "--gpu",
            "h200",
            "--json",
            str(out),
            str(HERE / f"{script}_step.py"),
            objective,
        ]
        done = subprocess.run(
            [sys.executable, *command, *(files.get(word, word) for word in rest)], capture_output=True
        )
        figures = json.loads(out.read_text()) if out.exists() else {"outcome": "none"}
    if figures["outcome"] != "ok":
        print(done.stderr.decode()[-1000:], figures.get("error"))
        return None
    kept = ("peak_allocated_bytes", "peak_reserved_bytes", "step_time_s", "phases")
    return {name: figures[name] for name in kept} | {"line": figures["peak"]["line"]}


if __name__ == "__main__":
    main()
