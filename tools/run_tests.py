"""Every test that needs no GPU, in groups, as many at once as there are cores, and what they cover of the core: `make test`.

    .venv/bin/python tools/run_tests.py [--lanes 2] [--slow] [GROUP ...]

A group is a process of pytest. The longest begin first; whatever is in no group of its own is among "all others". A group that
passes is one line, one that fails is shown whole. With --slow, the tests that are marked slow run instead of the others: `make slow`.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
COVERED = ["--cov", "--cov-report=", "--cov-fail-under=0"]
NOTHING_TO_RUN = 5  # pytest's status


@dataclass(frozen=True, slots=True)
class Group:
    """Tests that run in one process. `covered`: they count for the coverage of the core, which doubles the time of planning."""

    name: str
    paths: tuple[str, ...]
    covered: bool = True


GROUPS = [
    Group("fit", ("tests/fit",), covered=False),
    Group("virtual", ("tests/virtual",), covered=False),
    Group("all others", ("tests",)),
    Group("fit techniques", ("tests/fit/techniques", "tests/fit/recomputing"), covered=False),
    Group("virtual cluster", ("tests/virtual/cluster",), covered=False),
    Group("commands", ("tests/commands",)),
    Group("explain", ("tests/explain",)),
    Group("assistant", ("tests/assistant",), covered=False),
    Group("certify", ("tests/certify",)),
    Group("fit sharded", ("tests/fit/sharding",), covered=False),
    Group("serve", ("tests/serve",), covered=False),
    Group("planner", ("tests/planner", "tests/budget")),
    Group("fit trainers", ("tests/integrations/test_fit_trainer.py", "tests/integrations/test_fit_lightning.py"), covered=False),
    Group("docs, packages", ("tests/tools",), covered=False),
    Group("kernels", ("tests/serve/kernels", "tests/serve/simulation"), covered=False),
    Group("league", ("tests/league",), covered=False),
    Group("integrations", ("tests/integrations",)),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """How a group ended."""

    group: Group
    status: int
    output: str
    seconds: float

    @property
    def line(self) -> str:
        """The group, its time, and pytest's last word."""
        said = [line for line in self.output.splitlines() if re.search(r"\d (passed|failed|errors?)\b", line)]
        return f"  {self.group.name:16}{self.seconds:5.0f} s   {said[-1].strip('= ') if said else 'no test ran'}"


def main() -> int:
    """Run them; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", type=int, default=os.cpu_count() or 1, help="groups at once (default: the cores)")
    parser.add_argument("--slow", action="store_true", help="the tests marked slow, without coverage")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help="some of: " + ", ".join(g.name for g in GROUPS))
    options = parser.parse_args()
    chosen = [group for group in GROUPS if not options.groups or group.name in options.groups]
    for left in ROOT.glob(".coverage*"):
        left.unlink()
    with ThreadPoolExecutor(options.lanes) as pool:
        results = list(pool.map(lambda group: run(group, options.lanes, slow=options.slow), chosen))
    failed = [result for result in results if result.status]
    for result in failed:
        print(f"\n{result.group.name} failed\n{result.output}")
    uncovered = 0 if options.groups or options.slow else coverage()
    if failed:
        print("failed: " + ", ".join(result.group.name for result in failed))
    return int(bool(failed) or uncovered != 0)


def run(group: Group, lanes: int, *, slow: bool = False) -> Result:
    """One group, to its end. A group may have no slow tests, which is no failure."""
    number = GROUPS.index(group)
    # Each process has its share of the cores, rather than all of them fighting for all.
    threads = str(max(1, (os.cpu_count() or 1) // lanes))
    environment = os.environ | {"OMP_NUM_THREADS": threads, "COVERAGE_FILE": str(ROOT / f".coverage.{number}")}
    # The tests start hundreds of processes: without bytecode, each of them would compile the package anew.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    began_s = time.monotonic()
    marked = "not gpu and slow" if slow else "not gpu and not slow"
    command = [sys.executable, "-m", "pytest", "-m", marked, "-o", f"cache_dir=.pytest_cache/{number}"]
    command += [*group.paths, *ignored(group), *(COVERED if group.covered and not slow else [])]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    status = 0 if slow and done.returncode == NOTHING_TO_RUN else done.returncode
    result = Result(group, status, done.stdout + done.stderr, time.monotonic() - began_s)
    print(result.line, flush=True)
    return result


def ignored(group: Group) -> list[str]:
    """What lies in this group's folders and is another's."""
    others = [path for other in GROUPS if other is not group for path in other.paths]
    inside = [path for path in others if any(path.startswith(own + "/") for own in group.paths)]
    return [f"--ignore={path}" for path in inside]


def coverage() -> int:
    """Put the groups' parts together and hold them to the bar."""
    tool: Sequence[str] = (sys.executable, "-m", "coverage")
    subprocess.run([*tool, "combine", "--quiet"], cwd=ROOT, check=True)
    return subprocess.run([*tool, "report"], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
