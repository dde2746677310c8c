"""Run cases on a real GPU and write what the CUDA caching allocator saw, one JSON line a case.

    python measure.py --cases cases-compiled.txt --out compiled.jsonl --traces traces.tar --jobs 4

A case is one line of the list: `[NAME=VALUE ...] SCRIPT [ARG ...]`, with the script in `--scripts` and settings of the
environment before it. Each case runs in a process of its own with empty caches of Inductor and Triton, so it compiles and
autotunes as at a first run. A line is written as soon as its case ends, so a run that is cut short keeps what it measured;
cases that already have a line in the output are skipped.

With `--traces` the allocator's events go into one archive, a member a case: `[action, address, size, stream]`. They are recorded
without stacks, which takes host memory only and leaves the device's peaks alone.
"""

import argparse
import contextlib
import gzip
import importlib.metadata
import io
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent / "scripts"
MAX_TRACE_EVENTS = 200_000
STATISTICS = [
    "allocated_bytes.all.peak",
    "reserved_bytes.all.peak",
    "active_bytes.all.peak",
    "requested_bytes.all.peak",
    "allocated_bytes.all.current",
    "reserved_bytes.all.current",
    "inactive_split_bytes.all.peak",
    "allocation.all.allocated",
    "segment.all.allocated",
    "num_alloc_retries",
    "num_ooms",
]
LIBRARIES = """
torch triton transformers accelerate peft timm lightning torchvision bitsandbytes liger_kernel torchao diffusers trl datasets
xformers deepspeed
""".split()


def run_case(scripts: Path, script: str, args: list[str], result_file: Path, trace_file: Path | None) -> None:
    """Run one script in this process and write its row, and its trace if it is short enough."""
    import torch

    if trace_file:
        torch.cuda.memory._record_memory_history(context=None, max_entries=MAX_TRACE_EVENTS)
    sys.argv = [script, *args]
    sys.path.insert(0, str(scripts))
    outcome, detail = "ok", ""
    start = time.perf_counter()
    try:
        runpy.run_path(str(scripts / script), run_name="__main__")
    except torch.OutOfMemoryError as error:
        outcome, detail = "oom", str(error)
    except SystemExit as error:
        outcome, detail = ("ok", "") if not error.code else ("exit", str(error.code))
    except Exception as error:
        traceback.print_exc()  # into the log; the row has the error alone, without paths of the machine
        outcome, detail = "error", "".join(traceback.format_exception_only(error)).strip()
    wall_s = time.perf_counter() - start

    statistics = torch.cuda.memory_stats() if torch.cuda.is_initialized() else {}
    row = {
        "outcome": outcome,
        "detail": detail,
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "alloc_conf": os.environ.get("PYTORCH_ALLOC_CONF", ""),
        "wall_s": round(wall_s, 3),
        "nvml_process_bytes": process_bytes(),
        **{name: statistics.get(name) for name in STATISTICS},
        "versions": imported_versions(),
    }
    if trace_file:
        events = torch.cuda.memory._snapshot()["device_traces"][0]
        row["trace_events"] = len(events)
        if len(events) < MAX_TRACE_EVENTS:
            rows = [[event["action"], event.get("addr", 0), event["size"], event.get("stream", 0)] for event in events]
            trace_file.write_bytes(gzip.compress(json.dumps(rows).encode()))
    result_file.write_text(json.dumps(row))


