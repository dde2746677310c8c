"""Plans of diffusion pipelines beside real modules on a virtual GPU: benchmarks/results/diffusion.json.

    PYTHONPATH=src:benchmarks/diffusion python benchmarks/diffusion/judge.py [NAME]...

A case is a `tonnage plan` whose choices are all fixed, and the same run with the modules of diffusers. Their batches, sizes and
ranks are others than those that the planner's data was learnt at (`learn.py`).
"""

import contextlib
import gc
import io
import json
import sys
from pathlib import Path
from typing import Any

from tonnage.hardware import find_gpu
from tonnage.script.lines import NOWHERE
from tonnage.virtual.builds import new_session

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/diffusion.json"
GPU = "h200"
LOOP = "--text-encoders frozen --vae frozen"
ALONE = "--text-encoders cached --vae cached"
# By name: the plan's words.
CASES: dict[str, str] = {
    "sd-1.5 full": f"train sd-1.5 --micro-batch 3 --checkpoint none --resolution 768x512 {ALONE}",
    "sd-1.5 full, recomputed": f"train sd-1.5 --micro-batch 8 --checkpoint full --resolution 640 {ALONE}",
    "sd-1.5 LoRA": f"train sd-1.5 --lora 32 --micro-batch 1 --checkpoint none --resolution 512 {ALONE}",
    "sd-1.5 in the loop": f"train sd-1.5 --lora 8 --micro-batch 6 --checkpoint full --resolution 512 {LOOP}",
    "sd-1.5 images": "serve sd-1.5 --batch 4 --resolution 576 --offload none",
    "sdxl full, recomputed": f"train sdxl --micro-batch 3 --checkpoint full --resolution 1024 {ALONE}",
    "sdxl full": f"train sdxl --micro-batch 1 --checkpoint none --resolution 896x1152 {ALONE}",
    "sdxl LoRA": f"train sdxl --lora 16 --micro-batch 1 --checkpoint none --resolution 1024 {ALONE}",
    "sdxl LoRA, recomputed": f"train sdxl --lora 64 --micro-batch 3 --checkpoint full --resolution 768 {ALONE}",
    "sdxl images": "serve sdxl --batch 3 --resolution 1024 --offload none",
    "sdxl part by part": "serve sdxl --batch 1 --resolution 1280x768 --offload model",
    "sdxl in tiles": "serve sdxl --batch 1 --resolution 2048 --offload model --vae-tiling",
    "sd3 LoRA": f"train sd3-medium --lora 16 --micro-batch 1 --checkpoint none --resolution 1024 {ALONE}",
    "sd3 LoRA, recomputed": f"train sd3-medium --lora 16 --micro-batch 4 --checkpoint full --resolution 768 {ALONE}",
    "sd3 images": "serve sd3-medium --batch 1 --resolution 1024 --offload none",
    "flux LoRA": f"train flux-dev --lora 16 --micro-batch 1 --checkpoint none --resolution 512 {ALONE}",
    "flux LoRA, recomputed": f"train flux-dev --lora 16 --micro-batch 1 --checkpoint full --resolution 1024 {ALONE}",
    "flux images": "serve flux-dev --batch 1 --resolution 1024 --offload none",
    "flux part by part": "serve flux-dev --batch 2 --resolution 1536x1024 --offload model",
    "wan 1.3b LoRA, recomputed": f"train wan-2.1-1.3b --lora 32 --micro-batch 1 --checkpoint full --frames 49 {ALONE}",
    "wan 1.3b full, recomputed": f"train wan-2.1-1.3b --micro-batch 1 --checkpoint full --frames 33 {ALONE}",
    "wan 1.3b video": "serve wan-2.1-1.3b --frames 81 --resolution 480x832 --offload model",
    "wan 14b video": "serve wan-2.1-14b --frames 49 --resolution 480x832 --offload none",
}


def planned(words: str) -> dict[str, Any]:
    """The plan's figures."""
    from tonnage.commands import plan_serve, plan_train

    command = {"train": plan_train.command, "serve": plan_serve.command}[words.split()[0]]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        command([*words.split()[1:], "--gpus", GPU, "--json", "-"])
    return json.loads(out.getvalue())


def seen(words: str) -> tuple[int, int]:
    """Bytes that the virtual GPU says the same allocates and reserves at its peak."""
    import torch
    from case import run

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    allocated = run(words)
    gc.collect()
    return allocated, torch.cuda.max_memory_reserved()


def judge(name: str, words: str) -> dict[str, Any]:
    """One row of the results."""
    import diffusers
    import torch

    best, (allocated, reserved) = planned(words)["best"], seen(words)
    return {
        "case": name, "plan": words, "planned_bytes": best["peak_allocated_bytes"], "virtual_bytes": allocated,
        "off": round(best["peak_allocated_bytes"] / allocated - 1, 4), "virtual_reserved_bytes": reserved,
        "torch": torch.__version__, "diffusers": diffusers.__version__,
    }  # fmt: skip


def main(names: list[str]) -> None:
    session = new_session(find_gpu(GPU))
    session.open()
    session.device.attribution.place = lambda *_: NOWHERE  # nobody asks for lines of source
    for name in names or list(CASES):
        row = judge(name, CASES[name])
        ours, theirs, reserved = (
            row[key] / 2**30 for key in ("planned_bytes", "virtual_bytes", "virtual_reserved_bytes")
        )
        print(
            f"{name:28} planned {ours:7.2f}  virtual {theirs:7.2f}  {row['off']:+.1%}  reserved {reserved:.2f}",
            flush=True,
        )
        rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        rows = sorted([*(r for r in rows if r["case"] != name), row], key=lambda r: list(CASES).index(r["case"]))
        RESULTS.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main(sys.argv[1:])
