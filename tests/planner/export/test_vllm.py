"""vLLM's flags, held to those of its own parser: vLLM itself is too large to install here (`read_vllm_flags.py`)."""

import shlex
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from tonnage.planner.export import ServingLaunch, export_serving, left_out
from tonnage.planner.export.vllm import flags
from vllm_flags import SERVED, parser


def served(launch: ServingLaunch, folder: Path) -> Namespace:
    script = export_serving(launch, folder)[0]
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


def test_a_checkpoint_that_is_quantised_already_is_taken_as_it_is(tmp_path: Path) -> None:
    launch = replace(SERVED, model="someone/Llama-3.1-8B-FP8", weights="fp8", stored="fp8")
    assert served(launch, tmp_path).quantization is None
    said = export_serving(replace(SERVED, weights="int4", stored="int4"), tmp_path, force=True)[-1].read_text()
    assert "name one that was quantized so" not in said


def test_a_gguf_file_takes_the_tokenizer_of_its_model(tmp_path: Path) -> None:
    launch = replace(SERVED, model="unsloth/Qwen3-8B-GGUF", weights="q4_k_m", stored="q4_k_m", tokenizer="qwen3-8b")
    found = served(launch, tmp_path)
    assert (found.model, found.tokenizer) == ("unsloth/Qwen3-8B-GGUF:Q4_K_M", "Qwen/Qwen3-8B")
    said = export_serving(launch, tmp_path, force=True)[-1].read_text()
    assert "vllm-gguf-plugin" in said


def test_a_name_with_a_space_stays_one_word(tmp_path: Path) -> None:
    assert served(replace(SERVED, model="/models/my llama; rm -rf"), tmp_path).model == "/models/my llama; rm -rf"


def test_what_a_reader_must_know_is_said(tmp_path: Path) -> None:
    launch = replace(SERVED, weights="int4", tp=16, stage_layers=(41, 39))
    words = " ".join(export_serving(launch, tmp_path)[-1].read_text().split())
    assert "name one that was quantized so" in words
    assert "tensor parallelism of 16 crosses hosts of 8 GPUs" in words
    assert "layers of the pipeline stages are 41, 39" in words


@pytest.mark.parametrize(("tp", "pp", "executor"), [(1, 1, None), (4, 2, "mp"), (8, 2, "ray")])
def test_who_runs_the_ranks(tp: int, pp: int, executor: str | None, tmp_path: Path) -> None:
    found = served(replace(SERVED, tp=tp, pp=pp), tmp_path)
    assert found.distributed_executor_backend == executor
    assert (found.tensor_parallel_size, found.pipeline_parallel_size) == (tp, pp)


def test_a_block_may_be_left_to_vllm(tmp_path: Path) -> None:
    assert served(replace(SERVED, block=0), tmp_path).block_size is None


def test_a_local_model_is_named_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for name in ("model", "model/config.json"):
        assert served(replace(SERVED, model=name), tmp_path / name.replace("/", "-")).model == str(tmp_path / "model")


def test_a_cache_that_it_does_not_have_is_left_out(tmp_path: Path) -> None:
    launch = replace(SERVED, kv="fp64")
    assert left_out(launch) == {"vllm.sh": ["vLLM keeps no KV cache in fp64"]}
    assert [path.name for path in export_serving(launch, tmp_path)] == ["README.txt"]
