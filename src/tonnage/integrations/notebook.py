"""`%load_ext tonnage`: runs cells on a virtual GPU and shows reports as rich output.

    %%tonnage --gpu h200        run this cell on a virtual GPU, then show where its memory went
    %tonnage --gpu h200 f(x)    the same for one statement
    %tonnage                    show the last report again

Each cell has its own card, and tensors on it do not outlive the cell, so a cell must build what it trains.
"""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class

from tonnage.errors import OutputExists, TonnageError
from tonnage.recording import Recording, write_recording
from tonnage.report.runs.cell import cell_html, cell_text


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%tonnage: {message}")


_PARSER = _Parser("%%tonnage", add_help=False, allow_abbrev=False)
_PARSER.add_argument("--gpu", default="h200")
_PARSER.add_argument("-o", "--output", type=Path)
_PARSER.add_argument("--force", action="store_true")


class Report:
    """The memory report of a cell, for display in the notebook; `recording` has the details."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": cell_text(self.recording), "text/html": cell_html(self.recording)}


@magics_class
class TonnageMagics(Magics):
    """The `%tonnage` magic, which remembers the last report."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._last: Report | None = None

    @line_cell_magic
    def tonnage(self, line: str, cell: str | None = None) -> Report | None:
        """Run a cell or a statement on a virtual GPU and show where its memory went."""
        options, code = _split(line, cell)
        if not code.strip():
            if self._last is None:
                raise UsageError("%tonnage: nothing has run yet: put %%tonnage --gpu h200 on top of a cell.")
            return self._last
        try:
            if options.output and options.output.exists() and not options.force:
                raise OutputExists(f"{options.output} exists already.", hint="Choose another name, or pass --force.")
            recording = self._recorded(code, options.gpu)
            if options.output:
                write_recording(options.output, recording, force=options.force)
        except TonnageError as error:
            raise UsageError(f"%tonnage: {error.words}") from None
        self._last = Report(recording)
        return self._last

    def _recorded(self, code: str, card: str) -> Recording:
        """Run the cell as usual: the shell itself shows its output, last value and error."""
        from tonnage.hardware import find_cuda_gpu
        from tonnage.integrations.meter import VirtualMeter

        shell, meter = self.shell, VirtualMeter(find_cuda_gpu(card))
        name = f"In[{shell.execution_count}]"
        # A name that tells the cell of a line; the shell's own ("<ipython-input-…>") does not.
        named, shell.compile.get_code_name = shell.compile.get_code_name, lambda *_: name
        meter.open()
        try:
            result = shell.run_cell(code, store_history=False)
            recording = meter.recording(result.error_before_exec or result.error_in_exec)
        finally:
            meter.close()
            shell.compile.get_code_name = named
        recording.writes = meter.redirection.writes
        return recording


def _split(line: str, cell: str | None) -> tuple[Any, str]:
    """Return the options and the code: the cell, or what follows the options on a line."""
    if cell is not None:
        return _PARSER.parse_args(line.split()), cell
    words = line.split(" ")
    taken = 0
    while taken < len(words) and (words[taken].startswith("-") or not words[taken]):
        taken += 1 if words[taken] in ("", "--force") or "=" in words[taken] else 2
    return _PARSER.parse_args([word for word in words[:taken] if word]), " ".join(words[taken:])


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magic, and show any recording that a cell returns as a report."""
    shell.register_magics(TonnageMagics)
    shell.display_formatter.formatters["text/html"].for_type(Recording, cell_html)
    shell.display_formatter.formatters["text/plain"].for_type(
        Recording, lambda recording, printer, cycle: printer.text(cell_text(recording))
    )
