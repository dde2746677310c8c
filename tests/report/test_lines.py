import pytest

from tonnage.report.lines import beside, cut, packed, report_width, table, wrapped


@pytest.mark.parametrize(("asked", "width"), [("140", 140), ("60", 60), ("20", 60), ("0", 80), ("wide", 80)])
def test_a_report_is_as_wide_as_asked_and_80_columns_where_nobody_asks(
    monkeypatch: pytest.MonkeyPatch, asked: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", asked)
    assert report_width() == width


def test_names_are_cut_in_the_middle_and_keep_their_end() -> None:
    assert cut("layers", 6) == "layers"
    assert cut("base_model.model.model.layers.11.mlp", 24) == "base_mo…el.layers.11.mlp"
    assert len(cut("a" * 100, 24)) == 24


def test_no_word_of_a_sentence_is_broken() -> None:
    sentence = "run it again with --no-prefix-cache and --verbose for all of it"
    lines = wrapped(sentence, width=24)
    assert " ".join(" ".join(lines).split()) == sentence
    assert max(map(len, lines)) <= 24


def test_lists_wider_than_a_line_are_broken_behind_commas() -> None:
    lines = wrapped("offload optimizer:nvme,parameters:nvme,activations", width=30)
    assert [line.strip() for line in lines] == ["offload optimizer:nvme,", "parameters:nvme, activations"]


def test_entries_are_packed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    entries = [f"step {number} 1.34 GiB" for number in range(5)]
    assert packed(entries, first="  peak of ") == [
        "  peak of step 0 1.34 GiB   step 1 1.34 GiB",
        "          step 2 1.34 GiB   step 3 1.34 GiB",
        "          step 4 1.34 GiB",
    ]


def test_words_beside_figures_take_as_many_lines_as_they_need() -> None:
    assert beside("chunked loss offload", 14, " 8 GiB", rest="    ") == ["  chunked loss   8 GiB", "    offload"]


def test_columns_that_can_be_spared_go_before_names_are_cut_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    rows = [("name" * 10, "1.00 GiB", "x" * 40)]
    assert table(rows, align="<><", names=(0,), spare=(2,)) == [f"  {'name' * 10}  1.00 GiB"]
    [line] = table([("name" * 10, "1.00 GiB", "x" * 30)], align="<><", names=(0,), spare=(2,))
    assert len(line) == 60 and line.endswith(f"1.00 GiB  {'x' * 30}")
