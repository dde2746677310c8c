"""The engine's memory in words: 80 columns, parts that sum to the whole, and keys for programs."""

import json
from dataclasses import replace

import pytest
from rich.text import Text

from serving_shapes import LLAMA_8B, LLAMA_70B, own_options
from tonnage.budget.serving.own_engine import OwnCard, own_card, own_weight_terms, share_bytes, widths_of
from tonnage.hardware import find_gpu
from tonnage.models.shape import ModelShape
from tonnage.report.serve import (
    Load,
    card_figures,
    card_lines,
    card_rows,
    kv_figures,
    kv_frame,
    kv_line,
    kv_rows,
)
from tonnage.serve.stats import KvLedger
from tonnage.units import GIB, MIB

LEDGER = KvLedger(
    used_bytes=30 * GIB, slack_bytes=140 * MIB, cached_bytes=5 * GIB, shared_bytes=GIB, reserved_bytes=2 * MIB,
    free_bytes=12 * GIB,
)  # fmt: skip


def card(shape: ModelShape = LLAMA_8B, gpu: str = "h200", **limits: object) -> OwnCard:
    found = find_gpu(gpu)
    return own_card(
        widths_of(shape), own_options(**{"context": 32768, **limits}), found, name=found.name,
        capacity_bytes=found.memory_bytes, limit_bytes=share_bytes(found.memory_bytes, 0.9),
        weight_bytes=sum(int(term.size_bytes) for term in own_weight_terms(shape, "bf16")),
    )  # fmt: skip


def words(lines: object) -> list[str]:
    return [line.plain if isinstance(line, Text) else str(line) for line in lines]  # type: ignore[attr-defined]


CARDS = [card(), card(kv="fp8", eager=True), card(LLAMA_70B, "l4"), replace(card(), measured_bytes=200 * GIB)]


@pytest.mark.parametrize("each", CARDS, ids=["bf16", "fp8", "too large", "over"])
def test_at_home_in_80_columns(each: OwnCard) -> None:
    lines = words(card_lines(each, model="a-rather-long-name-of-a-model-in-some-folder-70b"))
    assert max(map(len, lines)) <= 80
    assert not any(line != line.rstrip() for line in lines)


def test_the_card_is_accounted_for() -> None:
    found = card()
    assert sum(size for _, size in card_rows(found)) == found.capacity_bytes
    text = "\n".join(words(card_lines(found, model="llama")))
    for word in ("weights", "KV blocks", "CUDA graphs", "workspace", "context", "left"):
        assert f"\n  {word} " in text
    assert f"{found.pool.blocks:,} blocks × 2.00 MiB · {found.pool.tokens:,} tokens in pages of 16" in text
    assert f"{(found.pool.blocks - 1) // 2048} sequences at the full context of 32,768" in text
    assert "measured" not in text
    assert "CUDA graphs" not in "\n".join(words(card_lines(card(eager=True), model="llama")))


def test_what_was_measured_is_held_against_the_plan() -> None:
    within = "\n".join(words(card_lines(replace(card(), measured_bytes=100 * GIB), model="llama")))
    assert "measured 100.00 GiB" in within and "over" not in within
    over = replace(card(), measured_bytes=card().limit_bytes + 512 * MIB)
    assert words(card_lines(over, model="llama"))[-1].endswith(": 512.00 MiB over the budget")


def test_the_frame_shows_every_part_of_the_pool() -> None:
    lines = words(kv_frame(LEDGER, Load(running=12, waiting=3, tokens_per_s=4812.4, hit_rate=0.255, preemptions=7)))
    assert lines[0].startswith("  12 running · 3 waiting · 4,812 tokens/s  ")
    assert lines[0].endswith("pool 48.14 GiB")
    assert lines.pop() == "  26 % prefix hits · 7 preempted"
    assert [line.split()[0] for line in lines[1:]] == ["used", "shared", "cached", "slack", "reserved", "free"]
    assert sum(float(line.split()[3]) for line in lines[1:]) == pytest.approx(100, abs=0.3)
    assert max(map(len, lines)) <= 80


def test_a_line_for_logs() -> None:
    line = kv_line(replace(LEDGER, shared_bytes=0), Load(running=1))
    assert line == (
        "1 running · 0 waiting · 0 tokens/s · used 63.6 %, cached 10.6 %, slack 0.3 %, reserved 0.0 %, free 25.5 %"
    )


def test_an_empty_pool() -> None:
    nothing = KvLedger(
        used_bytes=0, slack_bytes=0, cached_bytes=0, shared_bytes=0, reserved_bytes=0, free_bytes=0
    )  # fmt: skip
    assert len(words(kv_frame(nothing, Load()))) == 7 and kv_line(nothing, Load())


def test_figures_for_programs() -> None:
    found = json.loads(json.dumps(card_figures(card())))
    assert sum(found["ledger"].values()) == found["capacity_bytes"]
    assert found["ledger"]["kv_cache_bytes"] == found["blocks"] * found["bytes_per_block"]
    assert kv_figures(LEDGER)["total_bytes"] == LEDGER.total == sum(size for _, size in kv_rows(LEDGER))
