"""Plans that fit chooses on the virtual GPU for a dozen trainings of the zoo, and the trainings under them on the CPU.

The trainings are made larger on the virtual GPU, at three budgets each, in a process of its own, as `fit.virtual_fits`
says. The plans are then applied to the small ones, whose ten steps are compared. It takes some minutes:

    python tests/fit/zoo/virtual_zoo.py [NAME ...]
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCALE = "32"
SHARES = (0.8, 0.5, 0.2)  # of what the plain step takes beside the parameters
CHOSEN = (
    "llama",
    "gpt2",
    "gpt2 without dropout",
    "lora through peft",
    "one trained block",
    "class weighted loss of the hugging face docs",
    "mask that is full in the sample",
    "zero is the ignored label",
    "dropout modules",
    "experts with a z loss",
    "running mean inside blocks",
    "penalty on parameters",
)
# Not for FP64 on a CPU, where the plans are carried to.
WITHOUT = ("allocator", "autocast", "compile", "master-weights")


def main(*kinds: str) -> None:
    warnings.simplefilter("ignore")
    for found, words in chosen(*(kinds or CHOSEN)):
        print(f"{found['kind']} | {found['share']}: {words}", found["left"] or "", *found["techniques"], flush=True)


def chosen(*kinds: str) -> Iterator[tuple[dict[str, Any], str]]:
    """What fit did with each kind at each budget, and how the small training went under its plan."""
    from fit.zoo.trial import carried

    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "ZOO_SCALE": SCALE}
        command = [sys.executable, "-W", "ignore", __file__, *kinds]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=directory, env=environment)
        assert process.stdout is not None
        for line in (line for line in process.stdout if line.startswith("{")):  # libraries print too
            found = json.loads(line)
            yield found, found["problem"] or str(carried(found["kind"], Path(directory) / found["plan"]))
        assert process.wait() == 0


# On the virtual GPU ---------------------------------------------------------------------------------------------------


def choose(*kinds: str) -> None:
    """A line of JSON for each kind and budget; plans are saved here."""
    from fit.zoo.trainings import KINDS  # noqa: F401
    from tonnage.virtual import virtual_gpu

    gc.freeze()  # what was imported: each training begins with a garbage collection
    with virtual_gpu("h200"):
        for kind in kinds:
            try:
                plain_bytes, held_bytes = _plain_peak(kind)
            except Exception as error:
                words = f"does not run on the virtual GPU: {type(error).__name__}: {error}"
                print(
                    json.dumps({"kind": kind, "share": 1, "problem": words, "left": [], "techniques": []}), flush=True
                )
                continue
            for share in SHARES:
                plan = f"{kind.replace(' ', '-')}-{share}.json"
                budget = held_bytes + int(share * (plain_bytes - held_bytes))
                print(json.dumps({"kind": kind, "share": share, "plan": plan, **_fit(kind, budget, plan)}), flush=True)


def _case(kind: str) -> Any:
    """On a card that the one before has left."""
    import torch
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    from fit.zoo.trainings import KINDS

    gc.collect()
    torch.cuda.empty_cache()
    case = KINDS[kind]()
    case.model.cuda()
    case.batches = [tree_map_only(Tensor, lambda tensor: tensor.cuda(), batch) for batch in case.batches]
    return case


def _plain_peak(kind: str) -> tuple[int, int]:
    """What is reserved at most, and what of it is parameters and libraries."""
    import torch

    case = _case(kind)
    parameters_bytes = sum(parameter.nbytes for parameter in case.model.parameters())
    for _ in range(2):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        case.loss(case.model, case.batches[0]).backward()
        case.optimizer.step()
        case.optimizer.zero_grad()
    peak_bytes = torch.cuda.max_memory_reserved()
    del case
    gc.collect()
    torch.cuda.empty_cache()
    return peak_bytes, parameters_bytes + torch.cuda.memory_reserved()


def _fit(kind: str, budget: int, path: str) -> dict[str, Any]:
    import torch

    import tonnage
    from fit.zoo.trial import changes, traces
    from tonnage.errors import TonnageError

    case = _case(kind)
    before = traces(case)
    options = {"loss": case.loss, "sample": case.batches[0], "budget": budget, "host": "8 GiB", "without": WITHOUT}
    try:
        fitted = tonnage.fit(case.model, case.optimizer, **options)
    except TonnageError as error:
        left = changes(before, case, only=("shape", "random", "states"))
        return {"problem": f"refused: {error}", "left": left, "techniques": []}
    except Exception as error:
        return {"problem": f"DIED: {type(error).__name__}: {error}", "left": [], "techniques": []}
    fitted.save(path)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        fitted.step(case.batches[0])
    peak_bytes = torch.cuda.max_memory_reserved()
    fitted.undo()
    techniques = [technique.name for technique in fitted.plan.techniques]
    problem = f"OVER the budget of {budget} by {peak_bytes - budget} bytes" if peak_bytes > budget else ""
    return {"problem": problem, "left": changes(before, case, only=("shape",)), "techniques": techniques}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    (choose if "ZOO_SCALE" in os.environ else main)(*sys.argv[1:])
