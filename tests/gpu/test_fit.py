"""On a real GPU: exact techniques alone and in pairs train as the plain model does, and fit keeps to its budget."""

import gc
from collections.abc import Callable
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tonnage
from fit.cases import CASES, Case, build_training, dropout_net, gpt2, vit
from tonnage.fit.applied import Applied
from tonnage.fit.modules import find_blocks
from tonnage.fit.stepping.batches import change_tensors
from tonnage.fit.stepping.step import take_step
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.survey.meter import GpuMeter
from tonnage.fit.survey.survey import Survey
from tonnage.fit.technique import NotApplicable, Technique, find_conflict
from tonnage.fit.techniques.activation_offload import ActivationOffload
from tonnage.fit.techniques.allocator import SetAllocator
from tonnage.fit.techniques.autocast import Autocast
from tonnage.fit.techniques.chunked_loss import ChunkedLoss
from tonnage.fit.techniques.compile import Compile
from tonnage.fit.techniques.host_states import HostStates
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.techniques.nvme import Nvme
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.fit.techniques.tiled_mlp import TiledMlp
from tonnage.fit.techniques.tiled_norm import TiledNorm
from tonnage.fit.techniques.weight_streaming import WeightStreaming
from tonnage.fit.training import Training

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")]

KINDS: dict[str, Callable[[], Case]] = {
    "llama": CASES["llama"],
    "gpt2": partial(gpt2, dropout=0.0),
    "vit": vit,
    "dropout": dropout_net,
}
_HEADS = {"vit": "classifier", "dropout": "head"}


def makers(case: str, model: nn.Module, directory: Path) -> dict[str, Callable[[], Technique]]:
    blocks = tuple(find_blocks(model))
    return {
        "activation-offload": lambda: ActivationOffload(blocks=blocks[:-1], minimum_bytes=1, window_bytes=4096),
        "allocator": lambda: SetAllocator(),
        "autocast": lambda: Autocast(),
        "chunked-loss": lambda: ChunkedLoss(chunk_bytes=1, head=_HEADS.get(case, "")),
        "compile": lambda: Compile(),
        "host-states": lambda: HostStates(how="host", gpu_bytes=3001, piece_bytes=4096),
        "host-states, on the device": lambda: HostStates(how="device", gpu_bytes=3001, piece_bytes=4096),
        "micro-batches": lambda: MicroBatches(count=2),
        "nvme": lambda: Nvme(directory=str(directory), what="weights", blocks=blocks),
        "recompute": lambda: Recompute.all(model),
        "recompute, slices": lambda: Recompute.all(model, slices=2),
        "step-in-backward": lambda: StepInBackward(),
        "tiled-mlp": lambda: TiledMlp(tiles=3),
        "tiled-norm": lambda: TiledNorm(tiles=3),
        "weight-streaming": lambda: WeightStreaming(blocks=blocks),
    }


NAMES = tuple(makers("", nn.Identity(), Path()))
COMPILED = ("llama",)  # each other model would cost a compilation of half a minute


def build(case: str, dtype: torch.dtype = torch.float64) -> Training:
    """The small model of the CPU's tests, on the card; with momentum, where a wrong gradient shows at once."""
    training = build_training(KINDS[case], dtype=dtype)
    training.device = torch.device("cuda")
    training.model.to(training.device)
    training.sample = change_tensors(
        training.sample, lambda tensor: tensor.to("cuda", dtype if tensor.is_floating_point() else None)
    )
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.05, momentum=0.9)
    training.stepper = Stepper(training.optimizer)
    return training


def train(training: Training, steps: int) -> list[Tensor]:
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        losses.append(take_step(training, training.sample).double())
    return losses


def states(training: Training) -> dict[str, Any]:
    return {"model": training.model.state_dict(), "momentum": training.optimizer.state_dict()["state"]}


@cache
def reference(case: str, steps: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], dict[str, Any]]:
    training = build(case, dtype)
    losses = train(training, steps)
    return losses, states(training)


def apply(training: Training, techniques: list[Technique]) -> Applied | None:
    """None where they cannot be used here, or not together; the CPU's tests say where that is right."""
    if find_conflict(techniques):
        return None
    applied = Applied(training)
    try:
        applied.add(techniques)
    except NotApplicable:
        applied.take_away()
        return None
    return applied


def tolerance(names: tuple[str, ...]) -> float:
    """Llama's norms compute in FP32 whatever the model's type, and fused or tiled ones add up in another order."""
    return 1e-5 if {"compile", "tiled-norm"} & set(names) else 1e-10


