"""`tonnage watch`: live memory by GPU and by process."""

import json as json_format
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TextIO

import typer

from tonnage.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tonnage.watch import GpuSample, WatchHistory

    Show = Callable[[GpuSample], None]


def watch(
    interval: float = typer.Option(1.0, "--interval", min=0.05, metavar="SECONDS", help="Time between two samples."),
    once: bool = typer.Option(False, "--once", help="One sample, then stop."),
    json: str = typer.Option("", "--json", metavar="FILE", help="Write samples as JSON lines ('-': standard output)."),
    prometheus: int = typer.Option(None, "--prometheus", min=0, metavar="PORT", help="Serve the latest to Prometheus."),
) -> None:
    """Live memory of this machine's GPUs, by process, with a timeline; Ctrl-C stops."""
    if once and prometheus is not None:
        raise RequestError("--once samples and stops; --prometheus serves.", hint="Leave one of them out.")
    from tonnage.hardware.nvml import open_nvml
    from tonnage.watch import WatchHistory, moments

    history = WatchHistory()
    words = sys.stderr if json == "-" else sys.stdout
    with ExitStack() as stack:
        reader = stack.enter_context(open_nvml())
        served = ""
        if prometheus is not None:
            from tonnage.watch.history import serve

            served = f"metrics on port {stack.enter_context(serve(history, prometheus))}"
        show = stack.enter_context(_shown(history, interval, served, words, once))
        write = stack.enter_context(_written(json))
        try:
            for moment in moments(reader, interval):
                history.add(moment)
                write(moment)
                show(moment)
                if once:
                    break
        except KeyboardInterrupt:
            return


@contextmanager
def _shown(history: "WatchHistory", interval_s: float, served: str, stream: TextIO, once: bool) -> Iterator["Show"]:
    """A frame that is drawn again on a terminal; elsewhere a line for each GPU and sample."""
    from rich.console import Console, Group
    from rich.live import Live

    from tonnage.report.lines import print_lines
    from tonnage.report.runs.watch import footer, frame, plain_lines

    if once:
        yield lambda moment: print_lines(["", *frame(history)], stream)
    elif stream.isatty():
        with Live(console=Console(file=stream, highlight=False, emoji=False), auto_refresh=False) as live:
            yield lambda moment: live.update(
                Group("", *frame(history), *footer(history, interval_s, served)), refresh=True
            )
    else:
        if served:
            print(served, file=stream, flush=True)
        yield lambda moment: print(*plain_lines(moment), sep="\n", file=stream, flush=True)


@contextmanager
def _written(target: str) -> Iterator["Show"]:
    """Each sample as one line of JSON, at once: the watch may be killed."""
    from tonnage.report.runs.watch import moment_figures

    if not target:
        yield lambda moment: None
        return
    with ExitStack() as stack:
        try:
            file = sys.stdout if target == "-" else stack.enter_context(open(target, "w", encoding="utf-8"))
        except OSError as error:
            hint = "Name a file in a folder that exists."
            raise RequestError(f"Cannot write {target}: {error.strerror}.", hint=hint) from None
        yield lambda moment: print(json_format.dumps(moment_figures(moment)), file=file, flush=True)
