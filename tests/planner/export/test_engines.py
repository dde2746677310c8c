"""The scripts that launch SGLang, TensorRT-LLM and llama.cpp."""

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tonnage.planner.export import SERVERS, ServingLaunch, export_serving, left_out
from vllm_flags import SERVED

SGLANG = replace(SERVED, engine="sglang")
TENSORRT = replace(SERVED, engine="tensorrt-llm", block=32)
LLAMA = replace(
    SERVED, engine="llama.cpp", tp=1, gpus_per_host=1, weights="q4_k_m", kv="q8_0", max_seqs=4, context=8192,
    batched_tokens=512, gpu_layers=41,
)  # fmt: skip


def words_of(launch: ServingLaunch, folder: Path) -> list[str]:
    script = export_serving(launch, folder)[0]
    subprocess.run(["bash", "-n", str(script)], check=True)
    line = script.read_text().split("exec ", 1)[1]
    return shlex.split(line.replace("\\\n", " "))


@pytest.mark.parametrize("launch", [SGLANG, TENSORRT, LLAMA], ids=lambda launch: launch.engine)
def test_the_script_runs_the_line_that_is_printed(launch: ServingLaunch, tmp_path: Path) -> None:
    words = words_of(launch, tmp_path)
    planned = SERVERS[launch.engine].command(launch)
    assert [word for word in words[: len(planned)] if "GGUF" not in word] == [
        word for word in planned if not word.endswith(".gguf")
    ]
    assert words[-1] == "$@"
    readme = (tmp_path / "README.txt").read_text()
    assert f"bash {SERVERS[launch.engine].FILE}" in readme and "vLLM" not in readme


def test_sglang(tmp_path: Path) -> None:
    words = " ".join(words_of(replace(SGLANG, kv="fp8", eager=True), tmp_path))
    for part in (
        "--model-path meta-llama/Llama-3.1-70B", "--tp-size 4", "--context-length 32768", "--mem-fraction-static 0.9",
        "--max-running-requests 64", "--chunked-prefill-size 8192", "--kv-cache-dtype fp8_e4m3", "--disable-cuda-graph",
    ):  # fmt: skip
        assert part in words


def test_sglang_on_several_hosts_and_with_copies(tmp_path: Path) -> None:
    two = replace(SGLANG, tp=8, pp=2)
    text = export_serving(two, tmp_path / "two")[0].read_text()
    assert "--nnodes 2" in text and '--node-rank "$RANK"' in text and "HEAD:?" in text
    words = " ".join(words_of(replace(SGLANG, tp=2, copies=4), tmp_path / "copies"))
    assert "--dp-size 4" in words and "--max-running-requests 256" in words


def test_tensorrt_llm(tmp_path: Path) -> None:
    words = " ".join(words_of(replace(TENSORRT, kv="fp8"), tmp_path))
    assert words.startswith("trtllm-serve meta-llama/Llama-3.1-70B --backend pytorch --tp_size 4")
    assert "--max_batch_size 64 --max_num_tokens 8192 --max_seq_len 32768" in words
    options = (tmp_path / "tensorrt_llm.yaml").read_text()
    assert (
        'dtype: "fp8"' in options and "tokens_per_block: 32" in options and "free_gpu_memory_fraction: 0.9" in options
    )
    assert left_out(replace(TENSORRT, tp=16)) != {}


def test_llama_cpp(tmp_path: Path) -> None:
    words = " ".join(words_of(LLAMA, tmp_path))
    assert "-c 32768 -np 4 -ngl 41" in words and "-ctk q8_0 -ctv q8_0" in words and "-fa on" in words
    assert "--n-cpu-moe 12" in " ".join(SERVERS["llama.cpp"].command(replace(LLAMA, cpu_experts=12)))
    assert "--device none" in " ".join(SERVERS["llama.cpp"].command(replace(LLAMA, gpu_layers=0)))


def test_a_format_that_an_engine_does_not_read_is_said() -> None:
    assert "KV cache" in left_out(replace(SGLANG, kv="int4"))["sglang.sh"][0]
    assert "GGUF" in left_out(replace(TENSORRT, weights="q4_k_m"))["tensorrt_llm.sh"][0]
