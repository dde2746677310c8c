"""One training of the zoo under one technique: exact, refused, or what went wrong.

The plain training is written out here as people write it: nothing of Tonnage takes its steps. A refusal is an error of
Tonnage's own before the first step, and like every other end it must leave the training as it was.
"""

import random
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import LBFGS
from torch.utils._pytree import tree_leaves

import tonnage
from fit.zoo.trainings import KINDS, Case, fp64_everywhere, seed
from tonnage.errors import TonnageError
from tonnage.fit.modules import find_blocks
from tonnage.fit.plan import FitPlan, read_plan
from tonnage.fit.prove.proof import NotTheSame
from tonnage.fit.stepping.batches import batch_rows
from tonnage.fit.technique import Technique
from tonnage.fit.techniques.activation_offload import ActivationOffload
from tonnage.fit.techniques.chunked_loss import ChunkedLoss
from tonnage.fit.techniques.fused_attention import FusedAttention
from tonnage.fit.techniques.host_states import HostStates
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.fit.techniques.tiled_attention import TiledAttention
from tonnage.fit.techniques.tiled_mlp import TiledMlp
from tonnage.fit.techniques.tiled_norm import TiledNorm
from tonnage.fit.techniques.weight_streaming import WeightStreaming

STEPS = 10
TOLERANCE = 1e-9  # of the norm of all losses, parameters, buffers, states together

TECHNIQUES: dict[str, Callable[[Case], Technique]] = {
    "two micro-batches": lambda case: MicroBatches(count=2),
    "row by row": lambda case: MicroBatches(count=batch_rows(case.batches[0])),
    "recompute": lambda case: Recompute.all(case.model),
    "recompute, sliced": lambda case: Recompute.all(case.model, slices=2),
    "recompute, operators": lambda case: Recompute(modes=dict.fromkeys(find_blocks(case.model), (1, 4))),
    "chunked-loss": lambda case: ChunkedLoss(chunk_bytes=1),
    "step-in-backward": lambda case: StepInBackward(),
    "host-states": lambda case: HostStates(how="host", gpu_bytes=301, piece_bytes=512),
    "host-states, device": lambda case: HostStates(how="device", gpu_bytes=301, piece_bytes=512),
    "activation-offload": lambda case: ActivationOffload(
        blocks=tuple(find_blocks(case.model)), minimum_bytes=1, window_bytes=512
    ),
    "weight-streaming": lambda case: WeightStreaming(blocks=tuple(find_blocks(case.model))),
    "fused-attention": lambda case: FusedAttention(),
    "tiled-attention": lambda case: TiledAttention(tile_rows=3),
    "tiled-mlp": lambda case: TiledMlp(tiles=3),
    "tiled-norm": lambda case: TiledNorm(tiles=3),
}
TOGETHER = "together"  # of these, all that are exact alone
JOINED = ("row by row", "recompute", "chunked-loss", "host-states")
COLUMNS = (*TECHNIQUES, TOGETHER)
PROCESSES = 2


@dataclass(frozen=True)
class Outcome:
    verdict: str  # "exact", "no blocks", "refused: …", or, in capitals, what is wrong
    left: tuple[str, ...] = ()  # what is not as it was

    @property
    def good(self) -> bool:
        return not self.left and self.verdict.partition(":")[0] in ("exact", "refused", "no blocks")

    def __str__(self) -> str:
        return "; ".join((self.verdict, *(f"LEFT {trace}" for trace in self.left)))


@contextmanager
def computed(wanted: Mapping[str, Iterable[str]]) -> Iterator[dict[str, "Future[dict[str, Outcome]]"]]:
    """Outcomes by column for each kind that is wanted, found by several processes beside this one."""
    with ProcessPoolExecutor(PROCESSES, get_context("spawn"), initializer=_begin) as pool:
        try:
            yield {kind: pool.submit(outcomes, kind, tuple(columns)) for kind, columns in wanted.items()}
        finally:
            pool.shutdown(cancel_futures=True)


def _begin() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def outcomes(kind: str, columns: tuple[str, ...]) -> dict[str, Outcome]:
    found = {column: outcome(kind, column) for column in columns}
    outcome.cache_clear()
    reference.cache_clear()
    return found


@cache
def outcome(kind: str, column: str) -> Outcome:
    with fp64_everywhere():
        case = KINDS[kind]()
        techniques = _techniques(kind, column, case)
        return _tried(kind, case, _plan(case, techniques)) if techniques else Outcome("no blocks")


def carried(kind: str, path: Path) -> Outcome:
    """Under a plan that was saved elsewhere."""
    with fp64_everywhere():
        return _tried(kind, KINDS[kind](), read_plan(path))


