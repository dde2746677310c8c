"""Every exact technique, alone and beside every other that it allows: the training is the plain one.

The plain model, too, is kept exact: its eager attention would make its softmax in FP32. What techniques refuse is written
down here as well, so that one which no longer applies is noticed.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fit.cases import Case, build_training, dropout_net, gpt2, llama, seed_cpu, vit
from fit.observed import softmax_in_fp64  # noqa: F401
from tonnage.fit.applied import Applied
from tonnage.fit.modules import find_blocks
from tonnage.fit.stepping.batches import change_tensors
from tonnage.fit.stepping.step import take_step
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.technique import NAMES, Changes, NotApplicable, Technique, find_conflict, technique_class
from tonnage.fit.techniques.activation_offload import ActivationOffload
from tonnage.fit.techniques.autocast import Autocast
from tonnage.fit.techniques.chunked_loss import ChunkedLoss
from tonnage.fit.techniques.compile import Compile
from tonnage.fit.techniques.fused_attention import FusedAttention
from tonnage.fit.techniques.host_states import HostStates
from tonnage.fit.techniques.master_weights import MasterWeights
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.techniques.nvme import Nvme
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.fit.techniques.tiled_attention import TiledAttention
from tonnage.fit.techniques.tiled_mlp import TiledMlp
from tonnage.fit.techniques.tiled_norm import TiledNorm
from tonnage.fit.techniques.weight_streaming import WeightStreaming
from tonnage.fit.training import Training

pytestmark = pytest.mark.usefixtures("softmax_in_fp64")


@dataclass(frozen=True)
class Site:
    """What a technique's settings depend on."""

    case: str
    model: nn.Module
    directory: str

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(find_blocks(self.model))


_HEADS = {"vit": "classifier", "dropout": "head"}  # narrower than what is found by itself

MAKERS: dict[str, Callable[[Site], Technique]] = {
    "activation-offload": lambda site: ActivationOffload(blocks=site.blocks[:-1], minimum_bytes=1, window_bytes=4096),
    "autocast": lambda site: Autocast(),
    "chunked-loss": lambda site: ChunkedLoss(chunk_bytes=1, head=_HEADS.get(site.case, "")),
    "compile": lambda site: Compile(),
    "fused-attention": lambda site: FusedAttention(),
    "host-states": lambda site: HostStates(how="host", gpu_bytes=3001, piece_bytes=4096),
    "host-states, on the device": lambda site: HostStates(how="device", gpu_bytes=3001, piece_bytes=4096),
    "micro-batches": lambda site: MicroBatches(count=2),
    "nvme, activations": lambda site: Nvme(
        directory=site.directory, what="activations", blocks=site.blocks[:-1], minimum_bytes=1
    ),
    "nvme, weights": lambda site: Nvme(directory=site.directory, what="weights", blocks=site.blocks),
    "nvme, states": lambda site: Nvme(directory=site.directory, what="states"),
    "recompute": lambda site: Recompute.all(site.model),
    "recompute, operators": lambda site: Recompute(modes=dict.fromkeys(site.blocks, (1, 4))),
    "recompute, slices": lambda site: Recompute.all(site.model, slices=2),
    "step-in-backward": lambda site: StepInBackward(),
    "tiled-attention": lambda site: TiledAttention(tile_rows=4),
    "tiled-mlp": lambda site: TiledMlp(tiles=3),
    "tiled-norm": lambda site: TiledNorm(tiles=3),
    "weight-streaming": lambda site: WeightStreaming(blocks=site.blocks),
}

# Without dropout GPT-2 can use what is refused beside it; the hand-written model keeps its own.
KINDS: dict[str, Callable[[], Case]] = {
    "llama": partial(llama, layers=2),
    "gpt2": partial(gpt2, layers=2),
    "gpt2, still": partial(gpt2, layers=2, dropout=0.0),
    "vit": partial(vit, layers=2),
    "dropout": dropout_net,
}
PAIRED = ("llama", "gpt2, still", "vit", "dropout")
PAIRED_SLOWLY = ("gpt2, still", "vit")  # their blocks are changed as Llama's are

_DRAWS = ("gpt2", "dropout")
REFUSED: dict[str, tuple[str, ...]] = {
    "fused-attention": _DRAWS,
    "micro-batches": _DRAWS,
    "recompute, slices": _DRAWS,
    "tiled-attention": _DRAWS,
    "tiled-mlp": _DRAWS,
    "tiled-norm": ("gpt2", "gpt2, still", "vit", "dropout"),
}
# Reasons that only the other technique's presence brings up.
REFUSED_TOGETHER = {
    frozenset(("recompute, operators", "compile")): "is compiled",
    frozenset(("recompute, operators", "weight-streaming")): "the copies of weight-streaming",
    frozenset(("recompute, operators", "nvme, weights")): "the copies of nvme",
}


