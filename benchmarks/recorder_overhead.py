"""What recording costs a training step, beside PyTorch's own recording alone. Needs a GPU.

    python benchmarks/recorder_overhead.py --out benchmarks/results/recorder-overhead-h200.json

Each way runs in turns with plain steps in one process, so that clocks and temperature are the same; the ratio is of medians.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def trained_step(torch: Any, layers: int, width: int, batch: int) -> Callable[[], None]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64)
    model = GPT2LMHeadModel(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, 50257, (batch, 1024), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(torch: Any, step: Callable[[], None], count: int) -> list[float]:
    found = []
    for _ in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return found


def ways(torch: Any) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Each begins to record and returns what ends it."""
    from tonnage.recorder import Recorder

    def pytorch() -> Callable[[], Any]:
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=1_000_000)
        return lambda: torch.cuda.memory._record_memory_history(None)

    def ours(**options: Any) -> Callable[[], Any]:
        recorder = Recorder(**options)
        recorder.start()

        def end() -> None:
            recorder._unhook()
            recorder.outside.stop()
            torch.cuda.memory._record_memory_history(None)

        return end

    return {
        "nothing": lambda: lambda: None,
        "PyTorch alone": pytorch,
        "recorder": lambda: ours(),
        "always on": lambda: ours(modules=False, most_events=100_000),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    import torch

    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": {}}
    for name, shape in {"gpt2, batch 16": (12, 768, 16), "gpt2-medium, batch 16": (24, 1024, 16)}.items():
        step = trained_step(torch, *shape)
        seconds(torch, step, 5)
        times: dict[str, list[float]] = {}
        for _ in range(options.rounds):
            for way, begin in ways(torch).items():
                end = begin()
                times.setdefault(way, []).extend(seconds(torch, step, 6)[1:])
                end()
        plain = statistics.median(times["nothing"])
        row = {way: round(statistics.median(found) / plain - 1, 4) for way, found in times.items()}
        results["cases"][name] = {"step_ms": round(plain * 1000, 2), "overhead": row}
        print(name, f"{plain * 1000:.1f} ms", {way: f"{share:+.1%}" for way, share in row.items()}, flush=True)
        del step
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
