"""Hold every operator of the virtual GPU against what a real card did: the allocator's events of each call.

    python tools/compare_operators.py                                  # everything, the summary
    python tools/compare_operators.py --groups norms,losses --only layer_norm --limit 20
    python tools/compare_operators.py --only "conv2d backward" --verbose --json rows.json

The truth is a file that `probe_operators.py` wrote on the card; the same cases of `probe_cases` run here, on the virtual
GPU, in processes that go on after a case that kills them. The steady (second) call is compared, forward and backward:

| verdict | meaning |
|---|---|
| exact | the same sequence of allocations and frees, with the same requested bytes |
| same-peak | another sequence, but the same transient peak and the same bytes left, in blocks of 512 bytes |
| different | another peak, or other bytes left |
| error | the virtual GPU raised, crashed, hung or gave no backward; the card did not |
| no-truth | the card raised, or the case is not the one that ran there: nothing to hold against |

It does not know whether a difference comes from the operator of the case or from another one called by it: the name beside
each virtual allocation tells.
"""

from __future__ import annotations

import argparse
import collections
import difflib
import faulthandler
import gc
import gzip
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT / "src")]
GROUPS = sorted(
    p.stem for p in (ROOT / "tools" / "probe_cases").glob("*.py") if p.stem not in ("__init__", "process", "spec")
)
TRUTH = ROOT / "benchmarks" / "results" / "operators-h200-torch2.11.jsonl.gz"

VERDICTS = ("exact", "same-peak", "different", "error", "no-truth")
BLOCK_BYTES = 512
SECONDS_PER_CASE = 120
CASES_BETWEEN_COLLECTIONS = 50
EQUAL_EVENTS_SHOWN = 2

Key = tuple[str, int, str]
Events = list[list[Any]]


# The cases on the virtual GPU


class VirtualRecorder:
    """What `probe_operators.Recorder` is on a card: events of each `with` block, and whose allocation it was."""

    device: Any = None
    drain: Callable[[], object]

    def __init__(self) -> None:
        self.ids: dict[int, int] = {}
        self.count = 0
        self.events: Events = []

    def __enter__(self) -> VirtualRecorder:
        self.drain()
        self._first = len(self.device.allocations)
        self._before = list(self.device.live.values())
        return self

    def __exit__(self, *exception: object) -> None:
        self.drain()
        made = self.device.allocations[self._first :]
        for allocation in made:
            self.ids[id(allocation)] = self.count
            self.count += 1
        rows = [(a.born, ["alloc", a.requested_bytes, self.ids[id(a)], a.stream, a.operator]) for a in made]
        rows += [(a.died, ["free", a.requested_bytes, self.ids.get(id(a), -1)]) for a in self._before + made if a.died]
        self.events = [row for _, row in sorted(rows, key=lambda timed: timed[0])]


def drain_of_autograd() -> Callable[[], object]:
    """A call that returns when autograd's thread for the device has dropped what earlier backwards left it.

    That thread lets go of its last gradients after it has reported the end. A second, empty backward waits for it: the
    thread takes one task after the other. It allocates nothing.
    """
    import torch

    leaf = torch.zeros((), device="cuda", requires_grad=True)
    view, ones = leaf.view_as(leaf), torch.ones((), device="cuda")
    return lambda: torch.autograd.grad(view, leaf, ones, retain_graph=True)


def open_virtual_gpu(card: str, torch_version: str) -> Any:
    """The session that stands for the card of the truth file."""
    from tonnage.hardware import find_gpu
    from tonnage.virtual.session import Session

    session = Session(find_gpu(card.removeprefix("NVIDIA ").lower()), torch_version.split("+")[0])
    session.open()
    return session


def build_native_half() -> None:
    """Once, before several processes need it."""
    from tonnage.virtual.loading import native_library

    torch = importlib.util.find_spec("torch")
    assert torch and torch.origin, "torch is not installed"
    native_library(Path(torch.origin).parent)


def chosen(file: Path) -> Iterator[tuple[str, int, Any]]:
    """The cases that the file names: group, place in it, case."""
    import probe_operators

    for group, indices in json.loads(file.read_text()).items():
        cases = probe_operators.cases_of(group)
        yield from ((group, index, cases[index]) for index in indices if index < len(cases))