def test_every_exact_technique_is_here() -> None:
    exact = {name for name in NAMES if technique_class(name).changes is not Changes.NUMERICS}
    elsewhere = {"allocator", "master-weights"}  # of CUDA alone; of FP32 models, below
    assert {maker.partition(",")[0] for maker in MAKERS} == exact - elsewhere


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are captured and differentiated as ever, but no code is generated: that takes half a minute a graph."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, **_: compile(forward, dynamic=False, backend="aot_eager"))


@pytest.mark.parametrize("case", KINDS)
def test_a_technique_says_where_it_does_not_apply(case: str, tmp_path: Path) -> None:
    for name in MAKERS:
        training = _build(case, name)
        reason = _make(name, case, training, tmp_path).why_not(training)
        assert (reason is not None) == (case in REFUSED.get(name, ())), f"{name}: {reason}"


# The plain training ---------------------------------------------------------------------------------------------------


@dataclass
class Reference:
    """Losses of the plain training, and its checkpoints by the number of steps taken."""

    losses: list[Tensor]
    checkpoints: dict[int, dict[str, Any]]


@cache
def reference(case: str, eager: bool, dtype: torch.dtype = torch.float64) -> Reference:
    training = _build(case, "tiled-attention" if eager else "", dtype=dtype)
    found = Reference([], {})
    for step in range(11):
        found.losses.append(_step(training, step))
        found.checkpoints[step + 1] = deepcopy(_states(training))
    return found


def _build(case: str, *names: str, dtype: torch.dtype = torch.float64) -> Training:
    training = build_training(KINDS[case], dtype=dtype)
    if _eager(case, names):
        training.model.set_attn_implementation("eager")
    return training


def _eager(case: str, names: Sequence[str]) -> bool:
    """Those that replace attention find nothing to do in a model that runs PyTorch's own."""
    return case != "dropout" and any(name.endswith("attention") for name in names)


def _step(training: Training, step: int) -> Tensor:
    seed_cpu(step)
    return take_step(training, training.sample)


def _states(training: Training) -> dict[str, Any]:
    return {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}


def _load(training: Training, checkpoint: dict[str, Any]) -> None:
    training.model.load_state_dict(checkpoint["model"])
    training.optimizer.load_state_dict(deepcopy(checkpoint["optimizer"]))


def _assert_same(found: Any, expected: Any, tolerance: float) -> None:
    """Checkpoints: names, order, types and values. After the first step, Adam's first moment is a tenth of the gradient."""
    assert _described(found) == _described(expected)
    # All at once, and one by one where that says which.
    if not torch.allclose(_numbers(found), _numbers(expected), rtol=tolerance, atol=tolerance):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def _described(checkpoint: dict[str, Any]) -> Any:
    shapes = tree_map_only(Tensor, lambda tensor: (tensor.shape, tensor.dtype), checkpoint)
    return list(shapes["model"].items()), shapes["optimizer"]


def _numbers(checkpoint: dict[str, Any]) -> Tensor:
    return torch.cat([leaf.flatten().double() for leaf in tree_leaves(checkpoint) if isinstance(leaf, Tensor)])


def _make(name: str, case: str, training: Training, directory: Path) -> Technique:
    return MAKERS[name](Site(case, training.model, str(directory)))


def _tolerance(*names: str) -> float:
    """Llama's norms compute in FP32 whatever the model's type, and compiled ones add up in another order."""
    return 1e-6 if "compile" in names else 1e-10


def _assert_plain(training: Training) -> None:
    modules = list(training.model.modules())
    assert not [module for module in modules if "forward" in module.__dict__]
    assert not [module for module in modules if module._forward_hooks or module._forward_pre_hooks]
    assert not [parameter for parameter in training.model.parameters() if parameter._post_accumulate_grad_hooks]
    assert type(training.stepper) is Stepper
    assert not training.forward_contexts
    assert training.micro_batches == 1


# Alone ----------------------------------------------------------------------------------------------------------------

ALONE = [
    (case, name)
    for name in MAKERS
    for case in KINDS
    if case not in REFUSED.get(name, ()) and (name != "compile" or case == "llama")
]


