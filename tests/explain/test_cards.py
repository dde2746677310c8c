import json
from dataclasses import replace

from support import gone_on, training_run
from tonnage.explain.total import on_all_cards
from tonnage.hardware import all_gpus, find_gpu
from tonnage.report.html.page import all_cards_section
from tonnage.report.runs.total import all_cards_figures, all_cards_sections


def test_every_card_has_an_answer_and_those_that_hold_it_are_larger() -> None:
    cards = on_all_cards(gone_on(batch=96, layers=12))
    assert {answer.gpu.key for answer in cards.answers} == {card.key for card in all_gpus() if card.runs_cuda}
    assert cards.smallest
    for answer in cards.answers:
        if answer.oom is None:
            assert answer.left_bytes > 0 and answer.gpu.memory_bytes >= cards.smallest.gpu.memory_bytes
    assert not any(a.oom is None for a in cards.answers if a.gpu.memory_bytes < 0.99 * cards.needed_bytes)


def test_a_row_is_cards_of_one_size_with_one_answer() -> None:
    rows = list(on_all_cards(gone_on(batch=96, layers=12)).rows())
    assert sum(map(len, rows)) > 2 * len(rows)
    for row in rows:
        sizes = [answer.gpu.memory_bytes for answer in row]
        assert max(sizes) <= 1.04 * min(sizes)
        assert len({answer.oom is None for answer in row}) == 1
    names = [[answer.gpu.key for answer in row] for row in rows]
    assert next(row for row in names if "rtx-4090" in row) == next(row for row in names if "rtx-3090" in row)


def test_the_table_fits_80_columns_and_the_figures_are_json() -> None:
    cards = on_all_cards(gone_on(batch=96, layers=12))
    lines = [line.plain for section in all_cards_sections(cards) for line in section]
    assert max(map(len, lines)) <= 80
    assert any("these hold it" in line for line in lines) and any("these do not" in line for line in lines)
    figures = json.loads(json.dumps(all_cards_figures(cards)))
    assert figures["smallest_card"] == cards.smallest.gpu.key if cards.smallest else None
    assert {row["fits"] for row in figures["cards"]} == {True, False}
    assert "rtx-4090" in all_cards_section(cards)


def test_what_no_card_holds_is_said() -> None:
    huge = training_run()
    huge.allocations[0] = replace(huge.allocations[0], requested_bytes=2**40, block_bytes=2**40)
    cards = on_all_cards(huge, [find_gpu("h200")])
    assert cards.smallest is None
    assert "no known card holds it" in next(all_cards_sections(cards)[0]).plain