def work(options: argparse.Namespace, out: TextIO) -> None:
    """Run a share of the cases; a line goes out before each, so that the one that kills the process is known."""
    session = open_virtual_gpu(options.card, options.torch)  # before torch is imported
    import probe_operators
    import torch

    VirtualRecorder.device, VirtualRecorder.drain = session.device, staticmethod(drain_of_autograd())
    probe_operators.Recorder = VirtualRecorder  # type: ignore[misc, assignment]
    torch.manual_seed(0)
    gc.disable()
    share, shares = options.share
    parent = os.getppid()
    for ordinal, (group, index, case) in enumerate(chosen(options.cases)):
        if ordinal < options.start or ordinal % shares != share:
            continue
        if os.getppid() != parent:
            sys.exit("The comparison that started this process has ended.")
        place = {"ordinal": ordinal, "group": group, "index": index}
        _put(out, {**place, "begun": case.op, "case": case.note})
        faulthandler.dump_traceback_later(SECONDS_PER_CASE, exit=True)
        before = _unmodelled(session)
        for row in probe_operators.rows_of(case, "cuda"):
            del row["first_call_events"]
            _put(out, {**place, **row, "unmodelled": sorted(_unmodelled(session) - before)})
        faulthandler.cancel_dump_traceback_later()
        if ordinal // shares % CASES_BETWEEN_COLLECTIONS == 0:
            gc.collect()
            gc.freeze()  # what is left is caches: the next collection need not look at them


def _put(out: TextIO, row: dict[str, Any]) -> None:
    out.write(json.dumps(row) + "\n")
    out.flush()


def _unmodelled(session: Any) -> set[str]:
    return {note.operator for note in session.stand_ins.notes() if note.kind == "not_modelled"}


class Worker:
    """A share of the cases in a process of its own; started again after a case that killed it or hangs."""

    def __init__(self, share: int, folder: Path, arguments: list[str]) -> None:
        self.part, self.errors = folder / f"part-{share}.jsonl", folder / f"errors-{share}.txt"
        self.arguments = [*arguments, "--share", str(share), "--part", str(self.part)]
        self.part.write_text("")
        self.crashes: list[dict[str, Any]] = []
        self._start(0)

    def _start(self, start: int) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), *self.arguments, "--start", str(start)]
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(command, stderr=errors)

    def done(self) -> bool:
        code = self.process.poll()
        if code is None or code == 0:
            return code == 0
        rows = self.rows()
        last = rows[-1] if rows else {}
        if "ordinal" not in last or last["ordinal"] in [c["ordinal"] for c in self.crashes]:
            sys.exit(f"The virtual GPU did not start (exit {code}):\n{self.errors.read_text()[-3000:]}")
        self.crashes.append({**last, "error": _how_it_died(code, self.errors.read_text())})
        self._start(last["ordinal"] + 1)
        return False

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.part.read_text().split("\n")[:-1]]


def _how_it_died(code: int, errors: str) -> str:
    lines = errors.splitlines()
    hung = any(line.startswith("Timeout") for line in lines)
    frames = [line.strip() for line in lines if line.startswith("  File")] or lines[-1:]
    return f"{'HUNG' if hung else 'CRASHED'} (exit {code}): {' < '.join(frames[:3])[:400]}"


def run_cases(truth: list[dict[str, Any]], header: dict[str, Any], jobs: int) -> dict[Key, dict[str, Any]]:
    """Every row that the virtual GPU gave, and one for each case that killed its process."""
    rows: dict[Key, dict[str, Any]] = {}
    build_native_half()
    with tempfile.TemporaryDirectory() as folder:
        cases = Path(folder) / "cases.json"
        cases.write_text(json.dumps({g: sorted({r["index"] for r in truth if r["group"] == g}) for g in GROUPS}))
        arguments = ["--cases", str(cases), "--jobs", str(jobs), "--card", header["card"], "--torch", header["torch"]]
        workers = running = [Worker(share, Path(folder), arguments) for share in range(jobs)]
        while running := [w for w in running if not w.done()]:
            time.sleep(0.05)
        for worker in workers:
            rows |= {(r["group"], r["index"], r["op"]): r for r in worker.rows() if "op" in r}
            for crash in worker.crashes:
                rows.setdefault((crash["group"], crash["index"], ""), crash)
    return rows