def _techniques(kind: str, column: str, case: Case) -> tuple[Technique, ...]:
    names = [column]
    if column == TOGETHER:
        names = [name for name in JOINED if outcome(kind, name).verdict == "exact"]
        names = names if len(names) > 1 else []
    made = [TECHNIQUES[name](case) for name in names]
    return tuple(technique for technique in made if _has_work(technique))


def _has_work(technique: Technique) -> bool:
    return bool(getattr(technique, "modes", True)) and bool(getattr(technique, "blocks", True))


def _tried(kind: str, case: Case, plan: FitPlan) -> Outcome:
    before = traces(case)
    try:
        fitted = tonnage.fit(
            case.model,
            case.optimizer,
            loss=case.loss,
            sample=case.batches[0],
            clip_norm=case.clip_norm,
            plan=plan,
        )
    except NotTheSame as error:  # the proof found what the steps below would have shown
        return Outcome(f"NOT THE SAME: {error}", changes(before, case))
    except TonnageError as error:
        return Outcome(f"refused: {error}", changes(before, case))
    except Exception as error:
        return Outcome(_died("in fit", error), changes(before, case))
    disturbed = tuple(f"by fit: {trace}" for trace in changes(before, case, only=("value", "random")))
    try:
        seen = _run(case, fitted.step)
        fitted.undo()
        verdict = _compared(seen | _numbers(case), reference(kind))
    except TonnageError as error:
        verdict = f"STOPPED: {error}"
    except Exception as error:
        verdict = _died("in a step", error)
    with suppress(TonnageError):  # undone already
        fitted.undo()
    return Outcome(verdict, (*disturbed, *changes(before, case, only=("shape",))))


def _plan(case: Case, techniques: tuple[Technique, ...]) -> FitPlan:
    unknown = dict.fromkeys(("budget_bytes", "host_budget_bytes", "peak_bytes", "plain_peak_bytes"), 0)
    seconds = dict.fromkeys(("step_s", "plain_step_s"), 0.0)
    rows = batch_rows(case.batches[0])
    return FitPlan(techniques=techniques, device="cpu", torch=torch.__version__, batch_rows=rows, **unknown, **seconds)


def _died(where: str, error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/tonnage/" in frame.filename] or list(frames)
    place = f"{ours[-1].filename.rpartition('/tonnage/')[2]}:{ours[-1].lineno}"
    return f"DIED {where}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} ({place})"


# Steps ----------------------------------------------------------------------------------------------------------------


Numbers = dict[str, list[Any]]  # what a training leaves after its steps, by what it is


@cache
def reference(kind: str) -> Numbers:
    with fp64_everywhere():
        case = KINDS[kind]()
        return _run(case, plain_step(case)) | _numbers(case)


def repeated(kind: str) -> Outcome:
    """The plain training must be one: finite, in FP64, learning, and the same when it is made again."""
    losses = reference(kind)["losses"]
    if not all(loss.dtype == torch.float64 and loss.isfinite() for loss in losses):
        return Outcome(f"WRONG: losses are {losses}")
    if len({float(loss) for loss in losses}) == 1:
        return Outcome("WRONG: nothing is learnt")
    with fp64_everywhere():
        case = KINDS[kind]()
        return Outcome(_compared(_run(case, plain_step(case)) | _numbers(case), reference(kind)))


def plain_step(case: Case) -> Callable[[Any], Tensor]:
    """The loop that everyone writes."""

    def step(batch: Any) -> Tensor:
        def closure() -> Tensor:
            case.optimizer.zero_grad()
            loss = case.loss(case.model, batch)
            loss.backward()
            return loss

        if isinstance(case.optimizer, LBFGS):
            return case.optimizer.step(closure).detach()
        loss = closure()
        if case.clip_norm is not None:
            nn.utils.clip_grad_norm_(case.model.parameters(), case.clip_norm)
        case.optimizer.step()
        case.optimizer.zero_grad()
        return loss.detach()

    return step


def _run(case: Case, step: Callable[[Any], Tensor]) -> Numbers:
    losses = []
    if case.after_fit is not None:
        case.after_fit()
    for number in range(STEPS):
        seed(number)
        losses.append(step(case.batches[number % len(case.batches)]).clone())
        if case.after_step is not None:
            case.after_step()
    return {"losses": losses, "what is beside": _leaves(case.also())}


def _numbers(case: Case) -> Numbers:
    states = case.optimizer.state_dict()
    by_index = [states["state"][index] for index in sorted(states["state"])]
    return {
        "parameters": _leaves(list(case.model.parameters())),
        "buffers": _leaves(list(case.model.buffers())),
        "states": _leaves([by_index, states["param_groups"]]),
    }


def _leaves(tree: Any) -> list[Any]:
    return [_kept(leaf) if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(tree)]


def _kept(tensor: Tensor) -> Tensor:
    """A copy that takes no room on the tensor's device."""
    return tensor.detach().to("cpu", copy=True)


def _compared(found: Numbers, expected: Numbers) -> str:
    errors = {name: _error(found[name], wanted) for name, wanted in expected.items()}
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE}
    return "WRONG: " + ", ".join(f"{name} by {error:.1e}" for name, error in wrong.items()) if wrong else "exact"


