"""GPU specifications as text: the catalogue's list, and GPUs side by side, level by level. It only formats."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from itertools import groupby
from typing import Any, TextIO

from rich.text import Text

from tonnage import __version__
from tonnage.hardware import Cluster, Gpu, Host
from tonnage.hardware.hierarchy import LATENCIES_NS, Level, levels_of, reference_precision
from tonnage.report.lines import cut, heading, picked, print_sections, report_width, said, table
from tonnage.units import GIB, KIB, MIB, TIB

_ABSENT = "–"
_FAMILIES = {
    "data-centre": "NVIDIA, data centre",
    "instinct": "AMD Instinct",
    "workstation": "NVIDIA, workstation",
    "geforce": "NVIDIA GeForce",
    "laptop": "NVIDIA GeForce, laptops",
    "apple": "Apple",
}
_UNITS = {"AMD": "CUs", "Apple": "cores"}
_PRECISIONS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp6", "fp4", "int8", "int4")
_LABEL = 11
_CARD = 34


def print_catalogue(gpus: Sequence[Gpu], *, stream: TextIO) -> None:
    """Print every GPU, by family."""
    cells: list[tuple[str, ...]] = [("", "memory", "", "TB/s", "bf16 ", "fp8", "link, GB/s", "W")]
    for gpu in gpus:
        precision = reference_precision(gpu)
        memory = (f"{gpu.memory_bytes / GIB:.1f} GiB", gpu.memory_kind, f"{gpu.bandwidth_bytes_per_s / 1e12:.2f}")
        rate = f"{gpu.rates[precision] / 1e12:.0f}{' ' if precision == 'bf16' else '*'}"
        fp8 = f"{gpu.rates['fp8'] / 1e12:.0f}" if "fp8" in gpu.rates else _ABSENT
        link = f"{gpu.link.removeprefix('Infinity ')} {gpu.nvlink_bytes_per_s / 1e9:.0f}" if gpu.link else _ABSENT
        cells.append((gpu.key, *memory, rate, fp8, link, f"{gpu.power_w or _ABSENT}"))
    head, *rows = table(cells, align="<><>>><>", spare=(6, 7), first="   ")
    lines: list[Text] = []
    for family, members in groupby(zip(gpus, rows, strict=True), key=lambda pair: pair[0].family):
        title = heading(_FAMILIES[family])
        lines += [Text(), title] if lines else [title.append(head[len(title.plain) :], style="not bold dim")]
        lines += [Text(row) for _, row in members]
    notes = (
        f"{len(gpus)} cards. bf16, fp8: dense TFLOP/s (*: fp16, as the card has no bf16).",
        "In full: tonnage gpu h200 rtx-4090, or of your own: tonnage gpu mine.toml.",
        "The hosts that they sit in: tonnage gpu --hosts.",
    )
    print_sections([[*lines, Text(), *(line for note in notes for line in said(note, "dim"))]], stream)


def print_hosts(hosts: Sequence[Host], *, stream: TextIO) -> None:
    """Print every host."""
    cells: list[tuple[str, ...]] = [("host", "cards", "memory", "link, cards", "net")]
    for host in hosts:
        memory = _size(host.memory_bytes) if host.memory_bytes else _ABSENT
        link = f"{host.link} {host.link_gpus}" if host.link_gpus else host.link
        net = _short(host.network_bytes_per_s / 1e9)
        cells.append((host.key, f"{host.gpus} × {host.gpu or 'any'}", memory, link, net))
    head, *rows = table(cells, align="<<><>", names=(0,), spare=(3,), gap=" ")
    notes = (
        "net: GB/s for each card, in one direction.",
        "In words: dgx-h100, 4xp5.48xlarge; or by cards alone: 16xh100, 2x4xl40s.",
    )
    below = (line for note in notes for line in said(note, "dim"))
    print_sections([[Text(head, "bold"), *map(Text, rows), Text(), *below]], stream)


def print_cards(clusters: Sequence[Cluster], *, stream: TextIO) -> None:
    """Print GPUs in their hosts, as many side by side as fit."""
    count = max(1, (report_width() - _LABEL) // _CARD)
    for start in range(0, len(clusters), count):
        print_sections([_comparison(clusters[start : start + count])], stream)


def _comparison(clusters: Sequence[Cluster]) -> Iterator[Text]:
    gpus = [cluster.gpu for cluster in clusters]
    tables = [{level.name: level for level in levels_of(cluster)} for cluster in clusters]
    yield _row("", [cut(gpu.name, _CARD - 1) for gpu in gpus], "bold")
    yield _row("", [f"{gpu.generation}, {gpu.architecture}" for gpu in gpus])
    units = [f"{gpu.sm_count} {_UNITS.get(gpu.maker, 'SMs')}, {gpu.clock_mhz} MHz" for gpu in gpus]
    powers = [f", {gpu.power_w} W" if gpu.power_w else "" for gpu in gpus]
    yield _row("", [unit + power for unit, power in zip(units, powers, strict=True)])
    yield _row("", [f"in {cut(cluster.host.name, _CARD - 4)}" for cluster in clusters])
    yield Text()
    # Level by level.
    yield _row("level", [f"{'capacity':>9}{'speed ':>10}{'latency':>7}{'FLOP/B':>7}" for _ in gpus], "bold")
    for name in LATENCIES_NS:
        if any(name in levels for levels in tables):
            pairs = zip(gpus, tables, strict=True)
            cells = [_level_cells(levels.get(name), gpu.rates[reference_precision(gpu)]) for gpu, levels in pairs]
            yield _row(name, cells)
    yield Text()
    yield _row("rate", [f"{'TFLOP/s':>9}{'FLOP/B of memory':>20}" for _ in gpus], "bold")
    for precision in _PRECISIONS:
        if any(precision in gpu.rates for gpu in gpus):
            cells = []
            for gpu in gpus:
                rate, per_byte = (
                    gpu.rates.get(precision, 0.0),
                    gpu.rates.get(precision, 0.0) / gpu.bandwidth_bytes_per_s,
                )
                known = precision in gpu.rates
                cells.append(f"{_short(rate / 1e12):>9}{_short(per_byte):>20}" if known else f"{_ABSENT:>9}")
            yield _row(precision, cells)
    yield Text()
    for name in ("memory", "peers", "host", "network"):
        cells = []
        for cluster, levels in zip(clusters, tables, strict=True):
            words = levels[name].what if name in levels else _ABSENT
            if name == "memory":
                words += f", {cluster.gpu.memory_bytes:,} B"
            elif name == "peers" and name in levels:
                words += f", {cluster.host.link_gpus or cluster.host.gpus} cards"
            cells.append(cut(words, _CARD - 1))
        yield _row(name, cells)
    yield Text()
    for gpu in gpus:
        yield from said(f"{gpu.key}: memory {gpu.memory_source}", "dim", rest="    ")
    named = "/".join(dict.fromkeys(map(reference_precision, gpus)))
    yield from said(
        f"FLOP/B: operations on each byte from which a level no longer limits {named}. "
        "Speeds: peaks in one direction. Registers: SMs × FP32 lanes × 12 B × clock; shared: SMs × 128 B × clock; "
        "L2: a model, from published microbenchmarks; the rest as stated. Host and NVMe: one card's share. "
        "Latency: order of magnitude.",
        "dim",
    )


def _row(label: str, cells: Sequence[str], style: str = "") -> Text:
    line = f"  {label:<{_LABEL - 2}}" + "".join(f" {cell:<{_CARD - 1}}" for cell in cells)
    return Text(line.rstrip(), style=style)


def _level_cells(level: Level | None, operations_per_s: float) -> str:
    if level is None:
        return f"{_ABSENT:>9}"
    capacity = _size(level.capacity_bytes) if level.capacity_bytes else _ABSENT
    unit, factor = ("TB/s", 1e12) if (level.bytes_per_s or 0) >= 1e12 else ("GB/s", 1e9)
    speed = f"{_short(level.bytes_per_s / factor)} {unit}" if level.bytes_per_s else _ABSENT
    latency = f"{level.latency_ns} ns" if level.latency_ns < 1000 else f"{level.latency_ns // 1000} µs"
    intensity = level.intensity(operations_per_s)
    operations = _short(intensity) if intensity is not None else _ABSENT
    return f"{capacity:>9}{speed:>10}{latency:>7}{operations:>7}"


def _size(size_bytes: int) -> str:
    units = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB))
    unit, factor = next(((name, size) for name, size in units if size_bytes >= size), ("KiB", KIB))
    return f"{size_bytes / factor:.{1 if size_bytes / factor < 999.5 else 0}f} {unit}"


def _short(number: float) -> str:
    """Format with three digits, or with all digits before the point."""
    for limit, digits in ((9.995, 2), (99.95, 1)):
        if number < limit:
            return f"{number:.{digits}f}"
    return f"{number:.0f}"


def cluster_figures(clusters: Sequence[Cluster]) -> dict[str, object]:
    """Return GPUs in their hosts as JSON values."""
    found = []
    for cluster in clusters:
        levels = []
        for level in levels_of(cluster):
            intensities = {precision: level.intensity(rate) for precision, rate in cluster.gpu.rates.items()}
            levels.append(asdict(level) | {"latency_ns": level.latency_ns, "flop_per_byte": intensities})
        where = {"levels": levels, "host": asdict(cluster.host), **picked(cluster, "gpus_per_host hosts")}
        found.append(_gpu_figures(cluster.gpu) | where)
    return {"tonnage": __version__, "gpus": found}


def catalogue_figures(gpus: Sequence[Gpu], hosts: Sequence[Host]) -> dict[str, object]:
    """Return the whole catalogue as JSON values."""
    return {"tonnage": __version__, "gpus": list(map(_gpu_figures, gpus)), "hosts": list(map(asdict, hosts))}


def _gpu_figures(gpu: Gpu) -> dict[str, Any]:
    figures = {field.name: getattr(gpu, field.name) for field in fields(gpu)}
    overheads = {library: asdict(overhead) for library, overhead in gpu.overheads.items()}
    return figures | {"rates": dict(gpu.rates), "overheads": overheads}
