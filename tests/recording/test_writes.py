"""What a script wrote, in a sentence and in a recording's file."""

from dataclasses import asdict

import pytest

from tonnage.recording.writes import MOST_FILES, ScriptWrites, WrittenFile, script_writes, writes_sentence

SAVED = (
    WrittenFile("/home/me/run/checkpoint-10/model.safetensors", 14 << 30, "new"),
    WrittenFile("/home/me/run/checkpoint-10/optimizer.pt", 1 << 30, "new"),
    WrittenFile("/home/me/run/old.pt", 0, "deleted"),
)
WRITES = ScriptWrites(written_count=2, written_bytes=15 << 30, deleted_count=1, files=SAVED)


def test_sentence_counts_sizes_and_says_what_to_do() -> None:
    assert writes_sentence(WRITES, folder="/home/me/run") == (
        "2 files written, 15.00 GiB (checkpoint-10/…), 1 deleted: discarded; use --keep DIR to keep them"
    )


def test_sentence_of_one_file_names_it() -> None:
    writes = ScriptWrites(fate="kept", kept_in="/tmp/kept", written_count=1, written_bytes=7, files=SAVED[:1])
    assert writes_sentence(writes, folder="/home/me/run") == (
        "1 file written, 7 B (checkpoint-10/model.safetensors): kept in /tmp/kept"
    )


def test_sentence_of_deletions_alone() -> None:
    writes = ScriptWrites(deleted_count=1, files=SAVED[2:])
    assert writes_sentence(writes) == "1 deleted: discarded; use --keep DIR to keep them"


def as_json(writes: ScriptWrites) -> dict[str, object]:
    values = asdict(writes)
    return values | {"files": list(values["files"])}


def test_reading_returns_what_was_written() -> None:
    assert script_writes(as_json(WRITES)) == WRITES


@pytest.mark.parametrize(
    "damage",
    [{"fate": "burnt"}, {"written_bytes": -1}, {"files": [{"path": 3}]}, {"files": [{}] * (MOST_FILES + 1)}],
)
def test_damaged_values_are_refused(damage: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"its|it lists"):
        script_writes(as_json(WRITES) | damage)