def _error(found: list[Any], expected: list[Any]) -> float:
    """Of the norm of all of it; infinite where it is not even of the same kind."""
    numbers = [[leaf for leaf in leaves if isinstance(leaf, Tensor | int | float)] for leaves in (found, expected)]
    if len(numbers[0]) != len(numbers[1]):
        return float("inf")
    pairs = [tuple(torch.as_tensor(leaf).double() for leaf in pair) for pair in zip(*numbers, strict=True)]
    if any(one.shape != other.shape for one, other in pairs):
        return float("inf")
    apart = sum(float((one - other).square().sum()) for one, other in pairs) ** 0.5
    size = sum(float(other.square().sum()) for _, other in pairs) ** 0.5
    return apart / size if size else apart


# What must be as it was -----------------------------------------------------------------------------------------------

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def traces(case: Case) -> dict[str, Any]:
    """Everything that a refused fit must leave alone: "shape …" a fit may change while it lasts, the rest never."""
    return dict(_traces(case))


def _traces(case: Case) -> Iterator[tuple[str, Any]]:
    for name, module in case.model.named_modules():
        yield f"shape of {name}", (type(module), sorted(module.__dict__), module.training)
        yield f"shape of hooks of {name}", [len(getattr(module, hooks)) for hooks in _HOOKS]
        yield f"shape of caching in {name}", getattr(getattr(module, "config", None), "use_cache", None)
        yield (
            f"random generators of {name}",
            [value.get_state() for value in vars(module).values() if isinstance(value, torch.Generator)],
        )
        plain = {key: value for key, value in vars(module).items() if isinstance(value, int | float | str)}
        yield f"value of attributes of {name}", plain
    for name, parameter in case.model.named_parameters(remove_duplicate=False):
        hooks = [len(getattr(parameter, hooks) or ()) for hooks in _PARAMETER_HOOKS]
        yield f"shape of parameter {name}", (id(parameter), parameter.dtype, hooks)
        yield f"value of training {name}", parameter.requires_grad
        yield f"weights of {name}", _kept(parameter)
        yield f"value of gradient {name}", None if parameter.grad is None else _kept(parameter.grad)
    for name, buffer in case.model.named_buffers():
        yield f"shape of buffer {name}", (buffer.shape, buffer.dtype)
        yield f"value of buffer {name}", _kept(buffer)
    yield from _optimizer_traces(case.optimizer)
    yield "value of what is compared beside", _leaves(_also(case))
    yield "random numbers of torch", torch.get_rng_state()
    yield "random numbers of Python", random.getstate()
    yield "random numbers of numpy", [torch.as_tensor(part) for part in np.random.get_state()[1:]]


def _optimizer_traces(optimizer: Any) -> Iterator[tuple[str, Any]]:
    hooks = {key: len(value) for key, value in vars(optimizer).items() if "hooks" in key}
    own = sorted(set(vars(optimizer)) - {"_opt_called"})  # torch's schedulers put that there when it steps
    yield "shape of the optimizer", (type(optimizer), own, hooks)
    groups = [{**group, "params": [id(p) for p in group["params"]]} for group in optimizer.param_groups]
    yield "shape of the optimizer's groups", [sorted(group) for group in groups]
    yield "value of the optimizer's groups", _leaves(groups)
    yield "states", _leaves(list(optimizer.state.values()))
    yield "states' parameters", [id(parameter) for parameter in optimizer.state]


def _also(case: Case) -> Any:
    """Before the first step there may be nothing to compare yet."""
    with suppress(Exception), _same_random_numbers():
        return case.also()
    return ()


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    with torch.random.fork_rng([]):
        yield


def changes(before: dict[str, Any], case: Case, only: tuple[str, ...] = ("",)) -> tuple[str, ...]:
    after = traces(case)
    names = [name for name in {**before, **after} if name.startswith(only)]
    return tuple(name for name in names if not _same(before.get(name), after.get(name)))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other) if not isinstance(one, Tensor) and not isinstance(other, Tensor) else False
