import io
import sys
from pathlib import Path

import pytest

from tonnage.report import progress
from tonnage.report.progress import Progress, line, live_progress

GIB = 2**30


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def use_terminals(monkeypatch: pytest.MonkeyPatch) -> tuple[Terminal, Terminal]:
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.0)
    return out, err


def test_the_line_says_where_the_script_is() -> None:
    text = line(3, "backward", "layers.17.mlp", 92 * GIB, 140 * GIB, 64.2)
    assert "step 3  backward" in text
    assert "layers.17.mlp" in text
    assert "peak 92.0 GiB" in text
    assert text.endswith("1:04")
    assert "━" in text


@pytest.mark.parametrize("module", ["", "m", "model.language_model.decoder.layers.31.self_attn"])
@pytest.mark.parametrize("step", [0, 3, 12345])
def test_the_line_is_at_home_in_80_columns(step: int, module: str) -> None:
    assert len(line(step, "optimizer", module, 1000 * GIB, 140 * GIB, 6000)) <= 80


def test_the_line_is_drawn_and_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = use_terminals(monkeypatch)
    with live_progress(140 * GIB) as live:
        assert live is not None
        live.update(step=1, phase="forward", module="layers.0", peak_bytes=GIB)
        assert "step 1" in err.getvalue()
    assert err.getvalue().endswith("\r\x1b[2K")
    assert out.getvalue() == ""
    assert sys.stderr is err and sys.stdout is out


def test_what_the_script_prints_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = use_terminals(monkeypatch)
    with live_progress(140 * GIB) as live:
        assert live is not None
        live.update(step=1, phase="forward", module="", peak_bytes=GIB)
        print("loss 3.2")
        assert err.getvalue().endswith("\r\x1b[2K")
        assert out.getvalue() == "loss 3.2\n"
        print("half a line", end="")
        drawn = err.getvalue()
        live.update(step=1, phase="forward", module="", peak_bytes=GIB)
        assert err.getvalue() == drawn
        assert sys.stdout.isatty()


def test_the_line_is_drawn_ten_times_a_second_at_most() -> None:
    terminal = Terminal()
    live = Progress(terminal, 140 * GIB)
    for _ in range(1000):
        live.update(step=1, phase="forward", module="", peak_bytes=GIB)
    assert terminal.getvalue().count("step 1") <= 2


def test_without_a_terminal_there_is_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with live_progress(1) as live:
        assert live is None


def test_a_failure_leaves_the_terminal_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    _, err = use_terminals(monkeypatch)
    with pytest.raises(ValueError), live_progress(1):
        raise ValueError
    assert sys.stderr is err


def test_a_program_reads_it_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "progress"
    monkeypatch.setenv(progress.PROGRESS_FILE, str(told))
    with live_progress(140 * GIB) as live:
        assert live is not None
        live.update(step=3, phase="backward", module="layers.0", peak_bytes=5 * GIB)
        assert told.read_text() == "step 3, backward, peak 5.0 GiB"
        live.update(step=4, phase="forward", module="", peak_bytes=6 * GIB)
        assert "step 3" in told.read_text()  # twice a second at most
