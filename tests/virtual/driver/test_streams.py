"""Time on a card that computes nothing: how far streams are behind the host, and what waits for what."""

import ctypes
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cuda_build import needs_cuda_build, run
from tonnage.hardware import find_gpu
from tonnage.virtual.cuda.releases import release_of
from tonnage.virtual.driver import loading
from tonnage.virtual.driver.build import CORE, library_folder

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
READY, NOT_READY = 0, 600
LONG = 1e12  # operations that take an H200 a millisecond


class Card:
    """The streams and events of one card."""

    def __init__(self, core: ctypes.CDLL) -> None:
        core.tn_new_stream.restype = core.tn_new_event.restype = ctypes.c_void_p
        core.tn_event_elapsed_ms.restype = ctypes.c_float
        self.core = core

    def stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.core.tn_new_stream(1, 0))

    def compute(self, stream: ctypes.c_void_p, operations: float = LONG) -> None:
        self.core.tn_queue_product(stream, ctypes.c_double(operations))

    def event(self, stream: ctypes.c_void_p) -> ctypes.c_void_p:
        event = ctypes.c_void_p(self.core.tn_new_event(0))
        self.core.tn_event_record(event, stream)
        return event

    def is_done(self, event: ctypes.c_void_p) -> bool:
        return {READY: True, NOT_READY: False}[self.core.tn_event_query(event)]


@pytest.fixture
def card() -> Iterator[Card]:
    core = ctypes.CDLL(str(library_folder(13) / CORE))
    described = loading.NativeCard.in_dll(core, "tn_card")
    before = bytes(described)
    described.memory_bytes = 0
    loading.describe(core, replace(find_gpu("h200"), overheads={}), release_of((2, 11)), 1)
    yield Card(core)
    ctypes.memmove(ctypes.addressof(described), before, len(before))


def test_work_is_done_when_somebody_waited_for_it(card: Card) -> None:
    stream = card.stream()
    card.compute(stream)
    event = card.event(stream)
    assert not card.is_done(event)
    card.core.tn_event_synchronize(event)
    assert card.is_done(event)


def test_a_busy_host_finds_short_work_done(card: Card) -> None:
    one, other = card.stream(), card.stream()
    card.compute(one, 1e9)
    event = card.event(one)
    card.compute(other, 1e9)  # the host spends more time on this than the card on that
    assert card.is_done(event)


def test_a_host_that_runs_ahead_finds_nothing_done(card: Card) -> None:
    stream = card.stream()
    events = []
    for _ in range(10):
        card.compute(stream)
        events.append(card.event(stream))
    assert not any(card.is_done(event) for event in events[1:])


def test_asking_again_and_again_ends(card: Card) -> None:
    stream = card.stream()
    card.compute(stream)
    event = card.event(stream)
    asked = 0
    while not card.is_done(event):
        asked += 1
    assert 0 < asked < 10_000


def test_a_stream_that_waits_for_another_is_done_after_it(card: Card) -> None:
    one, other = card.stream(), card.stream()
    card.compute(one)
    card.core.tn_stream_wait(other, card.event(one))
    last = card.event(other)
    assert not card.is_done(last)
    card.core.tn_stream_synchronize(one)
    assert card.is_done(last)


def test_copies_take_as_long_as_the_link_needs(card: Card) -> None:
    stream, size = card.stream(), 64 * 10**9
    host = ctypes.create_string_buffer(1)
    begin = card.event(stream)
    card.core.tn_queue_copy(stream, host, host, ctypes.c_size_t(size))
    assert card.core.tn_event_elapsed_ms(begin, card.event(stream)) == pytest.approx(1000, rel=0.01)


def test_the_host_waits_for_a_copy_to_memory_that_is_not_pinned(card: Card) -> None:
    card.core.tn_take_memory.restype = card.core.tn_host_alloc.restype = ctypes.c_void_p
    stream, size = card.stream(), ctypes.c_size_t(64 << 20)
    on_card = ctypes.c_void_p(card.core.tn_take_memory(0, ctypes.c_int64(size.value)))
    pinned = ctypes.c_void_p(card.core.tn_host_alloc(size, 1))
    pageable = ctypes.create_string_buffer(1)

    def is_done_after_copy(target: object, source: object) -> bool:
        card.core.tn_queue_copy(stream, target, source, size)
        return card.is_done(card.event(stream))

    assert not is_done_after_copy(pinned, on_card)
    assert is_done_after_copy(pageable, on_card)
    assert not is_done_after_copy(on_card, pageable)
    card.core.tn_host_free(pinned)


def test_the_first_launch_of_a_kernel_costs_the_host_more(card: Card) -> None:
    stream, other, kernel = card.stream(), card.stream(), ctypes.create_string_buffer(1)

    def events_done_during_a_launch() -> bool:
        card.compute(stream, 0.3e12)
        event = card.event(stream)
        card.core.tn_queue_kernel(other, kernel, ctypes.c_int64(32))
        done = card.is_done(event)
        card.core.tn_device_synchronize()
        return done

    assert [events_done_during_a_launch() for _ in range(2)] == [True, False]


@needs_cuda_build
def test_what_a_collective_kept_is_free_once_the_host_has_waited(tmp_path: Path) -> None:
    done = run("--gpu", "h200", Path(__file__).parent / "scripts" / "buckets.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
