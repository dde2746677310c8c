import pickle
import pkgutil
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

import tonnage.errors
from tonnage.commands.main import main
from tonnage.errors import TonnageError, UnknownGpu
from tonnage.script.running import run_as_main


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    classes = [c for c in vars(tonnage.errors).values() if isinstance(c, type) and issubclass(c, TonnageError)]
    drawn = tonnage.errors.__doc__ or ""
    assert [c.__name__ for c in classes if c.__name__ not in drawn] == []


def test_an_error_says_what_to_do() -> None:
    assert TonnageError("It broke.", hint="Mend it.").words == "It broke.\nMend it."
    assert TonnageError("It broke.").words == "It broke."


def test_python_s_traceback_shows_what_to_do_once() -> None:
    error = TonnageError("It broke.", hint="Mend it.")
    assert traceback.format_exception(error) == ["tonnage.errors.TonnageError: It broke.\n", "Mend it.\n"]
    again = pickle.loads(pickle.dumps(error))
    assert again.hint == "Mend it."
    assert again.__notes__ == ["Mend it."]
    assert not hasattr(TonnageError("It broke."), "__notes__")


def _all_errors(cls: type[TonnageError]) -> list[type[TonnageError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in _all_errors(child))]


def test_every_error_travels_between_processes() -> None:
    """A DataLoader's worker and a process pool pickle what was raised; `DoesNotFit` and others take more than a sentence."""
    pytest.importorskip("torch")
    for module in pkgutil.walk_packages(tonnage.__path__, "tonnage."):
        if not module.name.startswith(("tonnage.virtual.packages", "tonnage.__main__")):
            with suppress(ImportError):  # of what needs a part that is not installed
                import_module(module.name)
    errors = [cls for cls in _all_errors(TonnageError) if cls.__module__.startswith("tonnage.")]
    assert len(errors) > 30
    for cls in errors:
        error = tonnage.errors._blank(cls)
        assert isinstance(error, TonnageError)
        TonnageError.__init__(error, "It broke.", hint="Mend it.")
        error.smallest_bytes = 7  # type: ignore[attr-defined]
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is cls and str(again) == "It broke." and again.hint == "Mend it.", cls
        assert again.__notes__ == ["Mend it."] and again.smallest_bytes == 7


def test_an_error_with_arguments_of_its_own_keeps_them_on_its_way() -> None:
    pytest.importorskip("torch")
    from tonnage.fit.choose.solver import DoesNotFit

    error = DoesNotFit("It is too large.", hint="Take a larger card.", smallest_bytes=7)
    again = pickle.loads(pickle.dumps(error))
    assert (again.words, again.smallest_bytes, again.exit_code) == (error.words, 7, 1)


def test_what_another_rank_said_keeps_what_to_do() -> None:
    pytest.importorskip("torch")
    from tonnage.fit.sharding.agreement import RankFailed

    told = RankFailed(1, TonnageError("It broke.", hint="Mend it.").words)
    shown = "".join(traceback.format_exception(told))
    assert "It broke.\nMend it." in shown and "Look at the log of rank 1." in shown


def test_the_command_shows_what_to_do_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(_: list[str]) -> None:
        raise UnknownGpu("It broke.", hint="Mend it.")

    monkeypatch.setattr("tonnage.commands.main._run", broken)
    monkeypatch.setattr(sys, "argv", ["tonnage"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err == "tonnage: It broke.\nMend it.\n"


def test_a_script_that_raises_shows_what_to_do_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("import tonnage.errors\nraise tonnage.errors.TonnageError('It broke.', hint='Mend it.')\n")
    run_as_main(script, [], SimpleNamespace(OutOfMemoryError=MemoryError))
    place = "  at script.py:2  raise tonnage.errors.TonnageError('It broke.', hint='Mend it.')"
    assert capsys.readouterr().err.splitlines() == ["tonnage: It broke.", "Mend it.", place]


def test_what_caused_an_error_is_shown_with_its_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import tonnage.errors\ntry:\n    1 / 0\nexcept ZeroDivisionError as error:\n"
        "    raise tonnage.errors.TonnageError('It broke.', hint='Mend it.') from error\n"
    )
    run_as_main(script, [], SimpleNamespace(OutOfMemoryError=MemoryError))
    shown = capsys.readouterr().err
    assert "ZeroDivisionError: division by zero" in shown and "script.py\", line 5" in shown


def test_what_a_file_says_of_itself_moves_no_cursor_and_stays_short() -> None:
    error = TonnageError(f"\x1b[31m is {'0, ' * 30_000} and cannot be served.", hint="Give another.")
    assert str(error).startswith("?[31m is 0, ") and str(error).endswith("cannot be served.")
    assert len(str(error)) < 2000
