import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.tiny import EOS, byte_fallback_tokenizer, byte_level_tokenizer
from tonnage.errors import BadModel, MissingPart, RequestError
from tonnage.serve.text import TextStream, Tokenizer

BYTE_LEVEL = Tokenizer(byte_level_tokenizer())
FALLBACK = Tokenizer(byte_fallback_tokenizer())
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, FALLBACK], ids=["byte-level", "byte-fallback"])

texts = st.text(st.sampled_from("the lazy 🚢é好, dog \n") | st.characters(codec="utf-8"), max_size=60)
cuts = st.lists(st.integers(1, 5), min_size=1)


def pieces(ids: list[int], sizes: list[int]) -> list[list[int]]:
    parts, at = [], 0
    while at < len(ids):
        size = sizes[len(parts) % len(sizes)]
        parts.append(ids[at : at + size])
        at += size
    return parts


def streamed(stream: TextStream, ids: list[int], sizes: list[int]) -> str:
    return "".join(stream.push(part) for part in pieces(ids, sizes)) + stream.finish()


@given(text=texts, sizes=cuts)
@settings(max_examples=300)
@BOTH
def test_the_pieces_are_the_whole_text(tokenizer: Tokenizer, text: str, sizes: list[int]) -> None:
    ids = tokenizer.encode(text)
    assert streamed(TextStream(tokenizer), ids, sizes) == tokenizer.decode(ids)


@given(text=texts)
@settings(max_examples=300)
@BOTH
def test_a_character_is_never_halved(tokenizer: Tokenizer, text: str) -> None:
    stream = TextStream(tokenizer)
    whole = "\ufffd" in text
    assert all(whole or "\ufffd" not in stream.push([token]) for token in tokenizer.encode(text))


@given(ids=st.lists(st.integers(4, 383), max_size=400), sizes=cuts)
@settings(max_examples=200)
def test_bytes_that_are_no_text_come_through(ids: list[int], sizes: list[int]) -> None:
    assert streamed(TextStream(BYTE_LEVEL), ids, sizes) == BYTE_LEVEL.decode(ids)


@pytest.mark.parametrize("junk", range(9))
def test_a_character_after_bytes_that_are_none_is_whole(junk: int) -> None:
    numbers = {BYTE_LEVEL.token_bytes(number): number for number in range(4, 384)}
    ids = [numbers[b"\xa1"]] * junk + [numbers[bytes([byte])] for byte in "🚢".encode()]
    assert streamed(TextStream(BYTE_LEVEL), ids, [1]) == "\ufffd" * junk + "🚢"


def test_bytes_that_never_become_a_character_are_not_held_for_ever() -> None:
    (half,) = [number for number in range(384) if BYTE_LEVEL.token_bytes(number) == b"\x82"]
    stream = TextStream(BYTE_LEVEL)
    shown = [stream.push([half]) for _ in range(2000)]
    assert "".join(shown).count("\ufffd") > 1990
    assert len(stream._ids) < 300, "the window stays short"


def test_a_long_text_is_decoded_in_a_short_window() -> None:
    longest = 0

    class Measured(Tokenizer):
        def decode(self, ids: list[int], *, special: bool = False) -> str:  # type: ignore[override]
            nonlocal longest
            longest = max(longest, len(ids))
            return super().decode(ids, special=special)

    text = "the quick brown fox 你好 jumps over " * 100
    tokenizer = Measured(byte_level_tokenizer())
    ids = tokenizer.encode(text)
    assert streamed(TextStream(tokenizer), ids, [1]) == text
    assert longest < 64


@given(text=texts, stops=st.lists(st.text("the lazy", min_size=1, max_size=4), min_size=1, max_size=4), sizes=cuts)
@settings(max_examples=400)
def test_a_stop_string_ends_the_text_as_if_it_came_letter_by_letter(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    ends = [end for end in range(1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    expected = text
    if ends:
        longest = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
        expected = text[: ends[0] - len(longest)]
    stream = TextStream(BYTE_LEVEL, stops)
    parts = [stream.push(part) for part in pieces(BYTE_LEVEL.encode(text), sizes)]
    assert stream.stopped == bool(ends)
    assert "".join(parts) + stream.finish() == expected
    for stop in stops:
        assert all(not "".join(parts[:end]).endswith(stop) for end in range(1, len(parts) + 1))


def test_what_may_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(BYTE_LEVEL, ["lazy dog"])
    assert "".join(stream.push([token]) for token in BYTE_LEVEL.encode("the lazy d")) == "the "
    assert "".join(stream.push([token]) for token in BYTE_LEVEL.encode("ay")) == "lazy day"
    assert "".join(stream.push([token]) for token in BYTE_LEVEL.encode(" lazy dog.")) == " "
    assert stream.stopped
    assert stream.push(BYTE_LEVEL.encode("more")) == "" == stream.finish()


def test_the_first_word_keeps_its_space_after_a_prompt() -> None:
    prompt, word = FALLBACK.encode("over"), FALLBACK.encode("the")
    assert TextStream(FALLBACK, prompt=prompt).push(word) == " the"
    assert TextStream(FALLBACK).push(word) == "the"


def test_a_character_that_the_prompt_began_is_finished() -> None:
    ids = BYTE_LEVEL.encode("✓")
    assert len(ids) > 1
    assert TextStream(BYTE_LEVEL, prompt=ids[:-1]).push(ids[-1:]) == "✓"


def test_special_tokens_are_not_shown() -> None:
    ids = BYTE_LEVEL.encode(f"the fox{EOS}")
    assert streamed(TextStream(BYTE_LEVEL), ids, [1]) == "the fox"
    assert BYTE_LEVEL.token_text(ids[-1]) == EOS


@BOTH
def test_the_bytes_of_tokens_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    text = "the dog ✓ 🚢 好é"
    joined = b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode(text))
    assert joined.decode().removeprefix(" ") == text


def test_a_token_keeps_its_leading_space() -> None:
    assert [FALLBACK.token_text(token) for token in FALLBACK.encode("the th")] == [" th", "e", " th"]


def test_a_conversation_is_laid_out_by_the_template() -> None:
    ids = BYTE_LEVEL.chat([{"role": "user", "content": "hi"}])
    assert BYTE_LEVEL.decode(ids, special=True) == f"<|user|>hi{EOS}<|assistant|>"


def test_the_template_s_complaint_is_the_error() -> None:
    with pytest.raises(RequestError, match="the user speaks first"):
        BYTE_LEVEL.chat([{"role": "assistant", "content": "hi"}])


def test_no_template_is_said_in_words() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        FALLBACK.chat([{"role": "user", "content": "hi"}])


def test_a_tokenizer_is_loaded_from_a_folder(tmp_path: Path) -> None:
    byte_level_tokenizer().save_pretrained(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded is not None
    assert loaded.decode(loaded.encode("ça va 🚢")) == "ça va 🚢"
    assert loaded.chat([{"role": "user", "content": "hi"}]) == BYTE_LEVEL.chat([{"role": "user", "content": "hi"}])


def test_a_folder_without_tokenizer_has_none(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None


def test_a_damaged_tokenizer_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadModel, match="cannot be read"):
        Tokenizer.load(tmp_path)


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", null]}}'
    )
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(BadModel):
        Tokenizer.load(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_without_transformers_the_hint_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPart, match="transformers"):
        Tokenizer.load(tmp_path)
