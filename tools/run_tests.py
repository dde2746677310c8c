"""Lint and every test that needs no GPU, in groups, one more at once than there are cores, and what they cover: `make test`.

    .venv/bin/python tools/run_tests.py [--lanes 3] [--slow] [GROUP ...]

A group is a process of pytest, but for "lint", which is `make lint`. That and the longest begin first; whatever is in no group of
its own is among "all others". A group that passes is one line, one that fails is shown whole. With --slow, the tests that are
marked slow run instead, without lint: `make slow`. Coverage is held to its floors when all groups run.

Groups are forks of one process that has imported what they import. So are the virtual runs of their tests, for each build of torch.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import coverage_probes

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from forked_runs import SHARED, Starter  # noqa: E402

SOURCE = ROOT / "src" / "tonnage"
NOTHING_TO_RUN = 5  # pytest's status


@dataclass(frozen=True, slots=True)
class Group:
    """Tests that run in one process; without any, `make lint`."""

    name: str
    paths: tuple[str, ...] = ()


GROUPS = [
    Group("lint"),
    Group("fit", ("tests/fit",)),
    Group("all others", ("tests",)),
    Group("virtual", ("tests/virtual",)),
    Group("docs, packages", ("tests/tools",)),
    Group("fit techniques", ("tests/fit/techniques", "tests/fit/recomputing")),
    Group("fit sharded", ("tests/fit/sharding",)),
    Group("planner", ("tests/planner", "tests/budget")),
    Group("serve", ("tests/serve",)),
    Group("league", ("tests/league",)),
    Group("assistant", ("tests/assistant",)),
    Group("kernels", ("tests/serve/kernels", "tests/serve/simulation")),
    Group("commands", ("tests/commands",)),
    Group("virtual cluster", ("tests/virtual/cluster",)),
    Group("fit trainers", ("tests/integrations/test_fit_trainer.py", "tests/integrations/test_fit_lightning.py")),
    Group("integrations", ("tests/integrations",)),
    Group("explain", ("tests/explain",)),
    Group("certify", ("tests/certify",)),
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
        """The group, its time, and pytest's last word or how lint ended."""
        said = [line for line in self.output.splitlines() if re.search(r"\d (passed|failed|errors?)\b", line)]
        if not self.group.paths:
            said = ["failed" if self.status else "passed"]
        return f"  {self.group.name:16}{self.seconds:5.0f} s   {said[-1].strip('= ') if said else 'no test ran'}"


def main() -> int:
    """Run them; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = os.cpu_count() or 1
    # One more than there are cores: tests wait for processes that they start, for servers and for a browser.
    parser.add_argument("--lanes", type=int, default=cores + 1, help="groups at once (default: the cores, and one)")
    parser.add_argument("--slow", action="store_true", help="the tests marked slow, without coverage")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help="some of: " + ", ".join(g.name for g in GROUPS))
    options = parser.parse_args()
    chosen = [group for group in GROUPS if not options.groups or group.name in options.groups]
    chosen = [group for group in chosen if group.paths or not options.slow]
    # Each process has its share of the cores, rather than all of them fighting for all.
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, cores // options.lanes))}
    # The tests start hundreds of processes: without bytecode, each of them would compile the package anew.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.lanes) as pool:
        whole = not options.groups and not options.slow
        environment |= coverage_probes.prepare(SOURCE, Path(folder)) if whole else {}
        starter = start(environment)
        results = list(pool.map(lambda group: run(group, starter, environment, slow=options.slow), chosen))
        failed = [result for result in results if result.status]
        for result in failed:
            print(f"\n{result.group.name} failed\n{result.output}")
        below = coverage_probes.report(Path(folder), ROOT) if whole else []
    if failed:
        print("failed: " + ", ".join(result.group.name for result in failed))
    if below:
        print("coverage is below its floor: " + ", ".join(below))
    return int(bool(failed or below))


def start(environment: dict[str, str]) -> Starter:
    """Start what forks groups of tests; its forks share what forks virtual runs."""
    programs = [path for path in ROOT.glob(".venv*/bin/tonnage") if path.parts[-3] in (".venv", ".venv-cuda")]
    shared = {str(program): Starter.of(program, environment).channel.detach() for program in programs}
    environment[SHARED] = json.dumps(shared)
    return Starter.of(Path(sys.executable).with_name("pytest"), environment, tuple(shared.values()))


def run(group: Group, starter: Starter, environment: dict[str, str], *, slow: bool = False) -> Result:
    """Run one group to its end. A group may have no slow tests, which is no failure."""
    began_s = time.monotonic()
    if group.paths:
        marked = "not gpu and slow" if slow else "not gpu and not slow"
        words = ["-m", marked, "-o", f"cache_dir=.pytest_cache/{GROUPS.index(group)}", *group.paths, *ignored(group)]
        # pytest would warn of plugins that the process had imported before it.
        words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        done = starter.run(words, environment, ROOT, None, joined=True)
    else:
        lint = ["make", "--no-print-directory", "lint"]
        done = subprocess.run(lint, cwd=ROOT, env=environment, capture_output=True, text=True)
    status = 0 if slow and done.returncode == NOTHING_TO_RUN else done.returncode
    result = Result(group, status, done.stdout + done.stderr, time.monotonic() - began_s)
    print(result.line, flush=True)
    return result


def ignored(group: Group) -> list[str]:
    """What lies in this group's folders and is another's."""
    others = [path for other in GROUPS if other is not group for path in other.paths]
    inside = [path for path in others if any(path.startswith(own + "/") for own in group.paths)]
    return [f"--ignore={path}" for path in inside]


if __name__ == "__main__":
    sys.exit(main())
