"""Live memory: a frame that is redrawn on a terminal, plain lines elsewhere, and JSON values.

    GPU 0  NVIDIA H200                                  92.41 of 139.80 GiB  66 %
    ▁▁▂▅▇█▇█▇█▇█                                        peak 97.02 GiB   98 % busy

A sparkline's full height is the GPU's memory, so it shows how much is left. Nothing is sampled here.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import datetime
from typing import Any

from rich.text import Text

from tonnage.hardware.nvml import GpuMemory, ProcessMemory
from tonnage.report.lines import cut, picked, report_width, said, spread
from tonnage.units import GIB, format_bytes, percent
from tonnage.watch import GpuSample, WatchHistory

_HEIGHTS = "▁▂▃▄▅▆▇█"
_PROCESSES = 8
_PROCESS_CELLS = 22
_GPU_CELLS = 44
_NAME_CELLS = 36
_NEARLY_FULL = 0.95
_USUAL = 80  # columns that the figures above are for


def sparkline(values: Iterable[int], full: int, cells: int) -> str:
    """Draw the last values, one per cell; the full height is `full`. Non-zero values are above the lowest mark."""
    shown = list(values)[-cells:]
    steps = len(_HEIGHTS) - 1
    return "".join(_HEIGHTS[min(steps, -(-max(0, value) * steps // full))] if full else " " for value in shown)


def frame(history: WatchHistory) -> Iterator[Text]:
    """Yield every GPU and process now, with its timeline; then which GPU is nearly full."""
    gpus, wider = history.latest.gpus if history.latest else (), report_width() - _USUAL
    for gpu in gpus:
        track = history.gpu(gpu.index)
        busy = "" if gpu.busy_percent is None else f"   {gpu.busy_percent} % busy"
        yield from spread(Text(f"  GPU {gpu.index}  {cut(gpu.name, _NAME_CELLS)}", style="bold"), Text(_of_total(gpu)))
        course = Text("  " + sparkline(track.used_bytes, gpu.total_bytes, _GPU_CELLS + wider), style="cyan")
        yield from spread(course, Text(f"peak {format_bytes(track.peak_bytes, 'GiB')}{busy}"))
        for process in gpu.processes[:_PROCESSES]:
            name = cut(process.name, _PROCESS_CELLS + 2)
            line = Text(f"   {process.pid:>7}  {name:<{_PROCESS_CELLS + 2}}{_used(process):>11}  ")
            cells = max(0, min(_PROCESS_CELLS + wider, report_width() - line.cell_len))
            used = history.process(gpu.index, process.pid).used_bytes
            yield line.append(sparkline(used, gpu.total_bytes, cells), style="cyan")
        hidden = len(gpu.processes) - _PROCESSES
        if hidden > 0:
            yield Text(f"   and {hidden} smaller ones", style="dim")
        if gpu.unseen_bytes:
            yield Text(f"   {'outside these processes':<33}{format_bytes(gpu.unseen_bytes, 'GiB'):>11}", style="dim")
        yield Text()
    for gpu in gpus:
        if gpu.used_bytes >= _NEARLY_FULL * gpu.total_bytes:
            words = ", and none of it is a process seen from here"
            if gpu.processes:
                largest = gpu.processes[0]
                words = f"; {cut(largest.name, _PROCESS_CELLS + 2)} ({largest.pid}) holds most"
            yield from said(f"GPU {gpu.index} has {format_bytes(gpu.free_bytes)} left{words}", "yellow")


def _of_total(gpu: GpuMemory) -> str:
    share = gpu.used_bytes / gpu.total_bytes if gpu.total_bytes else 0.0
    return f"{gpu.used_bytes / GIB:.2f} of {format_bytes(gpu.total_bytes, 'GiB')}  {percent(share, 0)}"


def _used(process: ProcessMemory) -> str:
    return "unknown" if process.used_bytes is None else format_bytes(process.used_bytes, "GiB")


def footer(history: WatchHistory, interval_s: float, served: str) -> Iterator[Text]:
    """Yield how long it has run, and how to stop it."""
    latest_s = history.latest.time_s if history.latest else 0.0
    minutes, seconds = divmod(int(latest_s - history.first_s), 60)
    words = [f"every {interval_s:g} s for {minutes}:{seconds:02d}", served, "Ctrl-C stops"]
    yield from said(" · ".join(filter(None, words)), "dim")


def plain_lines(moment: GpuSample) -> Iterator[str]:
    """Yield one line per GPU, for logs."""
    clock = datetime.fromtimestamp(moment.time_s).strftime("%H:%M:%S")
    for gpu in moment.gpus:
        busy = "" if gpu.busy_percent is None else f"  {gpu.busy_percent:>3} % busy"
        who = ", ".join(f"{process.name} ({process.pid}) {_used(process)}" for process in gpu.processes[:_PROCESSES])
        yield f"{clock}  GPU {gpu.index}  {_of_total(gpu)}{busy}  {who}".rstrip()


def moment_figures(moment: GpuSample) -> dict[str, Any]:
    """Return one moment as JSON values; keys say that sizes are in bytes."""
    return {"time_s": moment.time_s, "gpus": [asdict(g) | picked(g, "free_bytes unseen_bytes") for g in moment.gpus]}
