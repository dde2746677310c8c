"""Small models of four kinds, and the proof that a technique leaves their training as it is."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

import torchvision_names  # noqa: F401

# isort: split
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.technique import Technique
from tonnage.fit.training import Training

Case = tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]


def _next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """In FP64 throughout; the models' own loss goes through FP32."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def _own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def _tokens(vocabulary: int, rows: int = 4, length: int = 12) -> dict[str, Tensor]:
    tokens = torch.randint(0, vocabulary, (rows, length))
    labels = tokens.clone()
    labels[:, :3] = -100
    return {"input_ids": tokens, "labels": labels}


def llama(layers: int = 3) -> Case:
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config), _tokens(96), _next_token_loss


def gpt2(dropout: float = 0.1, layers: int = 3) -> Case:
    """Tied embeddings, biases, learned positions, dropout."""
    config = GPT2Config(
        vocab_size=96,
        bos_token_id=0,
        eos_token_id=0,
        n_positions=32,
        n_embd=32,
        n_layer=layers,
        n_head=4,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
    )
    return GPT2LMHeadModel(config), _tokens(96), _next_token_loss


def vit(layers: int = 3) -> Case:
    config = ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_labels=10,
    )
    batch = {"pixel_values": torch.randn(4, 3, 32, 32, dtype=torch.float64), "labels": torch.randint(0, 10, (4,))}
    return ViTForImageClassification(config), batch, _own_loss


class DropoutBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class DropoutNet(nn.Module):
    """Hand-written, with dropout in each block and a loss of its own."""

    def __init__(self, width: int = 24, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList(DropoutBlock(width) for _ in range(depth))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def dropout_net() -> Case:
    batch = {"x": torch.randn(4, 6, 8, dtype=torch.float64), "y": torch.randint(0, 5, (4, 6))}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    return DropoutNet(), batch, loss


CASES: dict[str, Callable[[], Case]] = {"llama": llama, "gpt2": gpt2, "vit": vit, "dropout": dropout_net}


def seed_cpu(seed: int) -> None:
    """torch.manual_seed formats the whole stack for each kind of device that there is not."""
    torch.default_generator.manual_seed(seed)


def build_training(
    build: Callable[[], Case], *, dtype: torch.dtype = torch.float64, clip_norm: float | None = None
) -> Training:
    """A training in FP64 on the CPU, the same at each call."""
    seed_cpu(0)
    model, batch, loss = build()
    model.to(dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Training(
        model=model,
        optimizer=optimizer,
        loss=loss,
        sample=batch,
        device=torch.device("cpu"),
        stepper=Stepper(optimizer, clip_norm=clip_norm),
    )


def take_step(training: Training, seed: int) -> Tensor:
    """One step on the sample, as `Fitted.step` takes it with one micro-batch."""
    seed_cpu(seed)
    training.stepper.begin(1)
    with training.forward_pass():
        loss = training.loss(training.model, training.sample)
    training.stepper.backward(loss, last=True)
    training.stepper.finish()
    return loss.detach()


def gradients(training: Training, seed: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the model as it stands, by plain autograd."""
    seed_cpu(seed)
    training.model.zero_grad(set_to_none=True)
    with training.forward_pass():
        loss = training.loss(training.model, training.sample)
    loss.backward()
    found = {name: p.grad.clone() for name, p in training.model.named_parameters() if p.grad is not None}
    training.model.zero_grad(set_to_none=True)
    return loss.detach(), found


def assert_same_training(
    build: Callable[[], Case],
    *techniques: Technique,
    steps: int = 10,
    tolerance: float = 1e-10,
    clip_norm: float | None = None,
) -> None:
    """Losses and parameters of `steps` steps are the plain training's, and after undo the model is plain again."""
    losses, plain = _plain_training(build, steps, clip_norm, nn.functional.softmax)
    fitted = build_training(build, clip_norm=clip_norm)
    undos = [technique.apply(fitted) for technique in sorted(techniques, key=lambda t: t.order)]
    for step, expected in enumerate(losses):
        torch.testing.assert_close(take_step(fitted, step), expected, rtol=tolerance, atol=tolerance)
    for undo in reversed(undos):
        undo()
    assert_same_parameters(plain, fitted.model, tolerance)


@lru_cache(maxsize=64)
def _plain_training(
    build: Callable[[], Case], steps: int, clip_norm: float | None, softmax: object
) -> tuple[list[Tensor], nn.Module]:
    """Losses and the model of plain steps, for all that are held against them; some tests put another softmax in place."""
    plain = build_training(build, clip_norm=clip_norm)
    return [take_step(plain, step) for step in range(steps)], plain.model


def assert_same_parameters(plain: nn.Module, fitted: nn.Module, tolerance: float) -> None:
    expected, found = plain.state_dict(), fitted.state_dict()
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
