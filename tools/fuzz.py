"""Spoils files of every kind that tonnage reads, and looks for one that it does not refuse in words.

    .venv/bin/python tools/fuzz.py --minutes 20                       # a hunt; each run begins with other numbers
    .venv/bin/python tools/fuzz.py --cases 100 --kinds trace,ncu      # the first hundred of each, the same every time
    .venv/bin/python tools/fuzz.py --case trace/1234 --keep /tmp/x    # one again; its file and its words stay in /tmp/x

What is promised of every file stands in tests/fuzz/running.py. Exits 1 where a promise was broken.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

ROOT = Path(__file__).parent.parent
# In place of this folder, where `fuzz` is this very file.
sys.path[:1] = [str(ROOT / "src"), str(ROOT / "tests")]

from fuzz.kinds import KINDS  # noqa: E402
from fuzz.running import Failure, prepare, run_case  # noqa: E402


def main() -> int:
    """Run the cases that were asked for; the exit status."""
    options = _parser().parse_args()
    kinds = [options.case.partition("/")[0]] if options.case else options.kinds.split(",")
    prepare(kinds)
    began_s = time.monotonic()
    ran: Counter[str] = Counter()
    found: dict[str, list[Failure]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.keep or scratch) / "case"
        for kind, number in _cases(options, kinds, began_s):
            failure = run_case(kind, number, folder)
            ran[kind] += 1
            if failure:
                found.setdefault(failure.sign, []).append(failure)
                if len(found[failure.sign]) == 1:
                    print(
                        f"{failure.case}: {failure.sign}\n  {failure.call[:300]}\n{_indented(failure.said)}", flush=True
                    )
    seconds = time.monotonic() - began_s
    for sign, failures in sorted(found.items(), key=lambda item: -len(item[1])):
        print(f"{len(failures):6} × {sign}   {failures[0].case}")
    print(
        f"{ran.total():,} cases in {seconds:.0f} s, {ran.total() / seconds:.1f} a second; {len(found)} kinds of failure"
    )
    return int(bool(found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to hunt (default: 1)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="some of: " + ", ".join(KINDS))
    parser.add_argument("--cases", type=int, help="this many of each kind, from --first on, instead of a time")
    parser.add_argument("--first", type=int, help="the first number (default: 0 with --cases, else by the clock)")
    parser.add_argument("--case", default="", help="one case again, like trace/1234")
    parser.add_argument("--keep", metavar="FOLDER", help="leave the last case's file and words here")
    return parser


def _cases(options: argparse.Namespace, kinds: list[str], began_s: float) -> Iterator[tuple[str, int]]:
    if options.case:
        yield kinds[0], int(options.case.partition("/")[2])
        return
    first = options.first if options.first is not None else 0 if options.cases else int(time.time()) * 1000
    for number in range(first, first + options.cases) if options.cases else count(first):
        for kind in kinds:
            if not options.cases and time.monotonic() - began_s > 60 * options.minutes:
                return
            yield kind, number


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines()[-14:])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
