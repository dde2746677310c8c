"""What a function calls, by torch's profiler."""

import pytest

from tonnage.script import profiler

torch = pytest.importorskip("torch")


def test_calls_of_a_function_and_of_nothing_else() -> None:
    left = torch.ones(4, 8)
    step = profiler.calls_of(lambda: left @ left.T)
    left.sum()
    names = [moment.call.name for moment in step.moments()]
    assert "mm" in names and "sum" not in names
    assert next(call for call in step.calls if call.name == "mm").shapes[:2] == ((4, 8), (8, 4))
    assert step.settings["cudnn_benchmark"] == "False"


def test_a_function_that_fails_leaves_no_profiler_behind() -> None:
    with pytest.raises(ZeroDivisionError):
        profiler.calls_of(lambda: 1 / 0)
    assert not profiler.is_on()


def test_notes_are_made_only_while_we_profile() -> None:
    def run() -> None:
        profiler.note("stream", "set_stream", 35)

    run()
    step = profiler.calls_of(run)
    assert [(moment.call.kind, moment.call.name, moment.call.values) for moment in step.moments()] == [
        ("stream", "set_stream", ("1",))
    ]
