"""`tonnage plan train`: flags in, a report and figures out, and an exit status that scripts can rely on."""

import json
import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Any

import pytest

from tonnage.commands.plan_train import command
from tonnage.errors import BadLayout, OutputExists, RequestError, UnknownGpu, UnknownModel

TONNAGE = str(Path(sys.executable).parent / "tonnage")
SMALL = ("llama-3.2-1b", "--gpus", "h200", "--seq", "2k", "--precision", "bf16")


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    command([*words, "--json", "-"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_keys_that_scripts_rely_on(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, *SMALL, "--micro-batch", "2")
    assert found["fits"] is True
    assert found["capacity_bytes"] == 150_109_880_320
    assert found["model"]["parameters"] == 1_235_814_400
    best = found["best"]
    names = ("parameters", "gradients", "optimizer", "activations", "workspace", "context", "fragmentation")
    ledger = best["ledger"]
    assert set(ledger) == {f"{name}_bytes" for name in (*names, "total")}
    assert sum(ledger[f"{name}_bytes"] for name in names) == pytest.approx(ledger["total_bytes"], abs=20)
    assert best["peak_allocated_bytes"] < ledger["total_bytes"]
    assert best["tokens_per_s"] == pytest.approx(2 * 2048 / best["step_time_s"])
    assert best["config"]["micro_batch"] == 2
    assert isinstance(found["alternatives"], list)


def test_stages_whose_parts_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--gpus 16xh100 --pp 4 --tp 4 --cp 1 --zero 0 --framework megatron --micro-batch 1 --global-batch 16"
    once, turns = (
        figures(capsys, "llama-3.1-8b", *words.split(), "--checkpoint", "none", "--pp-chunks", str(chunks))["best"]
        for chunks in (1, 4)
    )
    assert turns["config"]["pp_chunks"] == 4
    assert turns["step_parts_s"]["bubble"] == pytest.approx(once["step_parts_s"]["bubble"] / 4, rel=0.05)
    assert turns["ledger"]["activations_bytes"] > once["ledger"]["activations_bytes"]


def test_every_flag_is_fixed(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--micro-batch 2 --global-batch 32 --precision fp16-mixed --optimizer lion --optimizer-kernel loop"
    words += " --checkpoint every-2 --attention eager --loss chunked --zero 3 --tp 2 --pp 2 --cp 2 --ep 2"
    words += " --offload optimizer,activations --lora 8 --compile"
    best = figures(capsys, "mixtral-8x7b", "--gpus", "16xh100", "--seq", "4k", *words.split())["best"]
    expected = {
        "seq": 4096,
        "micro_batch": 2,
        "accumulate": 8,
        "precision": "fp16-mixed",
        "optimizer": "lion",
        "optimizer_kernel": "loop",
        "checkpoint": "every-2",
        "attention": "eager",
        "loss": "chunked",
        "zero": 3,
        "tp": 2,
        "pp": 2,
        "cp": 2,
        "ep": 2,
        "data": 2,
        "offload": "optimizer,activations",
        "optimizer_place": "host",
        "lora_rank": 8,
        "compile": True,
    }
    assert {name: best["config"][name] for name in expected} == expected


def test_nanotron_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    best = figures(capsys, *SMALL[:1], "--gpus", "8xh100", "--framework", "nanotron", "--zero", "1")["best"]
    assert best["config"]["framework"] == "nanotron" and best["config"]["zero"] == 1


def test_what_else_could_be_had_is_in_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, *SMALL[:1], "--gpus", "2xh100")
    flags = {offer["flag"]: offer for offer in found["offers"]}
    assert {"--framework megatron", "--compile"} <= set(flags)
    compiled = flags["--compile"]
    assert compiled["plan"]["tokens_per_s"] == pytest.approx((1 + compiled["gain"]) * found["best"]["tokens_per_s"])
    assert found["fastest"]["tokens_per_s"] >= found["best"]["tokens_per_s"]
    searched = found["searched"]
    assert searched["fitting"] <= searched["looked_at"] <= searched["configurations"]


def test_the_whole_training_is_timed_and_priced(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL[:1], "--gpus", "2xh100", "--micro-batch", "1", "--zero", "0", "--epochs", "2")
    best = figures(capsys, *words, "--tokens", "1B", "--price", "3")["best"]
    assert best["training_s"] == pytest.approx(2e9 / best["tokens_per_s"])
    assert best["training_cost"] == pytest.approx(best["training_s"] / 3600 * 3 * 2)
    samples = figures(capsys, *words, "--samples", "1000")["best"]
    assert samples["training_s"] == pytest.approx(2000 * samples["config"]["seq"] / samples["tokens_per_s"])
    assert samples["training_cost"] is None
    assert "training_s" not in figures(capsys, *words)["best"]


def test_it_exits_1_where_nothing_fits_and_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["llama-3.1-70b", "--gpus", "h200", "--seq", "8k", "--offload", "none"]) == 1
    said = capsys.readouterr().out
    assert "does not fit" in said
    assert "its largest terms" in said
    assert "--gpus 16xh200" in said


def test_a_bare_offload_is_of_the_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures(capsys, *SMALL, "--zero", "2", "--offload")["best"]["config"]["optimizer_place"] == "host"


def test_a_config_file_is_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 1000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    found = figures(capsys, str(path), "--gpus", "rtx-4090")
    assert found["fits"] is True
    assert found["best"]["config"]["seq"] == 512


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (["llama-3.1-8bb", "--gpus", "h200"], UnknownModel, "llama-3.1-8bb"),
        (["llama-3.1-8b", "--gpus", "h2000"], UnknownGpu, "h2000"),
        ([*SMALL, "--tp", "3"], RequestError, "--tp 3"),
        ([*SMALL, "--micro-batch", "0"], RequestError, "--micro-batch 0"),
        ([*SMALL, "--lora", "0"], RequestError, "--lora 0"),
        ([*SMALL, "--seq", "-1"], RequestError, "-1"),
        ([*SMALL, "--offload", "everything"], RequestError, "everything"),
        ([*SMALL, "--json", "/nowhere/at/all.json"], RequestError, "/nowhere/at/all.json"),
    ],
)
def test_a_wrong_request_is_an_error_with_a_hint(words: list[str], error: type[RequestError], said: str) -> None:
    with pytest.raises(error, match=said.replace("/", ".")) as caught:
        command(words)
    assert caught.value.exit_code == 2
    assert caught.value.hint


