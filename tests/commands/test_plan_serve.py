"""`tonnage plan serve`, within this process and in one of its own."""

import contextlib
import json
import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Any

import pytest

from tonnage.commands import plan_serve
from tonnage.errors import RequestError
from tonnage.models import all_presets

COMMAND = [str(Path(sys.executable).parent / "tonnage"), "plan", "serve"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """A command's exit status and what it prints."""

    def call(*words: str) -> tuple[int, str]:
        status = plan_serve.command(list(words))
        return status, capsys.readouterr().out

    return call


@pytest.fixture
def figures(run: Any) -> Any:
    """A command's JSON."""
    return lambda *words: json.loads(run(*words, "--json", "-")[1])


def test_it_fits(run: Any) -> None:
    status, out = run("llama-3.1-8b", "--gpus", "h100", "--context", "8k", "--users", "16")
    assert status == 0
    assert "fits" in out and "vllm serve meta-llama/" in out


def test_it_does_not_fit(run: Any) -> None:
    status, out = run("llama-3.1-70b", "--gpus", "4xh100", "--context", "32k", "--users", "64")
    assert status == 1
    assert "needed" in out and "available" in out and "--users" in out


def test_figures_of_a_hub_id(figures: Any) -> None:
    found = figures(
        "meta-llama/Llama-3.1-8B-Instruct", "--gpus", "h100", "--engine-version", "0.19", "--utilization", "0.95"
    )
    kv = found["kv"]
    assert set(kv) >= {"bytes_per_token", "available_bytes", "blocks", "tokens", "max_concurrency"}
    assert kv["tokens"] == pytest.approx(476016, rel=0.001)


def test_flags_change_the_answer(figures: Any) -> None:
    base = ("qwen3-8b", "--gpus", "h200", "--context", "4k")
    plain = figures(*base)["kv"]["blocks"]
    assert figures(*base, "--kv", "fp8")["kv"]["blocks"] > 1.9 * plain
    assert figures(*base, "--weights", "int4")["kv"]["blocks"] > plain
    assert figures(*base, "--max-seqs", "2048")["kv"]["blocks"] < plain
    assert figures(*base, "--batched-tokens", "64k")["kv"]["blocks"] < plain
    assert figures(*base, "--block", "32")["kv"]["blocks"] == pytest.approx(plain / 2, abs=1)
    assert figures(*base, "--engine", "tonnage")["kv"]["blocks"] != plain


def test_a_shared_prompt_makes_room(figures: Any) -> None:
    base = ("llama-3.1-8b", "--gpus", "h100", "--context", "8k")
    assert figures(*base, "--prompt-shared", "4k")["most_users"] > 1.9 * figures(*base)["most_users"]


def test_explain(run: Any) -> None:
    _, out = run("llama-3.1-8b", "--gpus", "h100", "--explain")
    assert "the arithmetic" in out and "32 layers × 8 heads" in " ".join(out.split())


def test_export(run: Any, tmp_path: Path) -> None:
    status, _ = run("llama-3.1-8b", "--gpus", "h100", "--export", str(tmp_path / "out"))
    assert status == 0
    assert "--max-model-len 8192" in (tmp_path / "out" / "vllm.sh").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("llama-3.1-8b", "--gpus", "4xh100", "--users", "0"), "--users 0"),
        (("llama-3.1-8b", "--gpus", "4xh100", "--tp", "3"), "--tp 3"),
        (("llama-3.1-8b", "--gpus", "3xh100", "--tp", "3"), "--tp 3 does not divide"),
        (("llama-3.1-8b", "--gpus", "4xh100", "--tp", "0"), "--tp 0"),
        (("llama-3.1-8b", "--gpus", "4xh1000"), "h1000"),
        (("llama-3.1-8z", "--gpus", "h100"), "llama-3.1-8z"),
        (("llama-3.1-8b", "--gpus", "h100", "--context", "long"), "long"),
        (("llama-3.1-8b", "--gpus", "h100", "--utilization", "nan"), "--utilization nan"),
        (("llama-3.1-8b", "--gpus", "h100", "--utilization", "0"), "--utilization 0"),
        (("llama-3.1-8b", "--gpus", "h100", "--engine-version", "seven"), "seven"),
        (("bert-base", "--gpus", "h100"), "writes no tokens"),
        (("llama-3.1-8b", "--gpus", "h100", "--engine", "tonnage", "--export", "x"), "launched by no files"),
        (("llama-3.1-8b", "--gpus", "h100", "--engine", "tonnage", "--weights", "int4"), "keeps no int4 weights"),
        (("deepseek-v3", "--gpus", "8xh200", "--engine", "tonnage"), "does not serve deepseek-v3"),
    ],
)
def test_bad_requests(run: Any, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        run(*words)


def test_a_flag_that_is_none_of_its_values() -> None:
    with pytest.raises(SystemExit, match="2"):
        plan_serve.command(["llama-3.1-8b", "--gpus", "h100", "--kv", "int3"])
    with pytest.raises(RequestError, match="--weights int3 is not known"):
        plan_serve.command(["llama-3.1-8b", "--gpus", "h100", "--weights", "int3"])


def test_the_command_itself_without_torch_or_numpy() -> None:
    found = subprocess.run(
        [*COMMAND, "llama-3.1-8b", "--gpus", "h100", "--users", "0"], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("tonnage: --users 0")
    code = "import sys, tonnage.report.plans.serving; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "set()"


def test_layers_of_the_stages_can_be_given(figures: Any, run: Any) -> None:
    found = figures("llama-3.1-8b", "--gpus", "2xh100", "--stage-layers", "15,17")
    assert found["config"]["pp"] == 2 and found["config"]["stage_layers"] == [15, 17]
    assert found["launch"][:4] == ["env", "VLLM_PP_LAYER_PARTITION=15,17", "vllm", "serve"]
    with pytest.raises(RequestError, match="do not cut the 32 layers"):
        run("llama-3.1-8b", "--gpus", "2xh100", "--stage-layers", "15,15")
    with pytest.raises(RequestError, match="makes no sense"):
        run("llama-3.1-8b", "--gpus", "2xh100", "--stage-layers", "half")


def test_several_hosts_are_said_and_exported(run: Any, tmp_path: Path) -> None:
    status, out = run("llama-3.1-405b", "--gpus", "2x8xh100", "--users", "4", "--export", str(tmp_path))
    assert status == 0 and "launch, with Ray on 2 hosts" in out
    assert {path.name for path in tmp_path.iterdir()} >= {"start-head.sh", "start-worker.sh", "check.py"}
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith("  wrote"))


def test_a_share_that_the_card_cannot_give_is_lowered(figures: Any) -> None:
    """Before 0.20 the graphs lie outside of the share, and a small card has no room for both."""
    words = ("qwen2.5-1.5b", "--gpus", "rtx-3080", "--engine-version", "0.19", "--max-seqs", "256")
    plain, given = figures(*words), figures(*words, "--utilization", "0.9")
    assert plain["fits"] and plain["ledger"]["total_bytes"] <= plain["capacity_bytes"]
    assert plain["config"]["utilization"] < 0.9, "vLLM's default then"
    assert not given["fits"] and given["config"]["utilization"] == 0.9, "what is given is kept"


def test_an_architecture_that_is_not_known_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "never-heard-of", **sizes}))
    plan_serve.command([str(tmp_path), "--gpus", "h100"])
    assert " ".join(capsys.readouterr().out.split()).count("not known") == 1