def assert_trains_equally(case: str, names: tuple[str, ...], steps: int, directory: Path) -> bool:
    training = build(case)
    available = makers(case, training.model, directory)
    applied = apply(training, [available[name]() for name in names])
    if applied is None:
        return False
    losses = train(training, steps)
    applied.take_away()
    expected_losses, expected = reference(case, steps)
    allowed = tolerance(names)
    torch.testing.assert_close(losses, expected_losses, rtol=allowed, atol=allowed)
    torch.testing.assert_close(states(training), expected, rtol=allowed, atol=allowed)
    assert not any("forward" in module.__dict__ for module in training.model.modules())
    return True


@pytest.mark.parametrize("case", KINDS)
def test_alone_ten_steps_are_the_plain_ones(case: str, tmp_path: Path) -> None:
    names = [name for name in NAMES if name != "compile" or case in COMPILED]
    used = [name for name in names if assert_trains_equally(case, (name,), 10, tmp_path)]
    assert {"activation-offload", "host-states", "recompute", "step-in-backward", "weight-streaming"} <= set(used)


@pytest.mark.parametrize("one", NAMES)
@pytest.mark.parametrize("case", KINDS)
def test_pairs_train_as_the_plain_model_does(case: str, one: str, tmp_path: Path) -> None:
    pairs = [pair for pair in combinations(NAMES, 2) if pair[0] == one and ("compile" not in pair or case in COMPILED)]
    for pair in pairs:
        assert_trains_equally(case, pair, 2, tmp_path)


BF16: dict[str, list[str]] = {
    "memory": ["chunked-loss", "tiled-mlp", "recompute", "activation-offload", "host-states"],
    "streams": ["weight-streaming", "recompute", "activation-offload", "step-in-backward"],
    "compiled": ["chunked-loss", "compile", "recompute", "step-in-backward"],
    "divided": ["chunked-loss", "recompute, slices", "micro-batches"],
}


@pytest.mark.parametrize("names", BF16.values(), ids=BF16)
def test_in_bf16_what_differs_is_rounding(names: list[str], tmp_path: Path) -> None:
    training = build("llama", torch.bfloat16)
    available = makers("llama", training.model, tmp_path)
    applied = apply(training, [available[name]() for name in names])
    assert applied is not None
    losses = train(training, 10)
    applied.take_away()
    expected_losses, expected = reference("llama", 10, torch.bfloat16)
    torch.testing.assert_close(losses, expected_losses, rtol=0.01, atol=0.01)
    start = build("llama", torch.bfloat16).model.state_dict()
    moved, expected_moved = (_flat(end, start) for end in (training.model.state_dict(), expected["model"]))
    assert (moved - expected_moved).norm() < 0.2 * expected_moved.norm()


def _flat(end: dict[str, Tensor], start: dict[str, Tensor]) -> Tensor:
    return torch.cat([(end[name] - start[name]).double().flatten() for name in start])


# fit ------------------------------------------------------------------------------------------------------------------


def larger_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).cuda().train()
    tokens = torch.randint(0, 8192, (8, 1024), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return model, optimizer, {"input_ids": tokens, "labels": tokens.clone()}


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def test_fit_keeps_to_its_budget_and_trains_as_the_plain_model_does() -> None:
    model, optimizer, batch = larger_llama()
    torch.cuda.reset_peak_memory_stats()
    expected = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = own_loss(model, batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    plain_bytes = torch.cuda.max_memory_reserved()
    del model, optimizer, loss
    gc.collect()
    torch.cuda.empty_cache()

    model, optimizer, batch = larger_llama()
    budget = plain_bytes // 2
    # Without autocast, whose rounding is not the plain model's; compile has its turn above.
    without = ("autocast", "master-weights", "compile")
    fitted = tonnage.fit(model, optimizer, loss=own_loss, sample=batch, budget=budget, host="8 GiB", without=without)
    assert fitted.measured is not None
    assert fitted.measured.peak_reserved_bytes <= budget
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    losses = [fitted.step(batch).item() for _ in range(10)]
    # The rehearsal is a measurement; a step more may leave a cached block behind.
    assert torch.cuda.max_memory_reserved() <= budget * 1.02
    assert losses == pytest.approx(expected, rel=1e-3)
    assert losses[-1] < losses[0]
    proof = fitted.prove(batch)
    assert proof.worst_error <= proof.tolerance
    fitted.undo()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_block_of_large_products_is_no_slower_in_a_rehearsal() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4096, 4096, dtype=torch.bfloat16) for _ in range(4))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = {"x": torch.randn(8192, 4096, dtype=torch.bfloat16, device="cuda")}
    loss = lambda model, batch: model(batch["x"]).float().square().mean()  # noqa: E731
    training = Training(model, optimizer, loss, batch, torch.device("cuda"), Stepper(optimizer))
    survey = Survey(training, GpuMeter(training.device))
    survey.at(8192)
    assert 0.5 < survey.rehearsal_pace <= 1.0
