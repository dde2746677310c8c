"""The proof catches techniques that are wrong in one place, and passes those that are right, on models of several kinds."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchvision_names  # noqa: F401

# isort: split
from transformers import BertConfig, BertForMaskedLM, OPTConfig, OPTForCausalLM

from fit.cases import Case, build_training, vit
from fit.test_plan import make_plan
from tonnage.fit.fitted import Fitted, apply_plan
from tonnage.fit.modules import find_blocks, replace_forward
from tonnage.fit.prove.proof import NotTheSame
from tonnage.fit.technique import Technique
from tonnage.fit.techniques.activation_offload import ActivationOffload
from tonnage.fit.techniques.chunked_loss import ChunkedLoss
from tonnage.fit.techniques.fused_attention import FusedAttention
from tonnage.fit.techniques.host_states import HostStates
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.fit.techniques.tiled_mlp import TiledMlp
from tonnage.fit.techniques.tiled_norm import TiledNorm
from tonnage.fit.training import Training, Undo


def bert() -> Case:
    config = BertConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    ids = torch.randint(0, 96, (4, 12))
    labels = torch.where(torch.rand(4, 12) < 0.4, ids, -100)
    return BertForMaskedLM(config), {"input_ids": ids, "labels": labels}, lambda model, batch: model(**batch).loss


def opt() -> Case:
    config = OPTConfig(
        vocab_size=96, hidden_size=32, ffn_dim=64, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=32, word_embed_proj_dim=32, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    ids = torch.randint(4, 96, (4, 12))
    return OPTForCausalLM(config), {"input_ids": ids, "labels": ids}, lambda model, batch: model(**batch).loss


MODELS: dict[str, Callable[[], Case]] = {"bert": bert, "vit": vit, "opt": opt}
Plant = Callable[[Training], Undo]


class Planted(Technique):
    name: ClassVar[str] = "planted"
    title: ClassVar[str] = "planted"
    order: ClassVar[int] = 30

    plant: Plant

    def why_not(self, training: Training) -> str | None:
        return None

    def place(self, training: Training, stack: ExitStack) -> None:
        stack.callback(self.plant(training))


def block(training: Training, place: int = 1) -> nn.Module:
    return list(find_blocks(training.model).values())[place]


def of(kind: type[nn.Module], module: nn.Module) -> nn.Module:
    return next(child for child in module.modules() if isinstance(child, kind))


def changed(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Undo:
    """Its first output goes through a function."""
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    return replace_forward(module, forward)


def scaled_gradient(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x.detach() + (x - x.detach()) * factor


def losing_gradient(training: Training) -> Undo:
    return changed(of(nn.Linear, block(training)), Tensor.detach)


def scaled_in_one_layer(training: Training) -> Undo:
    return changed(of(nn.Linear, block(training)), scaled_gradient(1.01))


def norm_without_gradient(training: Training) -> Undo:
    norm = of(nn.LayerNorm, block(training))
    plain = norm.forward

    def forward(x: Tensor) -> Tensor:
        bias = norm.bias
        return plain(x) - bias + bias.detach()

    return replace_forward(norm, forward)


def narrowed(training: Training) -> Undo:
    return changed(block(training), lambda x: x.half().to(x.dtype))


def noisy(training: Training) -> Undo:
    return changed(block(training), lambda x: x + 1e-3 * torch.randn_like(x))


def skipped_block(training: Training) -> Undo:
    return replace_forward(block(training), lambda x, *_, **__: x)


def twice_through(training: Training) -> Undo:
    """A gradient that is counted twice, as a hook that runs in a second forward pass would."""
    weight = of(nn.Linear, block(training)).weight
    return weight.register_hook(lambda gradient: 2 * gradient).remove


def loss_shifted(training: Training) -> Undo:
    return _with_loss(training, lambda loss: loss + 0.01)


def loss_scaled(training: Training) -> Undo:
    return _with_loss(training, lambda loss: loss * 1.001)


def wrong_weights(training: Training) -> Undo:
    """Parts of a batch that weigh what they should not."""
    before = training.micro_batches, training.weighting
    training.micro_batches = 4
    training.weighting = lambda part: 1.0 + float(next(iter(part.values())).flatten()[:3].double().abs().sum()) % 5

    def undo() -> None:
        training.micro_batches, training.weighting = before

    return undo


def first_row_only(training: Training) -> Undo:
    return _with_batch(training, lambda batch: {name: tensor[:1] for name, tensor in batch.items()})


def frozen_embedding(training: Training) -> Undo:
    embedding = next(m for m in training.model.modules() if isinstance(m, nn.Embedding | nn.Conv2d))
    return changed(embedding, Tensor.detach)


def _with_loss(training: Training, change: Callable[[Tensor], Tensor]) -> Undo:
    plain = training.loss
    training.loss = lambda model, batch: change(plain(model, batch)) if _planted(model) else plain(model, batch)
    undo_mark = replace_forward(block(training), block(training).forward)

    def undo() -> None:
        undo_mark()
        training.loss = plain

    return undo


def _with_batch(training: Training, change: Callable[[Any], Any]) -> Undo:
    plain = training.loss
    training.loss = lambda model, batch: plain(model, change(batch) if _planted(model) else batch)
    undo_mark = replace_forward(block(training), block(training).forward)

    def undo() -> None:
        undo_mark()
        training.loss = plain

    return undo


def _planted(model: nn.Module) -> bool:
    return any("forward" in module.__dict__ for module in model.modules())


WRONG: list[Plant] = [
    losing_gradient, scaled_in_one_layer, norm_without_gradient, narrowed, noisy, skipped_block, twice_through,
    loss_shifted, loss_scaled, wrong_weights, first_row_only, frozen_embedding,
]  # fmt: skip


def fitted(build: Callable[[], Case], *techniques: Technique) -> Fitted:
    return apply_plan(build_training(build, dtype=torch.float32), make_plan(*techniques))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("plant", WRONG, ids=lambda plant: plant.__name__)
def test_what_is_wrong_is_caught(plant: Plant, model: str) -> None:
    with pytest.raises(NotTheSame):
        fitted(MODELS[model], Planted(plant=plant)).prove()


def checkpointed(training: Training) -> Undo:
    module = block(training)
    plain = module.forward
    return replace_forward(module, lambda *args, **kwargs: checkpoint(plain, *args, use_reentrant=False, **kwargs))


def _recomputed(training: Training) -> Technique:
    return Recompute.all(training.model)


RIGHT: dict[str, Callable[[Training], list[Technique]]] = {
    "nothing": lambda training: [],
    "recompute": lambda training: [Recompute.all(training.model)],
    "recompute in slices": lambda training: [Recompute.all(training.model, slices=2)],
    "checkpoint": lambda training: [Planted(plant=checkpointed)],
    "micro-batches": lambda training: [MicroBatches(count=2)],
    "micro-batches of a row": lambda training: [MicroBatches(count=4)],
    "offload": lambda training: [ActivationOffload(blocks=tuple(find_blocks(training.model)))],
    "chunked loss": lambda training: [ChunkedLoss()],
    "step in backward": lambda training: [StepInBackward()],
    "host states": lambda training: [HostStates(how="host")],
    "tiles": lambda training: [TiledMlp(), TiledNorm()],
    "fused attention": lambda training: [FusedAttention()],
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("techniques", RIGHT.values(), ids=RIGHT)
def test_what_is_right_passes(techniques: Callable[[Training], list[Technique]], model: str) -> None:
    training = build_training(MODELS[model], dtype=torch.float32)
    usable = [technique for technique in techniques(training) if technique.why_not(training) is None]
    with _unchanged_buffers(training.model):
        apply_plan(training, make_plan(*usable)).prove()


@contextmanager
def _unchanged_buffers(model: nn.Module) -> Iterator[None]:
    before = {name: (id(buffer), buffer.clone()) for name, buffer in model.named_buffers()}
    yield
    for name, buffer in model.named_buffers():
        assert (id(buffer), True) == (before[name][0], torch.equal(buffer, before[name][1]))
