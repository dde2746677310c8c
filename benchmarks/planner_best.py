"""Hold the best plan of the search against everything that its space allows, one family after the other and without shortcuts.

    .venv/bin/python benchmarks/planner_best.py            # all questions
    .venv/bin/python benchmarks/planner_best.py gpt2       # those of one model

More than the search tries, too: every K of `every-K`, and offload to the host whether or not memory is short. The bar: the
fastest plan of the search is within 2 % of the best of all that. Where memory is not short, offload is not searched, and what it
would gain is shown apart.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from tonnage.budget.time.step import StepClock
from tonnage.hardware import find_cluster
from tonnage.hardware.cluster import Cluster
from tonnage.models import find_model
from tonnage.models.shape import ModelShape
from tonnage.planner.training.request import NO_OFFLOAD, Offload, TrainingRequest, layer_count
from tonnage.planner.training.search import Judged, judge, search
from tonnage.planner.training.simplicity import fastest
from tonnage.planner.training.space import OFFLOADS, layouts, passes, shardings

QUESTIONS = (
    ("gpt2", "t4", TrainingRequest(seq=1024)),
    ("bert-base", "2xrtx-3090", TrainingRequest(seq=512)),
    ("t5-base", "2xl4", TrainingRequest(seq=512)),
    ("vit-base", "a100-40", TrainingRequest(seq=197)),
    ("llama-3.2-1b", "2xrtx-3090", TrainingRequest(seq=2048)),
    ("qwen3-4b", "4xrtx-4090", TrainingRequest(seq=4096)),
    ("llama-3.1-8b", "h200", TrainingRequest(seq=4096)),
    ("llama-3.1-8b", "8xh100", TrainingRequest(seq=8192)),
    ("llama-3.1-8b", "8xa100-40", TrainingRequest(seq=4096)),
    ("llama-3.1-8b", "rtx-4090", TrainingRequest(seq=2048, lora_rank=16, base="nf4")),
    ("gemma-2-9b", "8xa100-80", TrainingRequest(seq=4096)),
    ("mixtral-8x7b", "16xh100", TrainingRequest(seq=4096)),
    ("llama-3.1-70b", "8xh200", TrainingRequest(seq=8192)),
    ("llama-3.1-70b", "16xh100", TrainingRequest(seq=8192)),
    ("mamba-2.8b", "4xh100", TrainingRequest(seq=4096)),
)
_MOST_K = 16


class Best(NamedTuple):
    """The fastest that leaves headroom: its speed, and words for it."""

    tokens_per_s: float
    words: str


def main() -> None:
    """One row a question; exits with how many missed the bar."""
    missed = 0
    print(f"{'question':34}{'search':>10}{'all':>10}{'missed':>9}{'offloaded':>11}{'looked at':>11}{'all':>9}")
    for model, gpus, request in QUESTIONS:
        if sys.argv[1:] and model not in sys.argv[1:]:
            continue
        shape, cluster = find_model(model), find_cluster(gpus)
        found = search(shape, cluster, request)
        if found.best is None:
            print(f"{model + ' on ' + gpus:34}fits in no way")
            continue
        tried = best_of(found.judged)
        stay, host = (list(everything(shape, cluster, request, places)) for places in ((NO_OFFLOAD,), OFFLOADS[1]))
        here = best_of(stay)
        both = best_of([*stay, *host])
        bar = both if any(one.family.offload != NO_OFFLOAD for one in found.judged) else here
        gap = bar.tokens_per_s / tried.tokens_per_s - 1
        missed += gap > 0.02
        offloaded = both.tokens_per_s / tried.tokens_per_s - 1
        sizes = f"{found.looked_at:11,}{sum(one.family.size for one in (*stay, *host)):9,}"
        print(
            f"{model + ' on ' + gpus:34}{tried.tokens_per_s:10,.0f}{bar.tokens_per_s:10,.0f}{gap:+9.1%}{offloaded:+11.1%}{sizes}"
        )
        if gap > 0.02:
            print(f"   {tried.words}\n   {bar.words}")
    sys.exit(missed)


def everything(
    shape: ModelShape, cluster: Cluster, request: TrainingRequest, places: Iterable[Offload], most_k: int = _MOST_K
) -> Iterator[Judged]:
    """Every family of the space, whole."""
    rows, clock = layouts(shape, cluster, request), StepClock(shape, cluster)
    more = [f"every-{k}" for k in range(2, min(most_k, layer_count(shape)) + 1)] if request.checkpoint is None else []
    for sharding in (sharding for offload in places for sharding in shardings(request, rows, offload)):
        ways = passes(request, sharding.offload)
        losses = {loss for _, loss in ways}
        for way in dict.fromkeys([*ways, *((checkpoint, loss) for checkpoint in more for loss in losses)]):
            yield judge(shape, cluster, clock, sharding.running(*way), timed="what leaves headroom")


def best_of(judged: Iterable[Judged]) -> Best:
    """The fastest of some families."""
    roomy = [one for one in judged if one.leaves_headroom.any()]
    if not roomy:
        return Best(0.0, "")
    one, index = fastest([replace(one, fits=one.leaves_headroom) for one in roomy])
    plan = one.family.configuration.at(index)
    degrees = " ".join(f"{name} {getattr(plan, name)}" for name in ("zero", "tp", "pp", "cp", "ep"))
    batch = f"{plan.micro_batch}×{plan.accumulate}"
    words = f"{plan.framework} {degrees} {batch} {plan.checkpoint} {plan.loss} {one.family.offload.words}"
    return Best(float(one.tokens_per_s[index]), words)


if __name__ == "__main__":
    main()