def process_bytes() -> int | None:
    """Return the memory of this process as NVML sees it, or None where NVML does not say."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        used = {p.pid: p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    except Exception:
        return None
    return used.get(os.getpid())


def imported_versions() -> dict[str, str]:
    """Return the versions of the libraries that the script imported."""
    versions = {}
    for name in LIBRARIES:
        if name in sys.modules:
            try:
                versions[name] = importlib.metadata.version(name.replace("_", "-"))
            except importlib.metadata.PackageNotFoundError:
                versions[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return versions


def split_case(line: str) -> tuple[dict[str, str], list[str]]:
    """Split a line of a list into settings of the environment and the command."""
    words = shlex.split(line)
    settings: dict[str, str] = {}
    while words and "=" in words[0] and not words[0].startswith("-"):
        name, _, value = words.pop(0).partition("=")
        settings[name] = value
    return settings, words


def measure(scripts: Path, line: str, timeout_s: float, keep_trace: bool) -> tuple[dict[str, Any], bytes | None]:
    """Run one case in a process of its own and return its row, and its trace if it was kept."""
    settings, command = split_case(line)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        result, trace, log = folder / "result.json", folder / "trace.json.gz", folder / "log"
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
        options = [
            "--scripts",
            str(scripts),
            "--one",
            str(result),
            *(["--one-trace", str(trace)] if keep_trace else []),
        ]
        start = time.perf_counter()

        # A group of its own, so that compile workers end with the case.
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, __file__, *options, "--", *command],
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | caches | settings,
            )
            try:
                ended = f"the process ended with {process.wait(timeout_s)} and left no result"
                outcome = "died"
            except subprocess.TimeoutExpired:
                ended, outcome = f"stopped after {timeout_s:.0f} s", "timeout"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

        row: dict[str, Any] = {"case": " ".join(command)}
        if result.exists():
            row |= json.loads(result.read_text())
        else:
            row |= {"outcome": outcome, "detail": ended}
        if row["outcome"] not in ("ok", "oom", "error"):
            row["detail"] += "\n" + log.read_text(errors="replace")[-2000:]
        if settings:
            row["environment"] = settings
        row["process_wall_s"] = round(time.perf_counter() - start, 1)
        return row, trace.read_bytes() if trace.exists() else None


def measure_all(scripts: Path, lines: list[str], out: Path, traces: Path | None, jobs: int, timeout_s: float) -> None:
    """Measure the cases, so many at a time, and write each as it ends."""
    lock = threading.Lock()

    def one(line: str) -> None:
        row, trace = measure(scripts, line, timeout_s, traces is not None)
        with lock:
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            if traces and trace:
                member = tarfile.TarInfo(re.sub(r"[^\w.=-]+", "_", line)[:150] + ".json.gz")
                member.size = len(trace)
                with tarfile.open(traces, "a") as archive:
                    archive.addfile(member, io.BytesIO(trace))
            peak = row.get("allocated_bytes.all.peak") or 0
            print(f"{row['outcome']:8} {row['process_wall_s']:6.1f} s {peak / 2**30:7.2f} GiB  {line}", flush=True)
            if row["outcome"] != "ok":
                print("    " + row["detail"][-700:].replace("\n", "\n    "), flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, help="a list of cases, one a line")
    parser.add_argument("--scripts", type=Path, default=SCRIPTS, help="the folder that the scripts are in")
    parser.add_argument("--out", type=Path, help="where rows are appended (JSON lines)")
    parser.add_argument("--traces", type=Path, help="a .tar for the allocator's events")
    parser.add_argument("--jobs", type=int, default=3, help="cases that run at the same time")
    parser.add_argument("--timeout", type=float, default=100.0, help="seconds for one case")
    parser.add_argument("--match", default="", help="only cases that contain this")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--one-trace", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_case(args.scripts.resolve(), args.command[0], args.command[1:], args.one, args.one_trace)
        return
    if not args.cases or not args.out:
        parser.error("--cases and --out are needed: a list of cases, and the file that rows are appended to")
    done = set()
    if args.out.exists():
        rows = [json.loads(line) for line in args.out.read_text().splitlines()]
        done = {(row["case"], json.dumps(row.get("environment", {}))) for row in rows}
    lines = [line.strip() for line in args.cases.read_text().splitlines() if line.strip() and not line.startswith("#")]
    waiting = []
    for line in lines:
        settings, command = split_case(line)
        if args.match in line and (" ".join(command), json.dumps(settings)) not in done:
            waiting.append(line)
    measure_all(args.scripts, waiting, args.out, args.traces, args.jobs, args.timeout)


if __name__ == "__main__":
    main()
