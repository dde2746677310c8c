"""What one rank does in a test, beside the single process that it is held against. See `worlds`.

Every program gets its rank and a folder that all ranks share, and returns plain data.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import tonnage
from fit.cases import CASES, Case, build_training, dropout_net, gpt2
from fit.cases import take_step as take_plain_step
from fit.test_plan import make_plan
from tonnage.fit.fitted import Fitted
from tonnage.fit.sharding import agreement
from tonnage.fit.sharding.agreement import Agreement
from tonnage.fit.sharding.fitting import AgreedMeter, AgreedSurvey, agreed
from tonnage.fit.sharding.shard import Shard
from tonnage.fit.stepping.batches import take_rows
from tonnage.fit.stepping.step import accumulate
from tonnage.fit.survey.meter import Duration, Watch
from tonnage.fit.technique import Technique
from tonnage.fit.techniques.activation_offload import ActivationOffload
from tonnage.fit.techniques.chunked_loss import ChunkedLoss
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.training import Training

LAYERS = ("model.layers.0", "model.layers.1", "model.layers.2")
ACTIVATIONS: list[Technique] = [
    ChunkedLoss(chunk_bytes=1 << 12),
    Recompute(modes={LAYERS[0]: "block", LAYERS[1]: "part:mlp"}),
    ActivationOffload(blocks=LAYERS[:2], minimum_bytes=1),
]
PLANS: dict[str, list[Technique]] = {
    "stage 3": [Shard()],
    "stage 2": [Shard(stage=2)],
    "on the host": [Shard(offload=True)],
    "one block wrapped": [Shard(blocks=LAYERS[:1])],
    "micro-batches": [Shard(), MicroBatches(count=2)],
    "micro-batches, each exchanged": [Shard(gradients="each"), MicroBatches(count=2)],
    "all of them": [Shard(stage=2), *ACTIVATIONS, MicroBatches(count=2)],
    "all of them on the host": [Shard(offload=True, gradients="each"), *ACTIVATIONS, MicroBatches(count=2)],
}


def one_dimension() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def replicas_and_shards() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def fit(training: Training, mesh: DeviceMesh, *techniques: Technique, **changed: Any) -> Fitted:
    return tonnage.fit(
        training.model,
        training.optimizer,
        loss=training.loss,
        sample=training.sample,
        mesh=mesh,
        clip_norm=training.stepper.clip_norm,
        **{"plan": make_plan(*techniques), **changed},
    )


def mine(batch: Any, rank: int) -> Any:
    """This rank's rows of a batch that one process would have whole."""
    world, rows = dist.get_world_size(), len(batch["labels"])
    return take_rows(batch, slice(rank * rows // world, (rank + 1) * rows // world))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def difference(found: Iterator[Tensor] | Sequence[Tensor], expected: Iterator[Tensor] | Sequence[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((whole(one).detach() - other.detach()).abs().max()) for one, other in pairs)


def gradient_difference(fitted: Fitted, batch: Any, plain: Training) -> float:
    """Gradients of a step that is not taken."""
    training = fitted.training
    parts = training.ranks.divide(training, batch)
    training.stepper.begin(len(parts))
    accumulate(training, parts)
    plain.loss(plain.model, plain.sample).backward()
    worst = difference(
        [p.grad for p in training.model.parameters()],
        [p.grad for p in plain.model.parameters()],
    )
    training.stepper.abandon()
    plain.model.zero_grad()
    return worst


# Steps ----------------------------------------------------------------------------------------------------------------


def steps(rank: int, folder: Path) -> Any:
    return {name: _steps(rank, one_dimension(), techniques) for name, techniques in PLANS.items()}


def four(rank: int, folder: Path) -> Any:
    return {"stage 3": _steps(rank, one_dimension(), PLANS["stage 3"])}


def hybrid(rank: int, folder: Path) -> Any:
    names = ("stage 3", "on the host", "all of them")
    return {name: _steps(rank, replicas_and_shards(), PLANS[name]) for name in names}


def _steps(
    rank: int, mesh: DeviceMesh, techniques: Sequence[Technique], build: Callable[[], Case] = CASES["llama"]
) -> Any:
    """Worst differences from one process: losses and parameters of steps under fit, gradients, and one step after undo."""
    training, plain = (build_training(build, clip_norm=0.1) for _ in range(2))
    objects = [id(parameter) for parameter in training.model.parameters()]
    if rank:  # a seed of its own: the first rank's parameters count
        for parameter in training.model.parameters():
            nn.init.normal_(parameter)
    batch = mine(training.sample, rank)
    fitted = fit(training, mesh, *techniques)
    losses = [difference([fitted.step(batch)], [take_plain_step(plain, step)]) for step in range(2)]
    found = {
        "sharded": all(isinstance(parameter, DTensor) for parameter in training.model.parameters()),
        "loss": max(losses),
        "norm": difference([fitted.training.stepper.gradient_norm], [plain.stepper.gradient_norm]),
        "gradients": gradient_difference(fitted, batch, plain),
        "parameters": difference(training.model.parameters(), plain.model.parameters()),
    }
    fitted.undo()
    after = difference([take_plain_step(training, 9)], [take_plain_step(plain, 9)])
    found["after undo"] = max(after, difference(training.model.parameters(), plain.model.parameters()))
    found["same objects"] = objects == [id(parameter) for parameter in training.model.parameters()]
    return found


def again(rank: int, folder: Path) -> Any:
    """Sharded, undone and sharded in another way, with states and a schedule that go on."""
    training, plain = (build_training(CASES["llama"]) for _ in range(2))
    schedules = [torch.optim.lr_scheduler.StepLR(one.optimizer, 1, 0.5) for one in (training, plain)]
    batch, losses = mine(training.sample, rank), []
    for techniques in ([Shard()], PLANS["all of them on the host"], [Shard(stage=2)]):
        fitted = fit(training, one_dimension(), *techniques)
        losses.append(difference([fitted.step(batch)], [take_plain_step(plain, 0)]))
        for schedule in schedules:
            schedule.step()
        fitted.undo()
        assert not any(isinstance(held, DTensor) for held in gc.get_objects()), "shards are gone"
    return max([*losses, difference(training.model.parameters(), plain.model.parameters())])


def proof(rank: int, folder: Path) -> Any:
    training = build_training(CASES["llama"])
    batch = mine(training.sample, rank)
    proven = fit(training, one_dimension(), *PLANS["all of them"]).prove(batch)
    return {"error": proven.worst_error, "compared": proven.parameters, "loss": proven.loss - proven.plain_loss}


def mixed_precision(rank: int, folder: Path) -> Any:
    training, plain = (build_training(CASES["llama"], dtype=torch.float32) for _ in range(2))
    fitted = fit(training, one_dimension(), Shard(dtype="bfloat16"))
    seen: set[str] = set()
    training.model.model.layers[0].mlp.register_forward_pre_hook(lambda _, inputs: seen.add(str(inputs[0].dtype)))
    loss = difference([fitted.step(mine(training.sample, rank))], [take_plain_step(plain, 0)])
    kept = {str(parameter.dtype) for parameter in training.model.parameters()}
    return {"loss": loss, "computed in": sorted(seen), "kept in": sorted(kept)}


def tied(rank: int, folder: Path) -> Any:
    """Embedding and head are one parameter, and it is one again after undo."""
    return _steps(rank, one_dimension(), [Shard()], lambda: gpt2(dropout=0.0))


# Batches that differ --------------------------------------------------------------------------------------------------


def ragged() -> Case:
    """Widths that do not divide (a head of five rows), and batches of other rows and lengths on each rank."""
    model, _, loss = dropout_net()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model, ragged_batch(2), loss


def ragged_batch(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    rows, length = 1 + number % 3, 6 - number % 4
    labels = torch.randint(0, 5, (rows, length), generator=generator)
    labels[0, : number % 3] = -100
    return {"x": torch.randn(rows, length, 8, generator=generator).double(), "y": labels}


def sum_of_all(model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> Tensor:
    """The mean over the labels of several batches, as one process would make it."""
    logits = torch.cat([model(batch["x"]).flatten(0, 1) for batch in batches])
    return nn.functional.cross_entropy(logits, torch.cat([batch["y"].flatten() for batch in batches]))


def uneven(rank: int, folder: Path) -> Any:
    world = dist.get_world_size()
    rounds = [[ragged_batch(world * step + other) for other in range(world)] for step in range(3)]
    return _against_all(rank, rounds, Shard(), MicroBatches(count=2))


def lacking(rank: int, folder: Path) -> Any:
    """Rank 0 has one batch, rank 1 two, and so on: whoever is done goes on with the others."""
    world = dist.get_world_size()
    rounds = [
        [ragged_batch(step + other) if other >= step else None for other in range(world)] for step in range(world)
    ]
    return _against_all(rank, rounds, Shard(stage=2), MicroBatches(count=3))


def _against_all(rank: int, rounds: list[list[Any]], *techniques: Technique) -> Any:
    training, plain = build_training(ragged), build_training(ragged)
    fitted = fit(training, one_dimension(), *techniques)
    losses = []
    with fitted.joined():
        for batches in rounds:
            if batches[rank] is not None:
                losses.append(fitted.step(batches[rank]))
    plain.loss = sum_of_all
    expected = []
    for batches in rounds:
        plain.sample = [batch for batch in batches if batch is not None]
        expected.append(take_plain_step(plain, 0))
    return {
        "steps": len(losses),
        "loss": difference(losses, expected[: len(losses)]),
        "parameters": difference(training.model.parameters(), plain.model.parameters()),
    }


# Checkpoints ----------------------------------------------------------------------------------------------------------


def checkpoints(rank: int, folder: Path) -> Any:
    """Both ways, whole and in shards: after them the training goes on as the plain one does."""
    shards = {"stage 3": Shard(), "on the host": Shard(offload=True)}
    return {name: _checkpoints(rank, folder / name, one_dimension(), shard) for name, shard in shards.items()}


def hybrid_checkpoints(rank: int, folder: Path) -> Any:
    return {"hybrid": _checkpoints(rank, folder / "hybrid", replicas_and_shards(), Shard(stage=2))}


def _checkpoints(rank: int, folder: Path, mesh: DeviceMesh, shard: Shard) -> Any:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import state_dict as states

    whole_on_host = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    plain = build_training(CASES["llama"])
    take_plain_step(plain, 0)
    learnt = deepcopy(states.get_state_dict(plain.model, plain.optimizer))

    # From one process into shards.
    training = build_training(CASES["llama"])
    fitted = fit(training, mesh, shard)
    given = states.StateDictOptions(full_state_dict=True)
    states.set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=learnt[0],
        optim_state_dict=learnt[1],
        options=given,
    )
    batch = mine(training.sample, rank)
    went_on = difference([fitted.step(batch)], [take_plain_step(plain, 1)])

    # From shards into one process.
    model, optimizer = states.get_state_dict(training.model, training.optimizer, options=whole_on_host)
    dist.broadcast_object_list(held := [model, optimizer], src=0)
    again = build_training(CASES["llama"])
    states.set_state_dict(again.model, again.optimizer, model_state_dict=held[0], optim_state_dict=held[1])
    came_back = difference([take_plain_step(again, 2)], [take_plain_step(plain, 2)])

    # In shards to files, and from those into one process.
    checkpoint.save({"model": states.get_model_state_dict(training.model)}, checkpoint_id=folder)
    loaded = build_training(CASES["llama"]).model
    target = {"model": loaded.state_dict()}
    checkpoint.load(target, checkpoint_id=folder, no_dist=True)
    from_files = difference(training.model.parameters(), loaded.parameters())
    return {
        "into shards": went_on,
        "out of shards": came_back,
        "names": list(held[0]) == list(learnt[0]),
        "from files": from_files,
    }


# What goes wrong ------------------------------------------------------------------------------------------------------


class Breaking:
    """A loss that raises on some ranks, in forward or in backward, at its n-th call."""

    def __init__(self, training: Training, rank: int, *, on: Sequence[int], call: int, backward: bool = False) -> None:
        self.plain, self.calls_left, self.backward = training.loss, call if rank in on else 0, backward

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls_left -= 1
        if self.calls_left:
            return self.plain(model, batch)
        if not self.backward:
            raise ZeroDivisionError("in forward")
        handle = model.model.layers[1].self_attn.q_proj.register_full_backward_pre_hook(_raise)
        loss = self.plain(model, batch)
        handle.remove()
        return loss


def _raise(*_: Any) -> None:
    raise ZeroDivisionError("in backward")


def _broken(rank: int, **how: Any) -> None:
    training = build_training(CASES["llama"])
    fitted = fit(training, one_dimension(), Shard())
    fitted.training.loss = Breaking(training, rank, **how)
    for _ in range(4):
        fitted.step(mine(training.sample, rank))


def first_raises_in_forward(rank: int, folder: Path) -> None:
    _broken(rank, on=(0,), call=2)


def last_raises_in_backward(rank: int, folder: Path) -> None:
    _broken(rank, on=(dist.get_world_size() - 1,), call=2, backward=True)


def one_raises_within_fit(rank: int, folder: Path) -> None:
    training = build_training(CASES["llama"])
    training.loss = Breaking(training, rank, on=(1,), call=2)
    fit(training, one_dimension(), Shard())


def one_asks_for_nonsense(rank: int, folder: Path) -> None:
    training = build_training(CASES["llama"])
    if rank:
        training.optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    fit(training, one_dimension(), Shard())


def one_lingers(rank: int, folder: Path) -> None:
    """It raises, and its process stays: its connections do not close. The other's thread has less patience than usual."""
    agreement._ABORT_AFTER_S = agreement._END_AFTER_S = 1.0  # type: ignore[misc]
    try:
        _broken(rank, on=(1,), call=2)
    except ZeroDivisionError:
        time.sleep(8)
        raise


def all_raise(rank: int, folder: Path) -> Any:
    """Each has its own error, and training goes on as if the step had not been."""
    training, plain = (build_training(CASES["llama"]) for _ in range(2))
    fitted = fit(training, one_dimension(), Shard(), MicroBatches(count=2))
    sound, batch = training.loss, mine(training.sample, rank)
    raised = []
    for backward in (False, True):
        fitted.training.loss = Breaking(training, rank, on=(0, 1), call=2, backward=backward)
        try:
            fitted.step(batch)
        except ZeroDivisionError as error:
            raised.append(str(error))
        fitted.training.loss = sound
    loss = difference([fitted.step(batch)], [take_plain_step(plain, 0)])
    return {"raised": raised, "loss": max(loss, difference(training.model.parameters(), plain.model.parameters()))}


def refused(rank: int, folder: Path) -> Any:
    """What is wrong is said on every rank, and leaves a plain model behind, which trains as before."""
    from tonnage.fit.techniques.host_states import HostStates

    mesh, named = one_dimension(), replicas_and_shards
    asked: dict[str, Callable[[Training], Any]] = {
        "stage": lambda training: fit(training, mesh, Shard(stage=1)),
        "block": lambda training: fit(training, mesh, Shard(blocks=("nowhere",))),
        "beside": lambda training: fit(training, mesh, Shard(), HostStates()),
        "later": lambda training: fit(training, mesh, Shard(), ActivationOffload(blocks=("nowhere",))),
        "dimensions": lambda training: fit(training, init_device_mesh("cpu", (2, 1)), Shard()),
        "no mesh": lambda training: fit(training, "cpu", Shard()),
        "weighting": lambda training: fit(training, named(), Shard(weighting="rws")),
        "no plan of one GPU": lambda training: tonnage.fit(
            training.model, training.optimizer, loss=training.loss, sample=training.sample, plan=make_plan(Shard())
        ),
        "budget": lambda training: fit(training, mesh, plan=None, budget="1 GiB"),
        "scalar": lambda training: fit(_with_a_scalar(training), mesh, Shard()),
        "optimizer": lambda training: tonnage.fit(
            training.model,
            torch.optim.Adafactor(training.model.parameters()),
            loss=training.loss,
            sample=training.sample,
            mesh=mesh,
        ),
    }
    return {name: _refusal(request) for name, request in asked.items()}


def _with_a_scalar(training: Training) -> Training:
    training.model.register_parameter("scale", nn.Parameter(torch.tensor(1.0, dtype=torch.float64)))
    return training


def _refusal(request: Callable[[Training], Any]) -> Any:
    training, plain = (build_training(CASES["llama"]) for _ in range(2))
    try:
        request(training)
        words = "nothing"
    except tonnage.TonnageError as error:
        words = error.words
    classes = {type(module).__name__ for module in training.model.modules()}
    same = classes == {type(module).__name__ for module in plain.model.modules()}
    return words, same and difference([take_plain_step(training, 0)], [take_plain_step(plain, 0)]) == 0


def asking_for_different_things(rank: int, folder: Path) -> None:
    fit(build_training(CASES["llama"]), one_dimension(), Shard(stage=2 + rank))


# Measuring ------------------------------------------------------------------------------------------------------------


class HostMeter(AgreedMeter):
    """Times on the host, on ranks of other speed; a CPU has no bytes to watch."""

    allocated_bytes = 0

    def __init__(self, agreement: Agreement) -> None:
        self.device, self.virtual, self.agreement = torch.device("cpu"), False, agreement
        self.calls, self.own_seconds = 0, 0.0

    @contextmanager
    def watch(self) -> Iterator[Watch]:
        yield Watch(0)

    def new_peak(self) -> int:
        return 0

    def _timed(self, run: Callable[[], object], calls: int, *, behind_s: float = 0.0) -> Duration:
        started = time.monotonic()
        for _ in range(calls):
            run()
            time.sleep(0.005 * self.agreement.rank)
            self.calls += 1
        self.own_seconds = (time.monotonic() - started) / calls
        return Duration(self.own_seconds, self.own_seconds)


def survey(rank: int, folder: Path) -> Any:
    fitted = fit(build_training(CASES["llama"]), one_dimension(), Shard())
    meter = HostMeter(fitted.training.agreement)
    profile = AgreedSurvey(fitted.training, meter, meter.agreement).at(1)
    return {"calls": meter.calls, "profile": repr(profile), "own seconds": meter.own_seconds}


def all_are_full(rank: int, folder: Path) -> Any:
    return _full(rank, on=(0, 1))


def one_is_full(rank: int, folder: Path) -> Any:
    return _full(rank, on=(1,))


def _full(rank: int, on: Sequence[int]) -> Any:
    agreement = Agreement(one_dimension())

    def measure() -> str:
        if rank in on:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return "measured"

    try:
        found = agreed(agreement, measure)
    except torch.OutOfMemoryError as error:
        found = type(error).__name__
    found = [found, agreed(agreement, lambda: "goes on")]
    dist.barrier()  # the first rank keeps the store
    return found