@pytest.mark.parametrize("engine", ["vllm", "tonnage"])
def test_every_preset_is_served_or_refused(run: Any, engine: str) -> None:
    for name in all_presets():
        with contextlib.suppress(RequestError):
            assert run(name, "--gpus", "8xh200" if engine == "vllm" else "h200", "--engine", engine)[0] in (0, 1)


def test_fp32_checkpoints_are_served_in_16_bits(run: Any) -> None:
    usual, kept = (run("olmo-2-7b", "--gpus", "h200", *words)[1] for words in ((), ("--weights", "fp32")))
    assert "bf16 weights, bf16 cache" in usual and "--weights fp32 keeps it" in usual
    assert "fp32 weights, fp32 cache" in kept
    assert "--kv-cache-dtype auto --dtype float32" in " ".join(kept.replace("\\", "").split())


def test_a_card_without_bf16_serves_in_fp16(run: Any) -> None:
    out = run("llama-3.2-1b", "--gpus", "t4")[1]
    assert "fp16 weights, fp16 cache" in out and "has no BF16" in out and "--dtype float16" in out
    with pytest.raises(RequestError, match="has no BF16"):
        run("llama-3.2-1b", "--gpus", "t4", "--weights", "bf16")


def test_no_context_is_longer_than_learned_positions(run: Any) -> None:
    assert "1 user × 1,024 tokens" in run("gpt2", "--gpus", "h200")[1]
    with pytest.raises(RequestError, match="learned 1,024 positions"):
        run("gpt2", "--gpus", "h200", "--context", "8k")


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "llama.cpp"])
def test_every_engine_serves_from_a_slice_of_a_card(run: Any, figures: Any, engine: str) -> None:
    words = ("llama-3.2-1b", "--gpus", "h100:2g.20gb", "--engine", engine, "--users", "2")
    assert run(*words)[0] == 0
    found = figures(*words)
    assert found["config"]["engine"] == engine
    assert found["needed_bytes"] <= found["available_bytes"] <= found["capacity_bytes"] < 20 * 2**30
    status, out = run(*words, "--explain")
    assert status == 0 and "the arithmetic" in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_llama_cpp_says_where_layers_lie(run: Any, figures: Any) -> None:
    words = ("llama-3.3-70b", "--gpus", "rtx-4090", "--engine", "llama.cpp", "--weights", "q4_k_m")
    status, out = run(*words)
    assert status == 0 and "layers on the GPU" in out and "llama-server -m" in out
    found = figures(*words)
    assert found["gpu_layers"] < found["layers"] == 81
    assert found["host"]["weights_bytes"] > 0
    assert figures(*words, "--gpu-layers", "0")["needed_bytes"] == 0
    assert run(*words, "--host-memory", "8g")[0] == 1


