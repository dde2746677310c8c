"""Functions that a script registers with atexit run when the script ends."""

import atexit

import pytest

from tonnage.script.exit_handlers import exit_handlers_at_end


def test_handlers_run_at_the_end_the_last_first() -> None:
    ran: list[str] = []
    register = atexit.register
    with exit_handlers_at_end():
        atexit.register(ran.append, "first")
        atexit.register(ran.append, "second")
        forgotten = atexit.register(lambda: ran.append("forgotten"))
        atexit.unregister(forgotten)
        assert ran == []
    assert ran == ["second", "first"]
    assert atexit.register is register


def test_handlers_run_after_an_error_and_may_fail(capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []

    def fails() -> None:
        raise OSError("disk full")

    with pytest.raises(ValueError, match="the script"), exit_handlers_at_end():
        atexit.register(ran.append, "saved")
        atexit.register(fails)
        raise ValueError("the script")
    assert ran == ["saved"]
    assert "disk full" in capsys.readouterr().err
