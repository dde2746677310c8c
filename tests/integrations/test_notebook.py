"""A real IPython shell."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from tonnage.integrations.notebook import Report
from tonnage.recording import read_recording
from tonnage.units import GIB

CELL = """\
import torch
net = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)).cuda()
loss = net(torch.randn({batch}, 1024, device="cuda")).square().mean()
loss.backward()
print("still", "running")
"""


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    made = InteractiveShell()
    made.run_line_magic("load_ext", "tonnage")
    yield made
    made.history_manager.end_session()


def run(shell: InteractiveShell, options: str, code: str) -> tuple[Report, str]:
    with capture_output() as captured:
        report = shell.run_cell_magic("tonnage", options, code)
    return report, captured.stdout


def test_a_cell_runs_on_the_card_and_its_report_is_its_output(shell: InteractiveShell) -> None:
    report, printed = run(shell, "--gpu l4", CELL.format(batch=16384))
    assert "still running" in printed
    recording = report.recording
    assert recording.header.gpu_name == "NVIDIA L4"
    assert recording.peak_allocation is not None
    assert recording.peak_allocation.line == f"In[{shell.execution_count}]:4"
    assert recording.peak_allocated_bytes > GIB // 2
    shown, _ = shell.display_formatter.format(report)
    assert "NVIDIA L4" in shown["text/plain"]
    assert "largest at the peak" in shown["text/plain"]
    assert "<svg" in shown["text/html"]
    assert f"In[{shell.execution_count}]:4" in shown["text/html"]
    assert "activations" in shown["text/html"]


def test_a_cell_whose_check_fails_by_an_unknown_value_says_so(shell: InteractiveShell) -> None:
    report, printed = run(shell, "--gpu t4", CELL.format(batch=64) + "assert loss.item() < 0.5, 'diverged'\n")
    assert "diverged" in printed
    dependence = report.recording.dependence
    assert report.recording.header.outcome == "depends" and dependence
    assert dependence.line == f"In[{shell.execution_count}]:6"
    shown, _ = shell.display_formatter.format(report)
    assert "depends on unknown values" in shown["text/plain"] and "number=0" in shown["text/plain"]
    assert "depends on unknown values" in shown["text/html"] and "number=0" in shown["text/html"]


def test_what_the_cell_makes_is_the_notebook_s(shell: InteractiveShell) -> None:
    run(shell, "", "answer = 6 * 7")
    assert shell.user_ns["answer"] == 42


def test_a_cell_that_runs_out_says_so_and_still_reports(shell: InteractiveShell) -> None:
    report, printed = run(shell, "--gpu t4", CELL.format(batch=2**20))
    assert "OutOfMemoryError" in printed
    assert report.recording.header.outcome == "oom"
    html = report._repr_mimebundle_()["text/html"]
    assert "does not fit" in html
    assert "out of memory in forward" in html


def test_a_cell_that_fails_shows_its_error_and_the_card_is_gone(shell: InteractiveShell) -> None:
    report, printed = run(shell, "", "import torch\n1 / 0")
    assert "ZeroDivisionError" in printed
    assert report.recording.header.outcome == "error"
    assert "nothing was allocated" in report._repr_mimebundle_()["text/html"]
    assert shell.run_cell("torch.cuda.is_available()").result is False


def test_a_line_runs_a_statement_and_alone_shows_the_last_report(shell: InteractiveShell) -> None:
    report = shell.run_line_magic("tonnage", '--gpu t4 import torch; held = torch.zeros(2**20, device="cuda")')
    assert report.recording.peak_allocated_bytes == 4 * 2**20
    assert shell.run_line_magic("tonnage", "") is report


def test_a_recording_that_a_cell_returns_is_shown_as_a_report(shell: InteractiveShell, tmp_path: Path) -> None:
    path = tmp_path / "cell.tonnage"
    report, _ = run(shell, f"-o {path}", CELL.format(batch=64))
    kept = read_recording(path)
    assert kept.peak_allocated_bytes == report.recording.peak_allocated_bytes
    shown, _ = shell.display_formatter.format(kept)
    assert shown["text/html"] == report._repr_mimebundle_()["text/html"]
    assert "largest at the peak" in shown["text/plain"]


@pytest.mark.parametrize(
    ("line", "cell", "says"),
    [
        ("--gpu h2000", "pass", "h2000"),
        ("--card h200", "pass", "--card"),
        ("", None, "nothing has run yet"),
        ("-o {folder}", "pass", "exists already"),
    ],
)
def test_a_wrong_word_is_one_line_not_a_traceback(
    shell: InteractiveShell, tmp_path: Path, line: str, cell: str | None, says: str
) -> None:
    text = f"%%tonnage {line}\n{cell}" if cell else f"%tonnage {line}"
    with capture_output() as captured:
        shell.run_cell(text.format(folder=tmp_path))
    assert "UsageError" in captured.stderr
    assert says in captured.stderr
    assert "Traceback" not in captured.stdout + captured.stderr
