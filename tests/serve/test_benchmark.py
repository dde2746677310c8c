"""`benchmarks/serve.py` measures what it says: its workload, its ceiling, and each part on a tiny model."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import torchvision_names  # noqa: F401

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve.py"
TINY = ("--tiny", "--device", "cpu", "--runs", "1")


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_serve", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def written(benchmark: ModuleType, folder: Path, part: str, *words: str) -> dict[str, Any]:
    benchmark.main([part, *TINY, *words, "--out", str(folder)])
    (file,) = folder.glob("serve-*.json")
    return json.loads(file.read_text())


def test_the_standard_workload(benchmark: ModuleType) -> None:
    work = benchmark.workload()
    assert (len(work.prompts), work.tokens) == (256, 133_966)
    assert {100 <= len(prompt) <= 1024 for prompt in work.prompts} == {True}
    part = work.first(3, 200)
    assert part.prompts == work.prompts[:3] and max(part.outputs) <= 200


def test_pages_of_16_waste_less_than_a_hundredth(benchmark: ModuleType) -> None:
    assert benchmark.simulated_waste(benchmark.workload(), 16) == pytest.approx(0.0099, abs=0.0001)


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_throughput(benchmark: ModuleType, tmp_path: Path, kv: str) -> None:
    found = written(benchmark, tmp_path, "throughput", "--kv", kv)
    assert found["tokens"] == benchmark.workload(tiny=True).tokens
    assert found["tokens_per_s"] == pytest.approx(found["tokens"] / found["seconds"])
    assert 0 < found["share_of_ceiling"] < 1 and 0 < found["waste_of_pool"] < found["waste_of_held"] < 0.5
    assert found["prefix_hit_tokens"] == found["preemptions"] == 0
    assert found["card"] == "CPU" and found["memory"]["blocks"] > 1 and {"torch", "commit", "date"} <= set(found)


def test_the_ceiling_is_what_the_steps_read(benchmark: ModuleType) -> None:
    options = benchmark.argparse.Namespace(tiny=True, device="cpu", shape="0.6b")
    engine = benchmark.make_engine(options)
    work = benchmark.Workload([[1] * 10, [2] * 20], [4, 2])
    _, trace = benchmark.run(engine, work, "counted")
    # Prompts of 10 and 20 in one step; then a token of each at positions 10 and 20, and two more of the first.
    assert (sum(trace.chunk_tokens), trace.decodes) == (30, [0, 2, 1, 1])
    assert trace.keys_read == [30, 11 + 21, 12, 13]
    memory_s, prompts_s = benchmark.ceiling_s(engine, trace)
    token_bytes = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head dim, FP32
    decoder = engine.runner._decoder
    assert memory_s * 4.1e12 == pytest.approx(4 * decoder.weight_bytes + 87 * token_bytes)
    assert prompts_s * 6e14 == pytest.approx(2 * 30 * (decoder.weight_bytes - decoder.embedding.nbytes) / 4)


def test_prefix(benchmark: ModuleType, tmp_path: Path) -> None:
    found = written(benchmark, tmp_path, "prefix")
    assert len(found["on"]) == len(found["off"]) == 1 and found["slower"] < 1


def test_waste(benchmark: ModuleType, tmp_path: Path) -> None:
    shares = list(written(benchmark, tmp_path, "waste")["waste"].values())
    assert shares == sorted(shares)


def test_a_peer_draws_what_it_is_asked_for(benchmark: ModuleType) -> None:
    options = benchmark.argparse.Namespace(tiny=True, device="cpu", shape="0.6b", seconds=0.01)
    found = benchmark.of_peer(benchmark.static, options, benchmark.workload(tiny=True), "sdpa")
    assert found["each"] == 8 and found["tokens_per_s"] > 0


def test_a_peer_that_fails_says_why(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.attempt(lambda: 1 / 0) == {"failed": "ZeroDivisionError: division by zero"}
    assert "division" in capsys.readouterr().out