@pytest.mark.parametrize(("case", "name"), ALONE, ids=[f"{case}: {name}" for case, name in ALONE])
def test_alone_ten_steps_are_equal_and_its_checkpoint_goes_on_in_a_plain_model(
    case: str, name: str, tmp_path: Path
) -> None:
    expected, tolerance = reference(case, _eager(case, [name])), _tolerance(name)
    training = _build(case, name)
    applied = Applied(training)
    applied.add([_make(name, case, training, tmp_path)])
    losses = [_step(training, step) for step in range(10)]
    torch.testing.assert_close(losses, expected.losses[:10], rtol=tolerance, atol=tolerance)
    checkpoint = deepcopy(_states(training))
    _assert_same(checkpoint, expected.checkpoints[10], tolerance)
    applied.take_away()
    _assert_plain(training)
    plain = _build(case, name)
    _load(plain, checkpoint)
    for one in (training, plain):
        torch.testing.assert_close(_step(one, 10), expected.losses[10], rtol=tolerance, atol=tolerance)
        _assert_same(_states(one), expected.checkpoints[11], tolerance)


# In pairs -------------------------------------------------------------------------------------------------------------


def _pairs() -> list[tuple[str, str, str]]:
    return [
        (case, *pair)
        for case in PAIRED
        for pair in combinations(MAKERS, 2)
        if not any(case in REFUSED.get(name, ()) for name in pair)
        and pair[0].partition(",")[0] != pair[1].partition(",")[0]
        and ("compile" not in pair or case == "llama")
    ]


def _parameters(case: str, *names: str) -> Any:
    marks = pytest.mark.slow if case in PAIRED_SLOWLY else ()
    return pytest.param(case, *names, marks=marks, id=f"{case}: {' + '.join(names) or 'alone'}")


@pytest.mark.parametrize(("case", "one", "other"), [_parameters(*pair) for pair in _pairs()])
def test_in_pairs_gradients_steps_and_checkpoints_are_equal(case: str, one: str, other: str, tmp_path: Path) -> None:
    expected, tolerance = reference(case, _eager(case, [one, other])), _tolerance(one, other)
    training = _build(case, one, other)
    techniques = [_make(name, case, training, tmp_path) for name in (one, other)]
    if find_conflict(techniques):
        return  # each file says why
    applied = Applied(training)
    if (reason := REFUSED_TOGETHER.get(frozenset((one, other)))) is not None:
        with pytest.raises(NotApplicable, match=reason):
            applied.add(techniques)
        _assert_plain(training)
        return
    applied.add(techniques)
    torch.testing.assert_close(_step(training, 0), expected.losses[0], rtol=tolerance, atol=tolerance)
    _assert_same(_states(training), expected.checkpoints[1], tolerance)
    _load(training, expected.checkpoints[5])
    torch.testing.assert_close(_step(training, 5), expected.losses[5], rtol=tolerance, atol=tolerance)
    applied.take_away()
    _assert_same(_states(training), expected.checkpoints[6], tolerance)
    _assert_plain(training)


# With master weights --------------------------------------------------------------------------------------------------

BF16_ROUNDING = 0.03  # of all gradients together, as a share of their norm
MASTERED = [
    (case, name)
    for case in PAIRED
    for name in ("", *MAKERS)
    if case not in REFUSED.get(name, ()) and name not in ("compile", "nvme, weights", "weight-streaming")
]


@pytest.mark.parametrize(("case", "name"), [_parameters(*pair) for pair in MASTERED])
def test_master_weights_round_to_bf16_and_nothing_else(case: str, name: str, tmp_path: Path) -> None:
    plain, training = (_build_fp32(case, name) for _ in range(2))
    applied = Applied(training)
    applied.add([MasterWeights(), *([_make(name, case, training, tmp_path)] if name else [])])
    for step in range(2):
        expected, found = _step(plain, step), _step(training, step)
        torch.testing.assert_close(found.float(), expected, rtol=0.01, atol=0.01)
    saved = deepcopy(_states(training))
    applied.take_away()
    _assert_plain(training)
    assert _described(saved) == _described(_states(plain))
    torch.testing.assert_close(_states(training), saved, rtol=0, atol=0)
    assert _momentum_error(training, plain) < BF16_ROUNDING


def test_master_weights_name_their_conflicts() -> None:
    assert {"weight-streaming", "stochastic-bf16"} <= set(MasterWeights.conflicts)


def _build_fp32(case: str, name: str) -> Training:
    """With momentum, which shows the gradients as they are; Adam's step hardly depends on how large they are."""
    training = _build(case, name, dtype=torch.float32)
    training.sample = change_tensors(training.sample, lambda t: t.float() if t.is_floating_point() else t)
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1, momentum=0.9)
    training.stepper = Stepper(training.optimizer)
    return training


def _momentum_error(found: Training, expected: Training) -> float:
    a, b = (_numbers(training.optimizer.state_dict()["state"]) for training in (found, expected))
    return float((a - b).norm() / b.norm())
