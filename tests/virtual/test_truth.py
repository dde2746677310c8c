"""A spread of the measured cases, run as a person would run them, within bounds. `make slow` runs more, `make truth` all.

The library versions are those of the measurements (constraints.txt); the cases run two at a time.
"""

import json
import os
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from virtual_runs import run_tonnage

TRUTH = Path(__file__).parents[2] / "benchmarks" / "truth"

QUICK = """
mlp_train.py --dropout 0.1 --norm
mlp_train.py --width 8192 --depth 24 --batch 32768 --fraction 0.2
nano_gpt.py
nano_gpt.py --flash --every 1 --seq 4096
nano_gpt.py --flash --offload
nano_gpt.py --flash --leak --layers 6
lm_train.py --size gpt2 --batch 8 --seq 1024 --precision amp-fp16 --clip 1.0
lm_train.py --size mixtral-small --batch 4 --seq 1024 --precision bf16
encoder_train.py --arch t5 --task seq2seq --batch 16 --seq 256
hf_trainer.py --bf16 --accumulate 4 --optim adamw_torch_fused
lora_train.py --checkpoint --seq 2048
vision_train.py --model tv:resnet50 --batch 64
unet_diffusion.py
generate.py --cache none --batch 2 --prompt 256 --new 16
recurrent.py
gan.py --penalty --batch 64
""".strip().splitlines()
# Neighbours of the quick ones: other sizes and words of the same scripts, or the same layers in another.
SLOW = """
mlp_train.py
mlp_train.py --depth 32 --segments 4
nano_gpt.py --flash
nano_gpt.py --flash --backward-step
lm_train.py --size gpt2 --batch 4 --seq 512
lm_train.py --size gpt2-medium --batch 8 --seq 512 --optimizer momentum --keep-grads
lm_train.py --size llama-1b --batch 2 --seq 2048 --precision bf16
encoder_train.py --arch bert --task classify --batch 32 --seq 256 --padding
vision_train.py --model vit_base_patch16_224 --batch 64 --amp bf16 --optimizer adamw
translate.py
""".strip().splitlines()
CASES = QUICK + SLOW

MEASURED = map(json.loads, (TRUTH / "h200.jsonl").read_text().splitlines())
ROWS = {row["case"]: row for row in MEASURED if not row["alloc_conf"]}
ALLOCATED_BOUND, RESERVED_BOUND, PROCESS_BOUND = 0.01, 0.04, 0.04


@pytest.fixture(scope="module")
def answers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, "Future[dict[str, Any]]"]]:
    """The JSON of every case that this run tests, two cases at a time."""
    folder = tmp_path_factory.mktemp("truth")
    own = [item.callspec.params for item in request.session.items if item.path == request.path]
    wanted = [
        case for case in CASES if any(case == words.get("case") or case in words.get("cases", ()) for words in own)
    ]
    with ThreadPoolExecutor(2) as pool:
        yield {case: pool.submit(predict, case, folder / f"{number}.json") for number, case in enumerate(wanted)}


def predict(case: str, answer: Path) -> dict[str, Any]:
    script, *words = case.split()
    path = TRUTH / "scripts" / script
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    # Where torchvision does not match torch, `make setup` puts it there; on the virtual GPU it loads all the same.
    environment["PYTHONPATH"] = f"{os.environ.get('PYTHONPATH', '')}:{sys.prefix}/torchvision"
    options = ["--gpu", "h200", "--torch", "2.11", "--json", str(answer)]
    done = run_tonnage("run", *options, str(path), *words, env=environment)
    assert answer.exists(), done.stderr[-2000:]
    said: dict[str, Any] = json.loads(answer.read_text())
    return said


def error(said: dict[str, Any], case: str, key: str, real: str) -> float:
    measured: int = ROWS[case][real]
    return abs(said[key] / measured - 1)


@pytest.mark.truth
@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_prediction_is_what_the_card_did(case: str, answers: dict[str, "Future[dict[str, Any]]"]) -> None:
    said = answers[case].result()
    assert said["outcome"] == ROWS[case]["outcome"]
    assert error(said, case, "peak_allocated_bytes", "allocated_bytes.all.peak") <= ALLOCATED_BOUND
    assert error(said, case, "peak_reserved_bytes", "reserved_bytes.all.peak") <= RESERVED_BOUND
    assert error(said, case, "peak_process_bytes", "nvml_process_bytes") <= PROCESS_BOUND
    assert sum(said["ledger"].values()) == said["peak_allocated_bytes"]


@pytest.mark.truth
@pytest.mark.parametrize("cases", [QUICK, pytest.param(CASES, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_predictions_are_exact_on_the_whole(cases: list[str], answers: dict[str, "Future[dict[str, Any]]"]) -> None:
    said = {case: answers[case].result() for case in cases}
    allocated = [error(said[case], case, "peak_allocated_bytes", "allocated_bytes.all.peak") for case in cases]
    reserved = [error(said[case], case, "peak_reserved_bytes", "reserved_bytes.all.peak") for case in cases]
    assert statistics.median(allocated) <= 0.001
    assert statistics.median(reserved) <= 0.003
    assert sum(e == 0 for e in allocated) >= len(cases) / 3