# The comparison


@dataclass
class Compared:
    """One call on both cards. Differences are the virtual GPU's bytes less the real ones."""

    group: str
    index: int
    op: str
    case: str
    verdict: str
    peak_difference_bytes: int = 0
    left_difference_bytes: int = 0
    error: str = ""
    remarks: list[str] = field(default_factory=list)
    args: Any = None
    real: Events = field(default_factory=list)
    virtual: Events = field(default_factory=list)


def sequence(events: Events) -> list[tuple[str, int, bool]]:
    """What must be the same: kind, requested bytes, and whether an allocation is for another stream than the default."""
    return [(e[0], e[1], e[0] == "alloc" and len(e) > 3 and bool(e[3])) for e in events]


def peak_and_left_bytes(events: Events) -> tuple[int, int]:
    """How far the bytes in use rose over those at the start, and where they ended; in the allocator's blocks."""
    peak = now = 0
    for kind, size, *_ in events:
        block = -(-size // BLOCK_BYTES) * BLOCK_BYTES
        now += block if kind == "alloc" else -block
        peak = max(peak, now)
    return peak, now


def settled(events: Events) -> Events:
    """The events of a differentiable call without frees of what was there before it.

    All that such a call can give back is its own or its forward's. The rest are gradients of the first call, which
    autograd's thread on the card let go of late.
    """
    return [e for e in events if e[0] == "alloc" or e[2] >= 0]


def compare(real: dict[str, Any], virtual: dict[str, Any] | None) -> Compared:
    """The verdict of one row."""
    result = Compared(
        real["group"], real["index"], real["op"], real["case"], "no-truth", args=real["args"], real=real["events"]
    )
    if real["error"]:
        result.error = real["error"]
        return result
    if virtual is None or virtual["error"]:
        result.verdict = "error"
        result.error = virtual["error"] if virtual else "no such row: nothing differentiable came out"
        return result
    if not real["op"].endswith(" backward") and _shapes(real["args"]) != _shapes(virtual["args"]):
        result.error = f"the case has changed since: now {_short_args(virtual['args'])}"
        return result
    result.virtual = settled(virtual["events"]) if real["differentiable"] else virtual["events"]
    result.remarks = _remarks(real, virtual)
    (real_peak, real_left), (peak, left) = peak_and_left_bytes(result.real), peak_and_left_bytes(result.virtual)
    result.peak_difference_bytes, result.left_difference_bytes = peak - real_peak, left - real_left
    same = (peak, left) == (real_peak, real_left)
    exact = sequence(result.real) == sequence(result.virtual)
    result.verdict = "exact" if exact else "same-peak" if same else "different"
    return result


def _remarks(real: dict[str, Any], virtual: dict[str, Any]) -> list[str]:
    remarks = [f"not modelled: {operator}" for operator in virtual["unmodelled"]]
    if _tensors(real["args"]) != _tensors(virtual["args"]):
        remarks.append(f"other arguments: {_tensors(virtual['args'])}")
    if real["outputs"] != virtual["outputs"]:
        pairs = zip(real["outputs"], virtual["outputs"], strict=False)
        shown = next(((a, b) for a, b in pairs if a != b), (len(real["outputs"]), len(virtual["outputs"])))
        remarks.append(f"other outputs: {shown[0]} became {shown[1]}")
    return remarks


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, dict) and "shape" in value and "dtype" in value:
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _shapes(args: Any) -> list[tuple[Any, Any]]:
    return [(tensor["shape"], tensor["dtype"]) for tensor in _tensors(args)]


