"""Predicted against measured memory of the host, for ways of loading models of 1 to 6 GB.

    python benchmarks/host_memory.py [--small | --large] [--only WAY ...] [--model NAME] [--card] [--output FILE]

Each way of `host_memory_ways.py` is run twice: plainly, with its pages read from /proc every few milliseconds (and the system's
own high-water mark), and by `tonnage run` on a virtual GPU, which counts tensors by their storages and mapped files by what
copies read. Checkpoints are random weights, made in a temporary folder and removed after. `--small` takes models of 50 MB,
`--large` some of 5.7 GB.
"""

import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

WAYS = Path(__file__).with_name("host_memory_ways.py")
RESULTS = Path(__file__).parent / "results" / "host-memory.json"
# Layers and width of a Llama; weights in files.
MODELS = {
    "0.6b-bfloat16": (10, 2048, "bfloat16"),
    "1.2b-bfloat16": (22, 2048, "bfloat16"),
    "0.3b-float32": (6, 1536, "float32"),
    "2.9b-bfloat16": (24, 3072, "bfloat16"),
    "1.4b-float32": (26, 2048, "float32"),
}
CASES = {
    "load_state_dict": "0.3b-float32",
    "load_state_dict_kept": "0.3b-float32",
    "mapped_and_assigned": "0.3b-float32",
    "optimizer_state": "0.3b-float32",
    "from_pretrained_bin": "0.3b-float32",
    "from_pretrained_wider": "0.6b-bfloat16",
    "from_pretrained_device_map": "0.6b-bfloat16",
    "load_file": "0.6b-bfloat16",
    "built_and_halved": "0.6b-bfloat16",
    "quantized": "0.6b-bfloat16",
    "averaged": "0.3b-float32",
    "from_pretrained": "1.2b-bfloat16",
    "load_file_assigned": "1.2b-bfloat16",
    "workers": "0.3b-float32",
}
# `--large`: models of 5.7 GB, in ways that stay below 13 GiB.
LARGE = {
    "from_pretrained": "2.9b-bfloat16",
    "load_file_assigned": "2.9b-bfloat16",
    "from_pretrained_device_map": "2.9b-bfloat16",
    "mapped_and_assigned": "1.4b-float32",
    "from_pretrained_bin": "1.4b-float32",
    "load_state_dict": "1.4b-float32",
}
# These need a card to be measured (`--card`).
ON_A_CARD = {
    "context": "0.3b-float32",
    "libraries": "0.3b-float32",
    "pinned": "0.3b-float32",
    "checkpoint_to_card": "0.3b-float32",
    "to_card": "1.2b-bfloat16",
    "device_map_card": "1.2b-bfloat16",
}
_MAKE = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
folder, layers, width, dtype, kind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), getattr(torch, sys.argv[4]), sys.argv[5]
config = LlamaConfig(hidden_size=width, intermediate_size=8 * width // 3 // 64 * 64, num_hidden_layers=layers, dtype=dtype,
                     num_attention_heads=width // 64, num_key_value_heads=width // 64, vocab_size=32000)
torch.set_default_dtype(dtype)
with torch.device("meta"):
    model = LlamaForCausalLM(config)
model.to_empty(device="cpu")
noise = torch.randn(1 << 20)
for p in model.parameters():  # random numbers again and again: the making need not take minutes
    p.data.view(-1).copy_(noise.repeat(p.numel() // len(noise) + 1)[: p.numel()])
if kind == "bin":
    config.save_pretrained(folder)
    torch.save(model.state_dict(), f"{folder}/pytorch_model.bin")
if sys.argv[6:]:
    states = {i: {"step": torch.tensor(1.0), "exp_avg": p.detach(), "exp_avg_sq": p.detach().clone()}
              for i, p in enumerate(model.parameters())}
    groups = torch.optim.AdamW(model.parameters()).state_dict()["param_groups"]
    torch.save({"model": model.state_dict(), "optimizer": {"state": states, "param_groups": groups}}, f"{folder}/training.pt")
if kind == "safetensors":
    model.save_pretrained(folder, max_shard_size="1GB")
"""


def measure(words: list[str]) -> dict[str, int]:
    """Run a plain Python to its end: the most that it and its children had in memory, by kind of page."""
    process = subprocess.Popen([sys.executable, *words], stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": ""})
    peaks = dict.fromkeys(("anonymous", "file", "resident"), 0)
    while process.poll() is None:
        if pages := _pages(process.pid):
            for kind, size in pages.items():
                peaks[kind] = max(peaks[kind], size)
        time.sleep(0.004)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} failed")
    return {f"{kind}_bytes": size for kind, size in peaks.items()}


def _pages(process: int) -> dict[str, int] | None:
    try:
        rows = Path(f"/proc/{process}/status").read_text().splitlines()
        found = {row.split(":")[0]: int(row.split()[1]) << 10 for row in rows if row.startswith(("Rss", "VmHWM"))}
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        private = sum(_private(child) for child in children)
    except (OSError, IndexError, ValueError):
        return None
    if "RssAnon" not in found:
        return None
    anonymous = found["RssAnon"] + private
    total = anonymous + found["RssFile"] + found["RssShmem"]
    return {"anonymous": anonymous, "file": found["RssFile"], "resident": max(total, found["VmHWM"])}


def _private(process: str) -> int:
    try:
        rows = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(row.split()[1]) << 10 for row in rows if row.startswith("Private_Dirty"))


def predict(words: list[str]) -> dict[str, Any]:
    """What `tonnage run` says of the same script."""
    start = "from tonnage.commands.main import main; main()"
    tonnage = [sys.executable, "-c", start, "run", "--gpu", "h200", "--json", "-"]
    began = time.perf_counter()
    run = subprocess.run([*tonnage, *words], capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(run.stderr[-2000:])
    host = json.loads(run.stdout)["host"]
    libraries = host["peak"]["parts"].get("libraries", 0)
    return {
        "anonymous_bytes": host["needed_bytes"] - libraries - host["peak"]["parts"].get("shared_memory", 0),
        "file_bytes": host["mapped_peak_bytes"] + libraries,
        "seconds": round(time.perf_counter() - began, 1),
        "resident_bytes": host["resident_peak_bytes"],
        "line": host["peak"]["line"],
        "parts": host["peak"]["parts"],
    }


def make(folder: Path, name: str, *, small: bool, states: bool) -> None:
    """The checkpoint of one model."""
    layers, width, dtype = MODELS[name]
    if small:
        layers, width = 2, 512
    make_model(folder, layers, width, dtype, states=states)


def make_model(folder: Path, layers: int, width: int, dtype: str, *, states: bool = False) -> None:
    """A random Llama: pickled where it is in float32, else as safetensors; `states`: an optimizer's, too."""
    folder.mkdir()
    kind = "bin" if dtype == "float32" else "safetensors"
    words = [str(folder), str(layers), str(width), dtype, kind, *["states"] * states]
    subprocess.run([sys.executable, "-c", _MAKE, *words], check=True, stderr=subprocess.DEVNULL)


def compare(way: str, folder: Path) -> dict[str, Any]:
    """One way, measured and predicted."""
    words = [str(WAYS), way, str(folder)]
    measured, predicted = measure(words), predict(words)
    kinds = ("anonymous_bytes", "file_bytes", "resident_bytes")
    errors = {kind.removesuffix("_bytes"): round(predicted[kind] / measured[kind] - 1, 4) for kind in kinds}
    return {"measured": measured, "predicted": predicted, "error": errors}


def _write(output: Path, rows: dict[str, Any]) -> None:
    """What is known so far."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    versions = {name: version(name) for name in ("torch", "transformers", "accelerate", "safetensors")}
    described = {"commit": commit.strip(), "machine": os.uname().machine, "versions": versions, "ways": rows}
    output.write_text(json.dumps(described, indent=1) + "\n")


def main() -> None:
    """All ways, model by model, so that one checkpoint is on the disk at a time."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--large", action="store_true", help="models of 5 to 6 GB, in some of the ways")
    parser.add_argument("--only", nargs="*", choices=list(CASES | ON_A_CARD))
    parser.add_argument("--model", choices=list(MODELS), help="this one for all ways, instead of each way's own")
    parser.add_argument("--card", action="store_true", help="there is a card: measure those ways, too, that need one")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    cases = LARGE if options.large else CASES | ON_A_CARD if options.card else CASES
    chosen = {way: options.model or model for way, model in cases.items() if not options.only or way in options.only}
    for model in MODELS:
        ways = [way for way in chosen if chosen[way] == model]
        if not ways:
            continue
        with TemporaryDirectory() as folder:
            make(Path(folder) / model, model, small=options.small, states="optimizer_state" in ways)
            for way in ways:
                rows[way] = {"model": model} | compare(way, Path(folder) / model)
                _write(options.output, rows)
                sizes = {kind: round(size / 2**30, 2) for kind, size in rows[way]["measured"].items()}
                print(way, model, sizes, rows[way].get("error", ""), flush=True)


if __name__ == "__main__":
    main()
