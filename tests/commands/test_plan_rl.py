"""`tonnage plan rl`: its words, its report at 80 columns, its exit status, its figures."""

import json
from html import escape
from pathlib import Path

import pytest

from tonnage.commands import plan_rl
from tonnage.commands.options import parser_of
from tonnage.errors import TonnageError


def report(capsys: pytest.CaptureFixture[str], words: str) -> tuple[int, str]:
    status = plan_rl.command(words.split())
    return status, capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        "qwen2.5-1.5b --gpus h200",
        "qwen2.5-1.5b --gpus h200 --explain --reference copy --offload all",
        "qwen2.5-7b --gpus rtx-4090 --lora 16 --prompts 2",
        "qwen2.5-1.5b --gpus h200 --engine tonnage --share-weights --precision bf16",
    ],
)
def test_the_report_has_80_columns(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, out = report(capsys, words)
    assert max(map(len, out.splitlines())) <= 80
    assert ("does not fit" in out) == (status == 1)
    assert "train actor" in out and "← peak" in out


def test_figures_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = report(capsys, "qwen2.5-1.5b --gpus h200 --algorithm ppo --prompts 64 --reward qwen2.5-0.5b --json -")
    found = json.loads(out)
    assert status == 0 and found["fits"] and found["request"]["group"] == 1
    assert found["request"]["critic"] == "qwen2.5-1.5b" and found["request"]["reference"] == "copy"
    for phase in found["best"]["timeline"]:
        assert sum(one["size_bytes"] for one in phase["held"]) == phase["total_bytes"] == sum(phase["ledger"].values())
    seconds = sum(phase["seconds"] for phase in found["best"]["timeline"])
    assert found["best"]["step_s"] == pytest.approx(seconds)


def test_what_does_not_fit_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = report(capsys, "qwen2.5-7b --gpus rtx-4090 --prompts 1 --lora 16")
    assert status == 1 and "missing" in out and "--base nf4" in out


@pytest.mark.parametrize(
    "words",
    [
        "qwen2.5-1.5b",
        "qwen2.5-1.5b --gpus h200 --sleep 2 --no-sleep",
        "qwen2.5-1.5b --gpus h200 --offload everything",
        "qwen2.5-1.5b --gpus h200 --lora 0",
        "qwen2.5-1.5b --gpus h200 --lora-targets mlp",
        "qwen2.5-1.5b --gpus h200 --prompts 0",
        "qwen2.5-1.5b --gpus h200 --prompt 0",
        "bert-base-uncased --gpus h200",
    ],
)
def test_nonsense_is_refused(words: str) -> None:
    with pytest.raises(TonnageError) as refused:
        plan_rl.command(words.split())
    assert refused.value.exit_code == 2


def test_the_reference_is_as_in_trl() -> None:
    parse = parser_of("plan rl").parse_args
    chosen = {
        words: plan_rl._reference(parse(["m", *words.split()]))
        for words in ("", "--algorithm dapo", "--algorithm rloo", "--algorithm rloo --lora 8", "--reference copy")
    }
    assert list(chosen.values()) == ["none", "none", "copy", "adapters-off", "copy"]


def test_the_page_has_a_bar_for_each_phase_and_nothing_to_fetch(tmp_path: Path) -> None:
    page = tmp_path / "rl.html"
    assert plan_rl.command(["qwen2.5-0.5b", "--gpus", "h100", "--reference", "copy", "--html", str(page)]) == 0
    text = page.read_text()
    for name in ("rollout", "reference", "old log-probs", "train actor", "sync"):
        assert f"<td>{name}</td>" in text
    assert 'class="swatch c-kv_cache"' in text and "http" not in text.replace("http-equiv", "").replace(
        "http://www.w3.org", ""
    )


# What is short in each: nothing, a GPU, the host of what is offloaded, the host that loads.
VERDICTS = {
    "qwen2.5-1.5b --gpus h200": [],
    "qwen2.5-7b --gpus h200": ["GPU"],
    "qwen2.5-1.5b --gpus h200 --offload optimizer --precision bf16 --host-memory 2g": ["host"],
    "qwen2.5-7b --gpus 8xh100 --framework fsdp2 --zero 3 --host-memory 300g --rollout-gpus 0": ["loading on the host"],
}


@pytest.mark.parametrize("words", VERDICTS)
def test_report_status_figures_and_page_say_the_same(
    words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parts, file, page = VERDICTS[words], tmp_path / "plan.json", tmp_path / "page.html"
    status, out = report(capsys, f"{words} --json {file}")
    found = json.loads(file.read_text())
    assert found["fits"] == found["best"]["fits"] == (status == 0) == (not parts)
    assert [short["part"] for short in found["best"]["shortages"]] == parts
    assert ("does not fit" in out.splitlines()[1]) == bool(parts)
    assert max(map(len, out.splitlines())) <= 80 and " free    -" not in out
    assert report(capsys, f"{words} --html {page}")[0] == status
    for short in found["best"]["shortages"]:
        assert short["words"] in " ".join(out.split()) and escape(short["words"]) in page.read_text()


@pytest.mark.parametrize("words", [words for words, parts in VERDICTS.items() if parts])
def test_the_flags_of_the_next_plan_ask_for_it(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out = report(capsys, f"{words} --json -")
    following = json.loads(out)["remedies"][0]
    status, out = report(capsys, f"{words} {' '.join(following['flags'])} --json -")
    best = json.loads(out)["best"]
    assert status == 0
    assert {name: best[name] for name in ("trainer", "engine", "offload")} == {
        name: following[name] for name in ("trainer", "engine", "offload")
    }
