"""Hold `plan train` for vision-language models against steps of the real models on the virtual GPU.

    python benchmarks/vision_language.py [NAME]...

Each case is a model of transformers with random weights, medium-sized, some of whose parts are frozen. The peaks are kept in
benchmarks/results/vision-language.json, to which tests/planner/training/test_vision_language.py holds the planner.
"""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tonnage.budget.training.configuration import Configuration
from tonnage.budget.training.memory import TrainingBudget, training_budget
from tonnage.hardware import find_gpu
from tonnage.models.config import from_config
from tonnage.models.freezing import freeze
from tonnage.models.pictures import with_pictures
from tonnage.models.shape import ModelShape

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "vision-language.json"
_TEXT = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llava": {
        "model_type": "llava",
        "image_token_id": 32000,
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
            "num_attention_heads": 16, "image_size": 336, "patch_size": 14,
        },
        "text_config": {"model_type": "llama", **_TEXT, "num_key_value_heads": 16, "vocab_size": 32064},
    },
    "qwen2.5-vl": {
        "model_type": "qwen2_5_vl",
        "image_token_id": 151655,
        "vision_config": {
            "depth": 16, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
            "spatial_merge_size": 2, "out_hidden_size": 2048, "fullatt_block_indexes": [7, 15], "window_size": 112,
        },
        "text_config": {
            **_TEXT, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": False,
            "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24]},
        },
        "tie_word_embeddings": False,
    },
    "paligemma": {
        "model_type": "paligemma",
        "image_token_id": 1500,
        "projection_dim": 2048,
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
            "num_attention_heads": 16, "image_size": 448, "patch_size": 14, "vision_use_head": False,
        },
        "text_config": {
            "model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 12,
            "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 32000,
        },
    },
    "internvl": {
        "model_type": "internvl",
        "image_token_id": 151667,
        "vision_config": {
            "model_type": "internvl_vision", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
            "num_attention_heads": 16, "image_size": [448, 448], "patch_size": [14, 14],
        },
        "text_config": {"model_type": "qwen2", **_TEXT, "num_key_value_heads": 8, "vocab_size": 151674},
    },
    "llama": {"model_type": "llama", **_TEXT, "num_key_value_heads": 16, "vocab_size": 32064},
    "vit": {
        "model_type": "vit", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "image_size": 224, "patch_size": 16, "num_labels": 1000,
    },
}  # fmt: skip
# Model, what --freeze says, precision, checkpoint, batch, sequence, images, their size, rank of adapters.
CASES: dict[str, tuple[str, str, str, str, int, int, int, int, int]] = {
    "llava, all trained, bf16": ("llava", "", "bf16", "none", 2, 2048, 2, 336, 0),
    "llava, tower frozen, bf16-mixed": ("llava", "vision", "bf16-mixed", "none", 2, 2048, 2, 336, 0),
    "llava, tower frozen, fp32": ("llava", "vision", "fp32", "none", 2, 1024, 1, 336, 0),
    "llava, projector only, bf16": ("llava", "vision,language", "bf16", "none", 4, 2048, 1, 336, 0),
    "llava, projector only, bf16-mixed": ("llava", "vision,language", "bf16-mixed", "full", 4, 2048, 1, 336, 0),
    "llava, adapters, bf16-mixed": ("llava", "vision", "bf16-mixed", "none", 2, 2048, 1, 336, 16),
    "qwen2.5-vl, all trained, bf16": ("qwen2.5-vl", "", "bf16", "none", 1, 2048, 2, 784, 0),
    "qwen2.5-vl, tower frozen, bf16": ("qwen2.5-vl", "vision", "bf16", "none", 2, 2048, 2, 784, 0),
    "qwen2.5-vl, tower frozen, recomputed": ("qwen2.5-vl", "vision", "bf16-mixed", "full", 2, 2048, 2, 784, 0),
    "paligemma, tower frozen, bf16": ("paligemma", "vision", "bf16", "none", 2, 1536, 1, 448, 0),
    "paligemma, all trained, bf16-mixed": ("paligemma", "", "bf16-mixed", "none", 2, 1536, 1, 448, 0),
    "paligemma, projector only, bf16-mixed": ("paligemma", "vision,language", "bf16-mixed", "none", 4, 1536, 1, 448, 0),
    "internvl, tower frozen, bf16": ("internvl", "vision", "bf16", "none", 2, 2048, 2, 448, 0),
    "llama, last four layers, bf16-mixed": ("llama", "all-but-last-4", "bf16-mixed", "none", 4, 2048, 0, 0, 0),
    "llama, last four layers, bf16": ("llama", "all-but-last-4", "bf16", "none", 4, 2048, 0, 0, 0),
    "vit, all trained, bf16-mixed": ("vit", "", "bf16-mixed", "none", 64, 197, 1, 224, 0),
    "internvl, all trained, bf16-mixed": ("internvl", "", "bf16-mixed", "full", 2, 2048, 4, 448, 0),
}


def pictured(config: dict[str, Any], flags: dict[str, Any]) -> tuple[ModelShape, int]:
    """The model with its images, and their tokens in a sequence; a model of one part has none."""
    shape = from_config(config)
    return with_pictures(shape, flags["images"], str(flags["image_size"])) if len(shape.stacks) > 1 else (shape, 0)


def planned(config: dict[str, Any], flags: dict[str, Any]) -> TrainingBudget:
    """What the planner says of a case."""
    shape, _ = pictured(config, flags)
    shape = freeze(shape, flags["freeze"]) if flags["freeze"] else shape
    configuration = Configuration(
        precision=flags["precision"], checkpoint=flags["checkpoint"], optimizer_kernel="fused", seq=flags["seq"],
        micro_batch=flags["batch"], lora_rank=flags["lora"],
    )  # fmt: skip
    return training_budget(shape, configuration, find_gpu("h200"))


def main() -> None:
    wanted = sys.argv[1:]
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cases": {}}
    for name, values in CASES.items():
        if wanted and not any(word in name for word in wanted):
            continue
        keys = ("freeze", "precision", "checkpoint", "batch", "seq", "images", "image_size", "lora")
        flags = dict(zip(keys, values[1:], strict=True))
        config = MODELS[values[0]]
        _, tokens = pictured(config, flags)
        case = {
            **flags,
            "config": config,
            "frozen": [part for part in flags["freeze"].split(",") if part],
            "image_tokens": tokens,
        }
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run.json"
            step = [str(HERE / "vision_language_step.py"), json.dumps(case)]
            command = [sys.executable, "-m", "tonnage", "run", "--gpu", "h200", "--json", str(out), *step]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            if not out.exists() or ran.returncode:
                print(name, "failed:", ran.stdout[-2500:], ran.stderr[-2500:])
                continue
            run = json.loads(out.read_text())
        peak, reserved = run["peak_allocated_bytes"], run["peak_reserved_bytes"]
        plan = planned(config, flags)
        off = float(plan.peak_allocated_bytes) / peak - 1
        print(f"{name:42} {peak / 2**30:7.2f} GiB  planned {off:+.1%}")
        row = {"flags": flags, "model": values[0], "peak_allocated_bytes": peak, "peak_reserved_bytes": reserved}
        kept["cases"][name] = row
    kept["models"] = MODELS
    kept["versions"] = {name: version(name) for name in ("torch", "transformers", "peft")}
    kept["gpu"] = "h200, virtual"
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
