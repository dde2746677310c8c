"""vLLM's flags, held to those of its own parser: vLLM itself is too large to install here (`read_vllm_flags.py`)."""

import json
import shlex
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tonnage.planner.export import ServingLaunch, export_serving, left_out
from tonnage.planner.export.vllm import flags

FLAGS = json.loads((Path(__file__).parent / "data" / "vllm-0.32.0.json").read_text())["flags"]
SERVED = ServingLaunch(
    model="llama-3.1-70b",
    gpus=4,
    tp=4,
    pp=1,
    context=32768,
    max_seqs=64,
    batched_tokens=8192,
    weights="bf16",
    kv="bf16",
    block=16,
    utilization=0.9,
    eager=False,
)


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


def served(launch: ServingLaunch, folder: Path) -> Namespace:
    script, _ = export_serving(launch, folder)
    line = script.read_text().split("exec vllm serve", 1)[1]
    words = [word for word in shlex.split(line.replace("\\\n", " ")) if word != "$@"]
    assert words[1:] == flags(launch)
    return parser().parse_args(words)


def test_every_number_arrives(tmp_path: Path) -> None:
    found = served(SERVED, tmp_path)
    assert found.model == "meta-llama/Llama-3.1-70B"
    assert (found.tensor_parallel_size, found.pipeline_parallel_size) == (4, 1)
    assert (found.max_model_len, found.max_num_seqs, found.max_num_batched_tokens) == (32768, 64, 8192)
    assert (found.gpu_memory_utilization, found.block_size, found.enforce_eager) == (0.9, 16, None)
    assert (found.dtype, found.kv_cache_dtype, found.quantization) == ("bfloat16", "bfloat16", None)


@pytest.mark.parametrize(
    ("weights", "kv", "dtype", "quantization", "cache"),
    [
        ("fp16", "fp16", "float16", None, "float16"),
        ("fp8", "fp8", None, "fp8", "fp8"),
        ("int4", "int4", None, None, "int4_per_token_head"),
    ],
)
def test_formats(weights: str, kv: str, dtype: str, quantization: str, cache: str, tmp_path: Path) -> None:
    found = served(replace(SERVED, weights=weights, kv=kv, eager=True), tmp_path)
    assert (found.dtype, found.quantization, found.kv_cache_dtype) == (dtype, quantization, cache)
    assert found.enforce_eager is True


def test_a_name_with_a_space_stays_one_word(tmp_path: Path) -> None:
    assert served(replace(SERVED, model="/models/my llama; rm -rf"), tmp_path).model == "/models/my llama; rm -rf"


def test_what_a_reader_must_know_is_said(tmp_path: Path) -> None:
    _, readme = export_serving(replace(SERVED, weights="int4", gpus=16), tmp_path)
    words = " ".join(readme.read_text().split())
    assert "name one that was quantized so" in words
    assert "--nnodes" in words


def test_a_cache_that_it_does_not_have_is_left_out(tmp_path: Path) -> None:
    launch = replace(SERVED, kv="fp32")
    assert left_out(launch) == {"vllm.sh": ["vLLM keeps no KV cache in fp32"]}
    assert [path.name for path in export_serving(launch, tmp_path)] == ["README.txt"]
