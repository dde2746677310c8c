"""The data of a pickle comes out as it went in, and nothing but data."""

import gzip
import io
import pickle
import pickletools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import BadSnapshot
from tonnage.recording.snapshot.schema import plain
from tonnage.recording.snapshot.stream import SnapshotLimits, Stream
from tonnage.recording.snapshot.unpickle import SharedKeysDict, load

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64), st.floats(allow_nan=False), st.text(max_size=20)
)
data = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=6),
        st.tuples(inner, inner),
        st.tuples(inner, inner, inner, inner),
        st.dictionaries(st.text(max_size=8), inner, max_size=6),
    ),
    max_leaves=40,
)


def unpickled(pickled: bytes, **limits: int) -> Any:
    chosen = SnapshotLimits(**limits)
    return as_plain(load(Stream(io.BytesIO(pickled), chosen), chosen))


def as_plain(value: Any) -> Any:
    if isinstance(value, SharedKeysDict):
        return {key: as_plain(item) for key, item in plain(value).items()}
    return [as_plain(item) for item in value] if isinstance(value, list) else value


def with_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: with_lists(item) for key, item in value.items()}
    return [with_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


@given(data, st.integers(2, 5), st.booleans())
def test_data_comes_out_as_it_went_in(value: Any, protocol: int, packed: bool) -> None:
    pickled = pickle.dumps(value, protocol)
    assert unpickled(gzip.compress(pickled) if packed else pickled) == with_lists(value)


@given(data)
def test_pickles_that_were_optimized_are_read_too(value: Any) -> None:
    assert unpickled(pickletools.optimize(pickle.dumps(value, 4))) == with_lists(value)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_is_shared_stays_shared(protocol: int) -> None:
    frames = [{"name": str(number)} for number in range(400)]
    found = unpickled(pickle.dumps([frames, frames[:5] * 50, frames[300:] * 3], protocol))
    assert found == [frames, frames[:5] * 50, frames[300:] * 3]


def test_a_pickle_longer_than_a_window(tmp_path) -> None:
    value = [{"number": number, "text": "x" * (number % 900)} for number in range(20_000)]
    assert unpickled(pickle.dumps(value, 4)) == value
    assert unpickled(gzip.compress(pickle.dumps(value, 4), 1)) == value


def test_sets_and_bytes_are_data() -> None:
    assert sorted(unpickled(pickle.dumps({1, 2, 3}, 4))) == [1, 2, 3]
    assert unpickled(pickle.dumps([b"ab", bytearray(b"cd"), frozenset("e")], 5)) == [b"ab", b"cd", ["e"]]


def test_dicts_of_one_shape_share_their_keys() -> None:
    limits = SnapshotLimits()
    rows = load(Stream(io.BytesIO(pickle.dumps([{"a": 1, "b": 2}, {"a": 3, "b": 4}], 4)), limits), limits)
    assert rows[0].keys is rows[1].keys


def test_a_large_dict_comes_in_batches() -> None:
    value = {str(number): number for number in range(1001)}
    assert unpickled(pickle.dumps(value, 4)) == value


@pytest.mark.parametrize(
    ("limits", "value", "words"),
    [
        ({"string_bytes": 9}, "0123456789", "10 bytes long; 9 are read"),
        ({"integer_bytes": 2}, 2**40, "integer of 6 bytes"),
        ({"dict_keys": 3}, {"a": 1, "b": 2, "c": 3, "d": 4}, "too many"),
        ({"dict_shapes": 1}, [{"a": 1}, {"b": 1}], "unlike the 1 kinds"),
        ({"object_bytes": 10**6}, [[] for _ in range(10**6)], "more than 976.56 KiB of memory"),
        ({"memo_entries": 10**5}, [[] for _ in range(10**6)], "more than 100,000 memo entries"),
        ({"inflated_bytes": 10**5}, ["x" * 60_000, "y" * 60_000], "holds more than 97.66 KiB"),
        ({"file_bytes": 10**5}, ["x" * 60_000, "y" * 60_000], "larger than 97.66 KiB"),
    ],
)
def test_every_limit_has_its_words(limits: dict[str, int], value: Any, words: str) -> None:
    with pytest.raises(BadSnapshot, match=words):
        unpickled(pickle.dumps(value, 4), **limits)


def test_a_refusal_names_the_opcode_and_where_it_stands() -> None:
    with pytest.raises(BadSnapshot, match="GLOBAL at offset 2 is not data: it is refused and nothing was run"):
        unpickled(b"\x80\x04cos\nsystem\n.")
