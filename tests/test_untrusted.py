import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.untrusted import MOST_DEPTH, Unreadable, clipped, parse_json, parse_text, printable, read_bytes

values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(st.sampled_from('[]{}"\\\n é𝔘'))),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(st.sampled_from('[{"\\')), inner)),
)


@given(values, st.booleans())
def test_what_is_json_is_read_whatever_its_strings_hold(value: object, is_ascii: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=is_ascii).encode()) == value


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('["]}", [', "]]")])
def test_brackets_are_followed_so_far(opening: str, closing: str) -> None:
    levels = MOST_DEPTH // opening.replace('"]}"', "").count("[") if "[" in opening else MOST_DEPTH
    assert parse_json((opening * levels + "0" + closing * levels).encode())
    for more in (levels + 1, 1_000, 100_000):
        with pytest.raises(Unreadable, match="nested too deeply"):
            parse_json((opening * more + "0" + closing * more).encode())


def test_brackets_in_strings_do_not_count() -> None:
    text = "[" * 1000 + '\\"' + "{" * 1000
    assert parse_json(json.dumps({"a": [text, "\\", text]}).encode()) == {"a": [text, "\\", text]}


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"", "not JSON"), (b"{}}", "not JSON"), (b"\xff", "not text"), (b"9" * 5000, "not JSON"), (b"[", "not JSON")],
)
def test_what_is_no_json_is_refused_in_words(data: bytes, words: str) -> None:
    with pytest.raises(Unreadable, match=words):
        parse_json(data)


def test_lists_of_nothing_take_too_much_memory() -> None:
    with pytest.raises(Unreadable, match="lists and objects, and little in them"):
        parse_json(b"[" + b"[]," * 12 * 2**20 + b"0]")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('"a\\u001b[2J"', "a?[2J"),
        ('"\\ud800"', "?"),
        ('"\\uDC00x"', "?x"),
        ('"\\ud83d\\ude00"', "😀"),
        ('"\\\\u001b"', "\\u003f"),
        ('"\\u009b\x9b"', "??"),
        ('"a\\tb\\n"', "a\tb\n"),
    ],
)
def test_what_moves_a_cursor_is_a_question_mark(text: str, said: str) -> None:
    assert parse_json(text.encode()) == said


def test_texts_have_no_control_characters() -> None:
    assert parse_text(b"a\x1b[2J\tb\r\n\xff") == "a?[2J\tb\r\n\ufffd"
    assert printable("a\x1b\n\ud800é") == "a???é"


def test_a_long_text_loses_its_middle() -> None:
    assert clipped("one\ntwo\x07") == "one\ntwo?"
    assert clipped("a" * 1000 + "b" * 1000, 20) == "a" * 10 + " … " + "b" * 10


def test_files_are_read_within_their_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 2**20)
    assert len(read_bytes(path, 2**20)) == 2**20
    with pytest.raises(Unreadable, match="holds more than 1 MiB"):
        path.write_bytes(b"x" * (2**20 + 1))
        read_bytes(path, 2**20)


def test_a_bomb_is_refused_by_its_ratio(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(bytes(64 * 2**20), 1))
    with pytest.raises(Unreadable, match="holds more than"):
        read_bytes(path, 2**30, inflate=True)
    path.write_bytes(gzip.compress(os.urandom(2**20), 1))
    assert len(read_bytes(path, 2**30, inflate=True)) == 2**20


@pytest.mark.parametrize(
    "data", [b"\x1f\x8bnothing", gzip.compress(b"hello")[:-6], gzip.compress(b"a" * 99)[:-20] + bytes(20)]
)
def test_a_damaged_gzip_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(Unreadable, match="is damaged"):
        read_bytes(tmp_path / "file", 2**20, inflate=True)


def test_no_one_waits_for_a_pipe_or_reads_a_device_or_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "loop", Path("/dev/zero"), tmp_path / "none", Path("a\0b")):
        with pytest.raises(Unreadable, match="cannot be read: "):
            read_bytes(path, 2**20)


def test_a_byte_order_mark_before_json_is_no_part_of_it() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
