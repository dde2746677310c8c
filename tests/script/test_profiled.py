"""Notes among the profiler's events: small numbers in the place of ids, and what the engine does by itself."""

from tonnage.script.profiled import BackwardStreams, NoteReader


def test_streams_are_numbered_as_they_appear() -> None:
    notes = NoteReader()
    assert notes.read("stream set_stream 35") == ("stream", "set_stream", ("1",))
    assert notes.read("stream set_stream 0") == ("stream", "set_stream", ("0",))
    assert notes.read("stream synchronize_stream 67") == ("stream", "synchronize_stream", ("2",))
    assert notes.read("stream synchronize") == ("stream", "synchronize", ())


def test_who_waits_for_an_event_means_the_last_time_that_it_was_recorded() -> None:
    notes = NoteReader()
    assert notes.read("stream wait_event 9000 0") is None
    assert notes.read("stream record_event 9000 35") == ("stream", "record_event", ("1", "1"))
    assert notes.read("stream record_event 9000 35") == ("stream", "record_event", ("2", "1"))
    assert notes.read("stream wait_event 9000 0") == ("stream", "wait_event", ("2", "0"))
    assert notes.read("stream synchronize_event 9000") == ("stream", "synchronize_event", ("2",))


def test_an_event_of_the_step_before_has_the_number_of_its_like_in_this_one() -> None:
    notes = NoteReader(["stream record_event 1 0", "stream record_event 2 35"])
    assert notes.read("stream wait_event 2 0") == ("stream", "wait_event", ("2", "0"))
    assert notes.read("stream record_event 3 0") == ("stream", "record_event", ("1", "0"))


def test_collectives_are_numbered_by_themselves() -> None:
    notes = NoteReader(["collective all_reduce 7 4096 8 1 1"])
    assert notes.read("collective all_gather_into_tensor 8 4096 8 1 1") == (
        "collective", "all_gather_into_tensor", ("1", "4096", "8", "1", "1"),
    )  # fmt: skip
    assert notes.read("stream wait_collective 8") == ("stream", "wait_collective", ("1",))
    assert notes.read("stream future_collective 9") is None


def names(found: object) -> list[tuple[str, tuple[str, ...]]]:
    return [(name, values) for _, name, values in found]  # type: ignore[attr-defined]


def test_a_node_runs_on_the_stream_of_its_operator_after_what_ran_before() -> None:
    streams = BackwardStreams(0)
    assert names(streams.runs(0, 1, is_node=False)) == []
    streams.noted(0, ("stream", "set_stream", ("1",)))
    assert streams.current
    assert names(streams.runs(0, 2, is_node=False)) == []
    streams.noted(0, ("stream", "set_stream", ("0",)))
    (record, _), (wait, values), (switch, (stream,)) = names(streams.runs(7, 2, is_node=True))
    assert (record, wait, switch, stream) == ("record_event", "wait_event", "set_stream", "1")
    assert values[1] == "1"
    assert names(streams.runs(7, -1, is_node=False)) == []  # an operator of the node
    assert [name for name, _ in names(streams.runs(7, 1, is_node=True))] == ["record_event", "wait_event", "set_stream"]
    assert names(streams.runs(0, -1, is_node=False))[-1][1][1] == "0"  # the caller goes on after all of it


def test_where_nobody_switches_nothing_is_noted() -> None:
    streams = BackwardStreams(0)
    for thread, number, is_node in ((0, 1, False), (0, 2, False), (7, 2, True), (7, 1, True), (0, -1, False)):
        assert names(streams.runs(thread, number, is_node=is_node)) == []
    assert not streams.current
