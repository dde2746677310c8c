"""Notes among the profiler's events: small numbers in the place of ids."""

from tonnage.script.profiled import Notes


def test_streams_are_numbered_as_they_appear() -> None:
    notes = Notes()
    assert notes.read("stream set_stream 35") == ("stream", "set_stream", ("1",))
    assert notes.read("stream set_stream 0") == ("stream", "set_stream", ("0",))
    assert notes.read("stream synchronize_stream 67") == ("stream", "synchronize_stream", ("2",))
    assert notes.read("stream synchronize") == ("stream", "synchronize", ())


def test_who_waits_for_an_event_means_the_last_time_that_it_was_recorded() -> None:
    notes = Notes()
    assert notes.read("stream wait_event 9000 0") is None
    assert notes.read("stream record_event 9000 35") == ("stream", "record_event", ("1", "1"))
    assert notes.read("stream record_event 9000 35") == ("stream", "record_event", ("2", "1"))
    assert notes.read("stream wait_event 9000 0") == ("stream", "wait_event", ("2", "0"))
    assert notes.read("stream synchronize_event 9000") == ("stream", "synchronize_event", ("2",))


def test_an_event_of_the_step_before_has_the_number_of_its_like_in_this_one() -> None:
    notes = Notes(["stream record_event 1 0", "stream record_event 2 35"])
    assert notes.read("stream wait_event 2 0") == ("stream", "wait_event", ("2", "0"))
    assert notes.read("stream record_event 3 0") == ("stream", "record_event", ("1", "0"))


def test_collectives_are_numbered_by_themselves() -> None:
    notes = Notes(["collective all_reduce 7 4096 8 1 1"])
    assert notes.read("collective all_gather_into_tensor 8 4096 8 1 1") == (
        "collective", "all_gather_into_tensor", ("1", "4096", "8", "1", "1"),
    )  # fmt: skip
    assert notes.read("stream wait_collective 8") == ("stream", "wait_collective", ("1",))
    assert notes.read("stream future_collective 9") is None