def read_truth(path: Path, groups: list[str], word: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and the rows asked for."""
    with gzip.open(path, "rt") as file:
        header = json.loads(next(file))
        rows = [json.loads(line) for line in file]
    differentiable = {(r["group"], r["index"]) for r in rows if r["op"].endswith(" backward")}
    for row in rows:
        row["differentiable"] = (row["group"], row["index"]) in differentiable
        row["events"] = settled(row["events"]) if row["differentiable"] else row["events"]
    return header, [r for r in rows if r["group"] in groups and word in f"{r['op']} [{r['case']}]"]


def compare_all(truth: list[dict[str, Any]], rows: dict[Key, dict[str, Any]]) -> list[Compared]:
    """A verdict for each row of the truth whose case still exists; the others are named on stderr."""
    names = {(g, i): (r.get("op") or r["begun"], r["case"]) for (g, i, _), r in rows.items()}
    results, gone = [], []
    for real in truth:
        place = real["group"], real["index"]
        op, note = names.get(place, ("", ""))
        if (op.removesuffix(" backward"), note) != (real["op"].removesuffix(" backward"), real["case"]):
            gone.append(f"{real['group']} {real['index']} {real['op']} [{real['case']}]")
            continue
        forward = rows.get((*place, real["op"].removesuffix(" backward")), rows.get((*place, "")))
        results.append(compare(real, rows.get((*place, real["op"]), forward if forward and forward["error"] else None)))
    if gone:
        print(
            f"{len(gone)} rows of the truth are not among the cases any more: {'; '.join(gone[:3])} ...",
            file=sys.stderr,
        )
    return results


# The report


def _event_text(event: list[Any], with_operator: bool) -> str:
    text = f"{'+' if event[0] == 'alloc' else '-'}{event[1]:,} #{event[2]}"
    if event[0] == "alloc" and len(event) > 3 and event[3]:
        text += " (side stream)"
    return f"{text}  {event[4]}" if with_operator and len(event) > 4 else text


def side_by_side(real: Events, virtual: Events) -> list[str]:
    """Both sequences, aligned; long equal runs are shortened."""
    matcher = difflib.SequenceMatcher(
        None, [tuple(e[:2]) for e in real], [tuple(e[:2]) for e in virtual], autojunk=False
    )
    lines: list[str] = []
    for tag, a, b, c, d in matcher.get_opcodes():
        left = [_event_text(e, False) for e in real[a:b]]
        right = [_event_text(e, True) for e in virtual[c:d]]
        height = max(len(left), len(right))
        left, right = left + [""] * (height - len(left)), right + [""] * (height - len(right))
        block = [f"    {'|' if tag == 'equal' else '*'} {x:34} {y}" for x, y in zip(left, right, strict=True)]
        if tag == "equal" and height > 2 * EQUAL_EVENTS_SHOWN + 1:
            middle = f"    | ... {height - 2 * EQUAL_EVENTS_SHOWN} the same"
            block = [*block[:EQUAL_EVENTS_SHOWN], middle, *block[-EQUAL_EVENTS_SHOWN:]]
        lines += block
    return lines


def print_row(row: Compared) -> None:
    difference = f"peak {row.peak_difference_bytes:+,} B, left {row.left_difference_bytes:+,} B"
    print(f"\n{row.verdict}: {row.group} {row.index}  {row.op} [{row.case}]  {difference if not row.error else ''}")
    print(f"    {_short_args(row.args)}")
    for remark in row.remarks:
        print(f"    {remark[:300]}")
    print(f"    {row.error}" if row.error else "\n".join(side_by_side(row.real, row.virtual)))


def _short_args(args: Any) -> str:
    if isinstance(args, dict) and "shape" in args and "dtype" in args:
        marks = [str(args[k]) for k in ("stride", "layout", "device") if k in args]
        return f"{args['dtype']}{args['shape']}{'g' if args['grad'] else ''}{'/' if marks else ''}{' '.join(marks)}"
    if isinstance(args, dict):
        return ", ".join(f"{k}={_short_args(v)}" for k, v in args.items())
    if isinstance(args, list):
        return f"({', '.join(_short_args(a) for a in args)})"
    return str(args)[:120]


def print_groups(results: list[Compared]) -> None:
    counts = collections.Counter((r.group, r.verdict) for r in results)
    print(f"{'group':24}" + "".join(f"{v:>11}" for v in VERDICTS))
    for group in [*sorted({r.group for r in results}), "all"]:
        row = [sum(n for (g, v), n in counts.items() if v == verdict and group in (g, "all")) for verdict in VERDICTS]
        print(f"{group:24}" + "".join(f"{n:>11,}" for n in row))


def print_operators(results: list[Compared]) -> None:
    """Operators that are not exact, those with the largest byte differences first in each group."""
    by_op: dict[tuple[str, str], list[Compared]] = collections.defaultdict(list)
    for row in results:
        by_op[row.group, row.op].append(row)
    table = [(key, rows, _worst(rows)) for key, rows in by_op.items() if any(r.verdict in VERDICTS[1:4] for r in rows)]
    print(f"\n{'operator':60}" + "".join(f"{v:>10}" for v in VERDICTS[:4]) + "   worst peak, left difference, at case")
    for (group, op), rows, (peak, left, at) in sorted(
        table, key=lambda t: (t[0][0], -abs(t[2][0]) - abs(t[2][1]), t[0][1])
    ):
        counts = collections.Counter(r.verdict for r in rows)
        bytes_text = f"{peak:+,} {left:+,} at {at}" if counts["different"] else ""
        print(f"{f'{group}  {op}'[:60]:60}" + "".join(f"{counts[v]:>10}" for v in VERDICTS[:4]) + f"   {bytes_text}")


def _worst(rows: list[Compared]) -> tuple[int, int, int]:
    row = max(rows, key=lambda r: abs(r.peak_difference_bytes) + abs(r.left_difference_bytes))
    return row.peak_difference_bytes, row.left_difference_bytes, row.index


def print_errors(results: list[Compared]) -> None:
    """Each error once, with the operators that met it."""
    by_error: dict[str, list[Compared]] = collections.defaultdict(list)
    for row in results:
        if row.verdict == "error":
            by_error[row.error[:150]].append(row)
    for error, rows in sorted(by_error.items(), key=lambda item: -len(item[1])):
        operators = collections.Counter(r.op.removesuffix(" backward") for r in rows)
        print(
            f"\n{len(rows):6} rows raised {error}\n{'':7}first at {rows[0].group} {rows[0].index}: {', '.join(operators)[:200]}"
        )


def print_unmodelled(results: list[Compared]) -> None:
    counts = collections.Counter(remark for r in results for remark in r.remarks if remark.startswith("not modelled"))
    for remark, count in counts.most_common():
        print(f"{count:6}  {remark}")


def examples(results: list[Compared], limit: int, everything: bool) -> list[Compared]:
    """One row for each operator, the shortest; or every row that is not exact."""
    rows = [r for r in results if r.verdict in ("different", "same-peak")]
    if everything:
        return [r for r in results if r.verdict in VERDICTS[1:4]][: limit or None]
    first: dict[tuple[str, str, str], Compared] = {}
    for row in sorted(rows, key=lambda r: len(r.real) + len(r.virtual)):
        first.setdefault((row.group, row.op, row.verdict), row)
    return list(first.values())[:limit]


def report(results: list[Compared], options: argparse.Namespace) -> None:
    for row in examples(results, options.limit, options.verbose):
        print_row(row)
    print_errors(results)
    print_operators(results)
    print_unmodelled(results)
    print()
    print_groups(results)


# The command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, default=TRUTH, help="operators.jsonl.gz of the probe")
    parser.add_argument("--groups", default=",".join(GROUPS), help="comma-separated groups of cases")
    parser.add_argument("--only", default="", metavar="WORD", help="rows whose `operator [note]` has this text")
    parser.add_argument(
        "--limit", type=int, default=0, help="show so many examples, one for each operator (with --verbose: rows)"
    )
    parser.add_argument("--verbose", action="store_true", help="show every row that is not exact, side by side")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every row with its verdict")
    parser.add_argument(
        "--fail-above", type=int, metavar="N", help="exit 1 if more than N rows are different or errors"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    for hidden, kind in (("--card", str), ("--torch", str), ("--part", Path), ("--cases", Path)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    return parser


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    options.groups = options.groups.split(",")
    if unknown := set(options.groups) - set(GROUPS):
        parser.error(f"no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    if options.share is not None:
        return _work_a_share(options)
    header, truth = read_truth(options.truth, options.groups, options.only)
    if not truth:
        parser.error(f"no row has {options.only!r} in its operator or note")
    results = compare_all(truth, run_cases(truth, header, options.jobs))
    report(results, options)
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results]))
    bad = sum(r.verdict in ("different", "error") for r in results)
    return int(options.fail_above is not None and bad > options.fail_above)


def _work_a_share(options: argparse.Namespace) -> int:
    warnings.simplefilter("ignore")
    faulthandler.enable()
    options.share = (options.share, options.jobs)
    with options.part.open("a") as out:
        work(options, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
