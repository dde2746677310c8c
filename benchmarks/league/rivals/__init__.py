"""Other predictors, asked about the same script: torch's MemTracker, `accelerate estimate-memory` and DeepSpeed's estimators.

A source whose rows are runs of a script gives them all by `rivals=of_script(command)`, where `command(row)` is the script and its
words. One run of the script in a fork answers for all of them.
"""

import ast
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Optional
from zlib import crc32

import running
from rows import NOT_ASKED, Prediction, Row

from rivals.tracked import track

Command = Callable[[Row], tuple[Path, Sequence[str]]]
ZERO = Path(__file__).parents[3] / ".venv" / "engines" / "deepspeed" / "runtime" / "zero"
ACCELERATE = Path(find_spec("accelerate").origin).parent  # type: ignore[union-attr, arg-type]
PATIENCE_S = 1800.0  # MemTracker copies its statistics at every operator
NO_MODEL = "the script calls no module with parameters"


def of_script(command: Command, one_in: int = 1) -> dict[str, Callable[[Row], Prediction]]:
    """The rivals of a source, by name. MemTracker is several times slower than Tonnage: of many rows ask it about one in N."""
    kept: dict[str, Any] = {}

    def seen(row: Row) -> Mapping[str, Any]:
        """What was seen of the script of the row that was asked for last."""
        if crc32(row.name.encode()) % one_in:
            return {"refused": NOT_ASKED}
        if row.name not in kept:
            kept.clear()
            script, words = command(row)
            kept[row.name] = _seen(script, list(words), row.card, row.torch or None)
        return kept[row.name]

    ways = {"MemTracker": memtracker, "accelerate": accelerate, "DeepSpeed ZeRO-2": zero_2, "DeepSpeed ZeRO-3": zero_3}
    return {name: partial(lambda way, row: way(seen(row)), way) for name, way in ways.items()}


def _seen(*run: Any) -> Mapping[str, Any]:
    """What a run of the script shows. Where it fails under MemTracker, a run without it tells what the model is."""
    found: Any = running.in_fork(_track_quietly, *run, True, timeout_s=PATIENCE_S)
    found = {"refused": found} if isinstance(found, str) else found
    if not found.get("refused"):
        return found
    alone: Any = running.in_fork(_track_quietly, *run, False, timeout_s=PATIENCE_S)
    failed = isinstance(alone, str) or alone.get("refused")
    return {"refused": found["refused"]} if failed else alone | {"refused": found["refused"]}


def memtracker(seen: Mapping[str, Any]) -> Prediction:
    """The peak of all tensors of the card that MemTracker knew of."""
    if seen.get("refused") or not seen.get("peak"):
        return Prediction(refused=seen.get("refused") or "no tensor on the card")
    return Prediction(seen["peak"])


def accelerate(seen: Mapping[str, Any]) -> Prediction:
    """What `accelerate estimate-memory` prints in the row of the script's precision: "Training using Adam", or the total size."""
    if "float32_bytes" not in seen:
        return Prediction(refused=seen.get("refused") or NO_MODEL)
    if not seen["optimizer"]:
        return Prediction(seen["float32_bytes"] // (2 if seen["precision"] == "float16" else 1))
    if "Adam" not in seen["optimizer"]:
        return Prediction(refused=f"estimates Adam, not {seen['optimizer']}")
    estimate = _function(ACCELERATE / "commands" / "estimate.py", "estimate_training_usage")
    return Prediction(max(estimate(seen["float32_bytes"], seen["precision"]).values()))


def zero_2(seen: Mapping[str, Any]) -> Prediction:
    """What DeepSpeed says of the states of the model on one GPU, without offloading."""
    refused = _not_adam(seen)
    if refused:
        return Prediction(refused=refused)
    estimate = _function(ZERO / "stage_1_and_2.py", "estimate_zero2_model_states_mem_needs")
    return Prediction(estimate(seen["parameters"], cpu_offload=False)[1])


def zero_3(seen: Mapping[str, Any]) -> Prediction:
    """The same of stage 3."""
    refused = _not_adam(seen)
    if refused:
        return Prediction(refused=refused)
    estimate = _function(ZERO / "stage3.py", "estimate_zero3_model_states_mem_needs")
    return Prediction(
        estimate(seen["parameters"], seen["largest_layer"], cpu_offload=False, cpu_offload_params=False)[1]
    )


def _not_adam(seen: Mapping[str, Any]) -> str:
    if "parameters" not in seen:
        return seen.get("refused") or NO_MODEL
    if not seen["optimizer"]:
        return "estimates training, and nothing is trained"
    return "" if "Adam" in seen["optimizer"] else f"estimates Adam, not {seen['optimizer']}"


@cache
def _function(file: Path, name: str) -> Any:
    """A function of theirs that is arithmetic alone, without its module: what those import changes libraries in later forks."""
    parsed = ast.parse(file.read_text())
    found = next(node for node in parsed.body if isinstance(node, ast.FunctionDef) and node.name == name)
    names: dict[str, Any] = {"Optional": Optional}
    exec(compile(ast.Module([found], []), str(file), "exec"), names)
    return names[name]


def _track_quietly(script: Path, words: list[str], gpu: str, torch_version: str | None, tracks: bool) -> dict[str, Any]:
    logging.disable()
    return track(script, words, gpu, torch_version, tracks)
