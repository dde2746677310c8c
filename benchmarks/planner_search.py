"""Time what people wait for when they plan: the search, and `tonnage plan` from a cold start.

    .venv/bin/python benchmarks/planner_search.py

The bars: DeepSeek-V3 on 2,048 GPUs in less than 5 s with all that is offered; a cold `tonnage plan` in at most 0.6 s and 150 MB.
The search runs on one core. Configurations that others rule out are counted, and shown apart.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from tonnage.hardware import find_cluster
from tonnage.models import find_model
from tonnage.planner.training.offers import offers
from tonnage.planner.training.request import TrainingRequest
from tonnage.planner.training.search import search

TONNAGE = str(Path(sys.executable).parent / "tonnage")
TRIES = 5
SEARCHES = (
    ("llama-3.1-8b", "h200", 4096),
    ("llama-3.1-70b", "8xh200", 8192),
    ("llama-3.1-405b", "1024xh100", 8192),
    ("mixtral-8x7b", "512xh100", 8192),
    ("deepseek-v3", "1024xh200", 4096),
    ("deepseek-v3", "2048xh100", 4096),
)
CALLS = (
    ("plan", "train", "llama-3.1-8b", "--gpus", "h200"),
    ("plan", "train", "llama-3.1-8b", "--gpus", "8xh100", "--seq", "8192"),
    ("plan", "train", "llama-3.1-70b", "--gpus", "8xh200", "--seq", "8192"),
    ("plan", "train", "llama-3.1-405b", "--gpus", "8xh100", "--seq", "8192"),
)


# In a small process: a child's peak counts that of the one it was forked from.
MEASURE = """
import os, sys, time
start = time.perf_counter()
quiet = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=quiet)
usage = os.wait4(child, 0)[2]
print([time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss])
"""


def main() -> None:
    """Both tables."""
    print(f"{'search':40}{'looked at':>12}{'ruled out':>12}{'seconds':>9}{'offers':>9}")
    for model, gpus, seq in SEARCHES:
        print(search_row(model, gpus, seq))
    print(f"\n{'cold start':62}{'seconds':>9}{'CPU':>7}{'MB':>6}")
    for words in CALLS:
        print(cold_row(words))


def search_row(model: str, gpus: str, seq: int) -> str:
    """The best of a few searches; CPU seconds, so that a busy machine does not blur them."""
    shape, cluster, request = find_model(model), find_cluster(gpus), TrainingRequest(seq=seq)
    seconds, offering = [], []
    for _ in range(TRIES):
        start = time.process_time()
        found = search(shape, cluster, request)
        seconds.append(time.process_time() - start)
        offers(found)
        offering.append(time.process_time() - start - seconds[-1])
    name = f"{model} on {gpus}, {seq}"
    ruled_out = found.searched - found.looked_at
    return f"{name:40}{found.looked_at:12,}{ruled_out:12,}{min(seconds):9.2f}{min(offering):9.2f}"


def cold_row(words: tuple[str, ...]) -> str:
    """The best of a few processes: wall and CPU seconds, and the most memory that one held."""
    command = [sys.executable, "-S", "-c", MEASURE, TONNAGE, *words]
    found = [json.loads(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(TRIES)]
    seconds, cpu, largest = (min(each) for each in zip(*found, strict=True))
    return f"{'tonnage ' + ' '.join(words):62}{seconds:9.2f}{cpu:7.2f}{largest / 1000:6.0f}"


if __name__ == "__main__":
    main()