def test_neighbours_have_shares(run: Any, figures: Any) -> None:
    words = (
        "llama-3.1-8b",
        "--gpus",
        "l40s",
        "--beside",
        "qwen3-embedding-0.6b --context 2k --users 16",
        "--beside",
        "2GiB",
    )
    status, out = run(*words)
    assert status == 0 and "beside it" in out and out.count("--gpu-memory-utilization") >= 3
    found = figures(*words)
    assert [each["share"] > 0 for each in found["beside"]] == [False, True]
    claimed = sum(each["claimed_bytes"] for each in found["beside"])
    assert found["config"]["reserved_bytes"] == claimed
    assert found["needed_bytes"] + claimed <= found["capacity_bytes"]


@pytest.mark.parametrize("engine", ["sglang", "tensorrt-llm", "llama.cpp"])
def test_every_engine_is_exported(run: Any, tmp_path: Path, engine: str) -> None:
    words = ("llama-3.2-1b", "--gpus", "h100", "--engine", engine)
    status, out = run(*words, "--export", str(tmp_path / "files"), "--html", str(tmp_path / "page.html"))
    assert status == 0 and "wrote" in out
    assert (tmp_path / "files" / "README.txt").exists() and (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("llama-3.1-8b", "--gpus", "h100", "--gpu-layers", "3"), "is llama.cpp's"),
        (("llama-3.1-8b", "--gpus", "h100", "--engine", "llama.cpp", "--gpu-layers", "-3"), "makes no sense"),
        (("llama-3.1-8b", "--gpus", "h100", "--engine", "llama.cpp", "--gpu-layers", "99999999"), "makes no sense"),
        (("llama-3.1-8b", "--gpus", "h100", "--kv", "q8_0"), "Only llama.cpp"),
        (("llama-3.1-8b", "--beside", "6GiB"), "needs --gpus"),
        (("llama-3.1-8b", "--gpus", "h100", "--beside", "900GiB"), "leaves nothing"),
        (("llama-3.1-8b", "--gpus", "h100", "--beside", "qwen3-8b --gpus l4"), "has no place"),
        (("llama-3.1-8b", "--gpus", "h100", "--beside", "qwen3-8b 'x"), "makes no sense"),
    ],
)
def test_engines_refuse_what_is_not_theirs(run: Any, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        run(*words)


# What is short in each: nothing, a GPU, a GPU while it loads, a host.
VERDICTS = {
    "llama-3.1-8b --gpus h100": [],
    "llama-3.1-70b --gpus 4xh100 --context 32k --users 64": ["GPU"],
    "llama-3.1-8b --gpus rtx-4070 --context 2k --weights fp8 --engine-version 0.11.0 --max-seqs 4 --eager": [
        "loading on the GPU"
    ],
    "llama-3.1-70b --gpus rtx-4090 --engine llama.cpp --host-memory 16g": ["host"],
}


@pytest.mark.parametrize("words", VERDICTS)
def test_report_status_figures_page_and_export_say_the_same(
    words: str, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    parts, argv = VERDICTS[words], words.split()
    status, report = run(*argv, "--json", "plan.json", "--export", "files")
    found = json.loads(Path("plan.json").read_text())
    fits = not parts
    assert status == (0 if fits else 1) and found["fits"] == fits
    assert [short["part"] for short in found["shortages"]] == parts
    assert found["loading"]["fits"] == ("loading on the GPU" not in parts)
    header, *_ = report.split("\n\n")
    assert ("does not fit" in header) == ("nothing is written to files" in report) == (not fits)
    assert Path("files").exists() == ("\n  launch" in report) == fits
    assert max(map(len, report.splitlines())) <= 80
    assert run(*argv, "--html", "page.html")[0] == status
    html = Path("page.html").read_text()
    for short in found["shortages"]:
        assert short["words"] in " ".join(header.split()) and escape(short["words"]) in html


@pytest.mark.parametrize("words", [words for words, parts in VERDICTS.items() if parts])
def test_every_flag_that_would_fit_does(words: str, figures: Any, run: Any) -> None:
    changes = figures(*words.split())["changes"]
    assert changes
    for change in changes:
        assert run(*words.split(), *change["flag"].split())[0] == 0, change["flag"]
