"""Random programs that ran on an H200 (torch 2.11): the model must do, count, hold and say the same.

`record.py` made them. Two things are not the allocator's and are left out: the order in which a hash table of private
pools gives segments back, and what other processes held at an out-of-memory.
"""

import gzip
import json
import re
from pathlib import Path

import pytest

from tonnage.allocator import AllocatorSettings, BadAllocatorSettings, CachingAllocator, OutOfMemory
from tonnage.allocator.replay import ACQUIRING, RELEASING, replay

RECORDED = json.loads(gzip.decompress((Path(__file__).parent / "data" / "recorded.json.gz").read_bytes()))
TEXTS = RECORDED.pop("texts")
# In these, when a stream caught up was a matter of time: they are replayed from their events instead.
TIMED = ("streams", "expandable-streams")
ALONE = ("full", "full-streams", "expandable-full")


class Rerun:
    """One recorded program on the model."""

    def __init__(self, recorded: dict) -> None:
        self.given = [event for event in recorded["events"] if event[0] in ACQUIRING]
        self.used = 0
        self.events: list[list] = []
        self.messages: list[tuple[str, str]] = []
        self.blocks: dict = {}
        self.allocator = CachingAllocator(
            recorded["capacity_bytes"],
            AllocatorSettings.parse(recorded["conf"], torch_version=(2, 11)),
            outside_bytes=recorded["capacity_bytes"] - recorded["free_bytes"],
            observer=self.observe,
            placement=lambda size: self.given[self.used][1],
        )
        for name, *words in recorded["ops"]:
            getattr(self, name)(*words)

    def observe(self, action: str, address: int, size: int, stream: int) -> None:
        self.used += action in ACQUIRING
        self.events.append([action, address, size, stream])

    def alloc(self, key: int, size: int, stream: int) -> None:
        self.blocks[key] = block = self.allocator.malloc(size, stream)
        self.events.append(["alloc", block.address, size, stream])

    def oom(self, size: int, stream: int, message: str) -> None:
        with pytest.raises(OutOfMemory) as caught:
            self.allocator.malloc(size, stream)
        self.messages.append((caught.value.message, message))

    def free(self, key: int) -> None:
        block = self.blocks.pop(key)
        self.events.append(["free_requested", block.address, block.requested_bytes, block.stream])
        self.events.append(["free_completed", *self.events[-1][1:]])
        self.allocator.free(block)

    def record_stream(self, key: int, stream: int) -> None:
        self.allocator.record_stream(self.blocks[key].address, stream)

    def sync(self) -> None:
        self.allocator.process_events()

    def empty_cache(self) -> None:
        self.allocator.empty_cache()

    def fraction(self, fraction: float) -> None:
        self.allocator.set_memory_fraction(fraction)

    def settings(self, text: str) -> None:
        self.allocator.settings = self.allocator.settings.changed_by(text)

    def reset_peak(self) -> None:
        self.allocator.reset_peak()

    def reset_accumulated(self) -> None:
        self.allocator.reset_accumulated()

    def create_pool(self, pool: list[int]) -> None:
        self.allocator.create_pool(tuple(pool))

    def begin_pool(self, pool: list[int]) -> None:
        self.allocator.begin_allocate_to_pool(tuple(pool))

    def end_pool(self, pool: list[int]) -> None:
        self.allocator.end_allocate_to_pool(tuple(pool))
        self.allocator.release_pool(tuple(pool))

    def delete_pool(self, pool: list[int]) -> None:
        self.allocator.release_pool(tuple(pool))
        self.allocator.empty_cache(tuple(pool))


def comparable(events: list[list], *, alone: bool) -> list[list]:
    """Runs of segments given back in one order, and out-of-memory without what was free beside other processes."""
    kept: list[list] = []
    run: list[list] = []
    for event in [*events, None]:
        if event is not None and event[0] in RELEASING:
            run.append(event)
            continue
        kept += sorted(run)
        run = []
        if event is not None:
            kept.append(event if alone or event[0] != "oom" else ["oom", *event[2:]])
    return kept


def plain(segments: list[dict]) -> list[dict]:
    kept = json.loads(json.dumps(segments))
    for segment in kept:
        for each in (segment, *segment["blocks"]):
            del each["frames"]
    return kept


def without_processes(message: str) -> str:
    return re.sub(r"of which \S+ \S+ is free\. |(Including .*?|Process \d+) has \S+ \S+ memory in use\. ", "", message)


@pytest.mark.parametrize("name", [name for name in RECORDED if name not in TIMED])
def test_the_model_does_what_the_gpu_did(name: str) -> None:
    recorded = RECORDED[name]
    rerun = Rerun(recorded)
    alone = name in ALONE
    assert comparable(rerun.events, alone=alone) == comparable(recorded["events"], alone=alone)
    assert rerun.allocator.memory_stats() == recorded["stats"]
    assert plain(rerun.allocator.snapshot()) == recorded["segments"]
    assert rerun.allocator.settings.as_snapshot() == recorded["allocator_settings"]
    for ours, theirs in rerun.messages:
        assert without_processes(ours) == without_processes(theirs)


@pytest.mark.parametrize("name", ALONE)
def test_a_full_card_says_the_same_free_memory(name: str) -> None:
    messages = Rerun(RECORDED[name]).messages
    assert messages
    for ours, theirs in messages:
        assert re.search(r"of which \S+ \S+ is free", ours)[0] == re.search(r"of which \S+ \S+ is free", theirs)[0]


@pytest.mark.parametrize("name", [name for name in RECORDED if name != "switching" and "pools" not in name])
def test_the_events_replay(name: str) -> None:
    """Events tell neither a change of settings nor a private pool, so programs with these are left out."""
    recorded = RECORDED[name]
    events = [tuple(event) for event in recorded["events"]]
    assert replay(events, AllocatorSettings.parse(recorded["conf"])).differences == []


def test_settings_are_parsed_as_on_the_gpu() -> None:
    settings = AllocatorSettings()
    for row in TEXTS:
        try:
            settings = settings.changed_by(row["text"], torch_version=(2, 11))
            error = None
        except BadAllocatorSettings as caught:
            error = caught
        assert (error is None) == (row["error"] is None), row
        if error is not None:
            assert error.pytorch_type.__name__ == row["error"][0]
            assert str(error) in row["error"][1]
        else:
            assert settings.as_snapshot() == row["settings"], row