@pytest.mark.parametrize(
    "words", [["--zero", "4"], ["--precision", "fp7"], ["--nonsense"], ["--tp", "two"], ["--micro-batch", "1.5"]]
)
def test_words_that_are_no_flags_exit_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command([*SMALL, *words])
    assert caught.value.code == 2
    assert "tonnage plan train" in capsys.readouterr().err


def test_the_files_that_launch_it_are_written_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [*SMALL, "--export", str(tmp_path / "launch")]
    assert command(words) == 0
    assert "README.txt" in capsys.readouterr().out
    assert (tmp_path / "launch" / "README.txt").exists()
    with pytest.raises(OutputExists):
        command(words)
    assert command([*words, "--force"]) == 0


def test_explain_prints_formulas_and_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    command([*SMALL, "--micro-batch", "2", "--explain"])
    said = capsys.readouterr().out
    assert "parameters 1,235,814,400, bytes 2" in said
    assert "seconds rest on" in said
    assert max(map(len, said.splitlines())) <= 80


def test_the_command_as_people_call_it_loads_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['tonnage', 'plan', 'train', 'llama-3.2-1b', '--gpus', 'h200']\n"
        "from tonnage.commands.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'transformers', 'typer', 'rich'} & set(sys.modules), 'slow to load'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_plan_is_listed_and_helps() -> None:
    for words in (["plan", "--help"], ["plan", "train", "--help"]):
        done = subprocess.run([TONNAGE, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0
        assert "train" in done.stdout
    assert "--checkpoint" in done.stdout


def test_a_vision_model_is_trained_on_images(capsys: pytest.CaptureFixture[str]) -> None:
    best = figures(capsys, "vit-large", "--gpus", "rtx-4090")["best"]
    assert best["config"]["seq"] == 197
    assert best["sequences_per_s"] == pytest.approx(best["tokens_per_s"] / 197)
    command(["vit-large", "--gpus", "rtx-4090"])
    out = capsys.readouterr().out
    assert f"{best['sequences_per_s']:,.0f} images/s" in out and "a step of 2,048 images" in out and "tokens" not in out


def test_whisper_writes_as_many_tokens_as_it_can(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures(capsys, "whisper-large-v3", "--gpus", "h100")["best"]["config"]["seq"] == 448


def test_a_card_without_bf16_trains_in_fp16(capsys: pytest.CaptureFixture[str]) -> None:
    command(["llama-3.2-1b", "--gpus", "8xv100", "--seq", "1k"])
    out = capsys.readouterr().out
    assert "fp16-mixed" in out and "has no BF16" in out and "--precision bf16" not in out


def test_qlora_alone_is_rank_16_on_a_4_bit_base(capsys: pytest.CaptureFixture[str]) -> None:
    config = figures(capsys, *SMALL, "--qlora")["best"]["config"]
    assert (config["lora_rank"], config["base"], "experts" in config["lora_targets"]) == (16, "nf4", False)
    config = figures(capsys, *SMALL, "--lora", "8", "--base", "fp8", "--lora-targets", "q_proj,v_proj")["best"][
        "config"
    ]
    assert (config["lora_rank"], config["base"], config["lora_targets"]) == (8, "fp8", ["q_proj", "v_proj"])


@pytest.mark.parametrize(
    "words", [("--lora-targets", "mlp"), ("--base", "nf4"), ("--lora", "8", "--lora-targets", "experts")]
)
def test_adapters_that_make_no_sense_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(RequestError):
        command([*SMALL, *words])


def test_a_4_bit_mixture_fits_one_card_without_offload(capsys: pytest.CaptureFixture[str]) -> None:
    best = figures(capsys, "gpt-oss-120b", "--gpus", "h100", "--seq", "2k", "--qlora")["best"]
    assert best["fits"] and best["config"]["offload"] == "none"


def test_a_desktop_beside_a_training(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("llama-3.2-1b", "--gpus", "rtx-4090", "--seq", "2k", "--qlora")
    alone, beside = figures(capsys, *words), figures(capsys, *words, "--beside", "4GiB", "--beside", "2GiB")
    assert alone["capacity_bytes"] - beside["capacity_bytes"] == 6 * 2**30
    assert beside["best"]["ledger"]["total_bytes"] <= beside["capacity_bytes"]
    with pytest.raises(RequestError, match="leave nothing"):
        command([*words, "--beside", "30GiB"])
    with pytest.raises(RequestError, match="needs --gpus"):
        command(["llama-3.2-1b", "--beside", "4GiB"])


def test_hosts_have_what_the_flags_say(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("llama-3.2-3b", "--gpus", "rtx-4090", "--seq", "2k", "--offload", "optimizer")
    command([*words, "--host-memory", "96g"])
    assert "for each rank" in (out := capsys.readouterr().out) and "of 96 in a host" in out
    assert command([*words, "--host-memory", "16GiB"]) == 1
    capsys.readouterr()
    slow, fast = (
        figures(capsys, *words[:-1], "optimizer:nvme", "--zero", "3", "--drive", speed)["best"]["step_time_s"]
        for speed in ("1g/s", "7GB/s")
    )
    assert slow > fast


def test_without_drives_nothing_goes_there(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("llama-3.1-8b", "--gpus", "rtx-4090", "--seq", "2k", "--drive", "none")
    assert "nvme" not in figures(capsys, *words)["best"]["config"]["offload"]
    with pytest.raises(RequestError, match="--drive none"):
        command([*words, "--offload", "all:nvme"])


def test_liger_is_quicker_and_needs_less(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "--micro-batch", "4", "--checkpoint", "none")
    full, fused, liger = (
        figures(capsys, *words, *more)["best"] for more in (["--loss", "full"], ["--loss", "fused"], ["--liger"])
    )
    sizes = [one["ledger"]["activations_bytes"] for one in (full, fused, liger)]
    assert sizes == sorted(sizes, reverse=True)
    # Only the logits of a few tokens are there: 1/63 of them, rounded up to a power of two.
    logits = 4 * 2048 * 128256
    assert sizes[0] - sizes[1] > 10 * logits
    assert liger["tokens_per_s"] > 1.05 * full["tokens_per_s"]
    assert liger["config"]["loss"] == "fused"


def test_states_that_are_paged_cross_where_they_find_no_room(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "llama-3.2-3b",
        "--seq",
        "2k",
        "--micro-batch",
        "2",
        "--precision",
        "bf16",
        "--checkpoint",
        "full",
        "--loss",
        "chunked",
    )
    for card, crosses in (("h200", False), ("rtx-4090", True)):
        best = figures(capsys, *words, "--gpus", card, "--optimizer", "paged-adamw")["best"]
        assert best["fits"] and best["ledger"]["optimizer_bytes"] == 0
        assert best["host_bytes"] == pytest.approx(4 * 3_212_749_824, rel=1e-3)
        assert (best["step_parts_s"]["offload"] > 0) is crosses


def test_gradients_that_are_used_at_once_are_freed(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "--checkpoint", "full", "--micro-batch", "16", "--optimizer", "sgd", "--loss", "chunked")
    plain, at_once = (figures(capsys, *words, *more)["best"] for more in ([], ["--step-in-backward"]))
    assert plain["ledger"]["total_bytes"] - at_once["ledger"]["total_bytes"] > 2**29
    assert at_once["config"]["accumulate"] == 1
    # The host calls an optimizer for each parameter, which the card does not wait for.
    assert at_once["tokens_per_s"] == pytest.approx(plain["tokens_per_s"], rel=0.03)


@pytest.mark.parametrize("words", [("--lora", "8"), ("--pp", "2", "--framework", "fsdp2"), ()])
def test_a_step_inside_backward_needs_whole_gradients(words: tuple[str, ...]) -> None:
    gpus = "h200" if "--lora" in words else "2xh200"
    with pytest.raises(RequestError, match="frees gradients"):
        command(["llama-3.2-1b", "--gpus", gpus, "--step-in-backward", *words])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("llava-1.5-7b --gpus h100 --images 30", "17,280 tokens of a sample are its images"),
        ("llava-1.5-7b --gpus h100 --lengths 100,200", "not text alone"),
        ("llava-1.5-7b --gpus h100 --lora 8 --freeze all-but-projector", "every layer is frozen"),
        ("llama-3.1-8b --gpus h100 --batching pack", "all samples are as long"),
        ("llama-3.1-8b --gpus 8xh100 --freeze all-but-last-4 --pp 2", "without a pipeline"),
        ("llama-3.1-8b --gpus 8xh100 --freeze embeddings --framework megatron", "all of a model"),
        ("llama-3.1-8b --gpus 8xh100 --lengths 100,200 --cp 2", "without --cp"),
        ("llama-3.1-8b --gpus h100 --freeze embeddings --export launch", "knows no --freeze"),
        ("llama-3.1-8b --gpus h100 --lengths 100,200 --export launch", "knows no --lengths"),
    ],
)
def test_parts_and_lengths_that_cannot_be(words: str, problem: str) -> None:
    with pytest.raises(BadLayout, match=problem):
        command(words.split())


FIXED = ("--seq", "2048", "--micro-batch", "4", "--checkpoint", "none", "--loss", "full", "--offload", "none")


def test_a_plan_carries_its_range_and_says_where_it_is_tight(capsys: pytest.CaptureFixture[str]) -> None:
    """Nine of ten runs are within it: what is within a tenth of the end of the card may not fit."""
    words = ("llama-3.2-1b", "--precision", "bf16", *FIXED)
    roomy, near, over = (
        figures(capsys, *words, "--gpus", card, "--seq", "2176")["best"] for card in ("h200", "a100-40", "a10g")
    )
    low, high = roomy["total_range_bytes"]
    assert low < roomy["total_bytes"] == roomy["ledger"]["total_bytes"] < high
    assert roomy["peak_allocated_bytes"] < roomy["peak_reserved_bytes"] < roomy["total_bytes"]
    assert (roomy["fits"], roomy["tight"]) == (True, False)
    assert (over["fits"], over["tight"]) == (False, False)
    assert (near["fits"], near["tight"]) == (True, True)


def test_both_ends_of_a_pipeline_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "llama-3.2-1b",
        "--gpus",
        "4xh100",
        "--framework",
        "megatron",
        "--zero",
        "0",
        "--tp",
        "1",
        "--cp",
        "1",
        *FIXED,
    )
    piped, alone = (figures(capsys, *words, "--pp", pp)["best"] for pp in ("4", "1"))
    ends = piped["stages"]
    assert set(ends) == {"first stage", "last stage"}
    assert max(end["total_bytes"] for end in ends.values()) == piped["total_bytes"]
    assert alone["stages"] == {}


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (("--fp32-logits",), 4 * 128256),  # one more copy of the logits
        (("--dropout",), 16 * 2 * 2048),  # two masks of a byte in each block
        (("--lora", "8", "--lora-dropout"), None),
    ],
)
def test_choices_that_take_memory(words: tuple[str, ...], more: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("llama-3.2-1b", "--gpus", "h200", "--precision", "bf16", *FIXED)
    plain = figures(capsys, *common, *words[:-1])["best"]["peak_allocated_bytes"]
    with_it = figures(capsys, *common, *words)["best"]["peak_allocated_bytes"]
    tokens = 4 * 2048
    # Adapters of seven matrices: of one copy for those that read the same, each has its own, and a mask.
    expected = more if more is not None else 16 * ((3 * 3 - 2 + 3 + 2 * 3 - 2) * 2048 + 8192)
    assert with_it - plain == pytest.approx(expected * tokens, rel=0.01)


def test_a_loss_that_is_not_compiled_holds_more(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("llama-3.2-1b", "--gpus", "h200", "--precision", "bf16", *FIXED, "--compile")
    compiled, eager = (
        figures(capsys, *common, *more)["best"]["peak_allocated_bytes"] for more in ((), ("--eager-loss",))
    )
    assert eager - compiled == pytest.approx((12 - 6) * 128256 * 4 * 2048, rel=0.01)


def test_a_tiled_mlp_keeps_its_input_alone_and_is_made_twice(capsys: pytest.CaptureFixture[str]) -> None:
    common = (
        "llama-3.1-8b",
        "--gpus",
        "8xh100",
        "--framework",
        "deepspeed",
        "--zero",
        "3",
        "--seq",
        "512k",
        "--cp",
        "8",
    )
    common += (
        "--tp",
        "1",
        "--pp",
        "1",
        "--micro-batch",
        "1",
        "--checkpoint",
        "full",
        "--liger",
        "--offload",
        "activations",
    )
    whole, tiled = (figures(capsys, *common, *more)["best"] for more in ((), ("--tiled-mlp",)))
    assert tiled["total_bytes"] < 0.85 * whole["total_bytes"]
    assert tiled["tokens_per_s"] < whole["tokens_per_s"]


@pytest.mark.parametrize("words", [("--eager-loss",), ("--lora-dropout",)])
def test_flags_beside_what_they_belong_to(words: tuple[str, ...]) -> None:
    with pytest.raises(RequestError, match=words[0]):
        command([*SMALL, *words])


# A plan that fits, and plans that fit but for one part: a GPU, a host while it loads, a host, GPU and host.
VERDICTS = {
    "llama-3.1-70b --gpus 8xh100": [],
    "llama-3.1-70b --gpus 8xh100 --offload none": ["GPU"],
    "llama-3.1-70b --gpus 8xh100 --framework fsdp2 --zero 3 --tp 1 --pp 1 --cp 1": ["loading on the host"],
    "llama-3.1-8b --gpus 8xa100-40 --seq 2k --offload optimizer --zero 3 --host-memory 64g --pp 1": ["host"],
    "llama-3.1-8b --gpus 8xh100 --seq 2k --lora 16 --framework deepspeed --zero 2 --host-memory 8g": [],
}


@pytest.mark.parametrize("words", VERDICTS)
def test_report_status_figures_page_and_export_say_the_same(
    words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    parts, folder, argv = VERDICTS[words], Path("files"), words.split()
    status = command([*argv, "--json", str(tmp_path / "plan.json"), "--export", str(folder)])
    report = capsys.readouterr().out
    found = json.loads((tmp_path / "plan.json").read_text())
    fits = not parts
    assert status == (0 if fits else 1)
    assert found["fits"] == found["best"]["fits"] == fits
    assert [short["part"] for short in found["shortages"]] == parts
    assert found["loading"]["fits"] == ("loading on the host" not in parts)
    header = report.split("\n\n")[0]
    assert ("does not fit" in header) == (not fits) and max(map(len, report.splitlines())) <= 80
    assert folder.exists() == fits == (found["next_plan"] is None)
    assert ("nothing is written to" in report) == (not fits)
    # The reasons stand in the header, and on the page.
    page = tmp_path / "page.html"
    assert command([*argv, "--html", str(page)]) == status
    html = page.read_text()
    assert ('class="verdict ok">fits<' in html) == fits
    for short in found["shortages"]:
        assert short["words"] in " ".join(header.split())
        assert escape(short["words"]) in html


@pytest.mark.parametrize("words", [words for words, parts in VERDICTS.items() if parts])
def test_the_flags_of_the_next_plan_ask_for_exactly_that(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    following = figures(capsys, *words.split())["next_plan"]
    # Flags that are given again replace what was given.
    more = " ".join(following["flags"]).split()
    found = figures(capsys, *words.split(), *more)
    assert found["fits"] and found["searched"]["configurations"] <= 2
    assert found["best"]["config"] == following["plan"]["config"]
    assert found["best"]["total_bytes"] == following["plan"]["total_bytes"]
