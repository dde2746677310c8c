"""`tonnage plan rl`: its words, its report at 80 columns, its exit status, its figures."""

import json
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
