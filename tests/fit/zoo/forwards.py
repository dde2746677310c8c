"""Forwards that draw numbers, keep something, count, share blocks or take other things than hidden states."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fit.zoo.building import (
    CLASSES,
    LENGTH,
    ROWS,
    VOCABULARY,
    WIDTH,
    Block,
    Case,
    Embedded,
    Tower,
    case,
    classify,
    kind,
    language,
    randn,
    sequences,
    several,
    text,
    vectors,
)

# Random numbers -------------------------------------------------------------------------------------------------------


@kind
def dropout_modules() -> Case:
    return case(Tower(block=lambda: Block(dropout=0.25)), classify, several(sequences))


@kind
def dropout_in_a_plain_function() -> Case:
    class Dropping(Block):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.25, self.training)

    return case(Tower(block=Dropping), classify, several(vectors))


@kind
def drop_path() -> Case:
    class Skipped(Block):
        def forward(self, x: Tensor) -> Tensor:
            kept = (torch.rand(len(x), *[1] * (x.ndim - 1), dtype=x.dtype) < 0.8) / 0.8
            return x + kept * (super().forward(x) - x)

    return case(Tower(block=Skipped), classify, several(sequences))


@kind
def layers_dropped_by_a_coin() -> Case:
    """LayerDrop: whole blocks are left out, with Python's random numbers."""

    class Dropped(Tower):
        def features(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x) if random.random() < 0.7 else x
            return x

    return case(Dropped(), classify, several(vectors))


@kind
def noise_of_python() -> Case:
    class Noisy(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + 0.1 * random.random())

    return case(Tower(block=Noisy), classify, several(vectors))


@kind
def noise_of_numpy() -> Case:
    class Noisy(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.1 * torch.from_numpy(np.random.randn(*x.shape))

    return case(Tower(block=Noisy), classify, several(vectors))


@kind
def noise_of_its_own_generator() -> Case:
    class Noisy(Block):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(7)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.1 * torch.randn(x.shape, generator=self.generator, dtype=x.dtype)

    return case(Tower(block=Noisy), classify, several(vectors))


@kind
def noise_too_small_to_notice() -> Case:
    """Input noise that moves the loss in its sixth digit."""

    class Noisy(Tower):
        def features(self, x: Tensor) -> Tensor:
            return super().features(x + 1e-6 * torch.randn_like(x))

    return case(Noisy(), classify, several(vectors))


@kind
def variational_autoencoder() -> Case:
    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Tower(4), nn.Linear(2, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, log_variance = self.encoder(x).chunk(2, -1)
            code = mean + (log_variance / 2).exp() * torch.randn_like(mean)
            return self.decoder(code), mean, log_variance

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found, mean, log_variance = model(batch["x"])
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return nn.functional.mse_loss(found, batch["x"]) + divergence

    return case(Autoencoder(), loss, several(vectors))


# Kept from one forward to the next ------------------------------------------------------------------------------------


class Spectral(nn.Module):
    """A discriminator; each forward takes a power iteration and keeps its vectors in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.LeakyReLU(0.2)) for _ in range(2)
        )
        self.blocks = nn.ModuleList(SpectralBlock() for _ in range(2))
        self.head = parametrizations.spectral_norm(nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        for part in (*self.layers, *self.blocks):
            x = part(x)
        return self.head(x)


class SpectralBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.down = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.leaky_relu(self.up(x), 0.2))


@kind
def discriminator_with_spectral_norm() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        real, fake = model(batch["real"]), model(batch["fake"])
        return (1 - real).relu().mean() + (1 + fake).relu().mean()

    return case(Spectral(), loss, several(lambda rows: {"real": randn(rows, WIDTH), "fake": randn(rows, WIDTH)}))


@kind
def weight_norm() -> Case:
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.mlp[0] = parametrizations.weight_norm(self.mlp[0])

    return case(Tower(block=Normed), classify, several(vectors))


@kind
def codebook_that_follows_its_codes() -> Case:
    """VQ-VAE: the codebook is a buffer, moved in forward by a running mean."""

    class Quantised(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", randn(6, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            x = self.features(x)
            nearest = torch.cdist(x, self.codes).argmin(1)
            if self.training:
                for code in nearest.unique():
                    self.codes[code].lerp_(x[nearest == code].mean(0).detach(), 0.1)
            return self.head(x + (self.codes[nearest] - x).detach())

    return case(Quantised(), classify, several(vectors))


class Centred(Block):
    """Its running mean is in a buffer and not in the way of this batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return super().forward(x - self.mean)


@kind
def running_mean_inside_blocks() -> Case:
    return case(Tower(block=Centred), classify, several(vectors))


@kind
def running_statistics_that_nothing_reads() -> Case:
    """An observer for quantisation: the least and the greatest value so far, in a buffer beside the way."""

    class Observed(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("greatest", torch.zeros(()))
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def features(self, x: Tensor) -> Tensor:
            x = super().features(x)
            self.greatest = torch.maximum(self.greatest, x.detach().max())
            self.calls += 1
            return x

    return case(Observed(), classify, several(vectors))


@kind
def queue_of_negatives() -> Case:
    """MoCo: a momentum encoder and a queue of its keys, both moved in forward."""

    class Momentum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.slow = Tower(4), Tower(4)
            self.slow.load_state_dict(self.encoder.state_dict())
            self.slow.requires_grad_(False)
            self.register_buffer("queue", nn.functional.normalize(randn(16, 4), dim=1))
            self.place = 0

        def forward(self, x: Tensor) -> Tensor:
            query = nn.functional.normalize(self.encoder(x), dim=1)
            with torch.no_grad():
                for slow, fast in zip(self.slow.parameters(), self.encoder.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)
                key = nn.functional.normalize(self.slow(x), dim=1)
            logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().T], 1) / 0.2
            self.queue[[(self.place + row) % 16 for row in range(len(x))]] = key
            self.place = (self.place + len(x)) % 16
            return logits

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.long))

    model = Momentum()
    return case(model, loss, several(lambda rows: randn(rows, WIDTH)), also=lambda: model.place)


@kind
def temperature_that_falls_with_every_call() -> Case:
    """A number of Python's that forward counts up and computes with."""

    class Annealed(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) / (1 + 0.9**self.calls)

    model = Annealed()
    return case(model, classify, several(vectors), also=lambda: model.calls)


@kind
def counter_in_a_block() -> Case:
    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * (1 + 0.01 * self.calls)

    model = Tower(block=Counting)
    return case(model, classify, several(vectors), also=lambda: [block.calls for block in model.blocks])


@kind
def annealing_in_the_loss_function() -> Case:
    """The loss counts how often it was called and shifts from one term to the other."""
    calls = [0]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        calls[0] += 1
        logits = model(batch["x"])
        return nn.functional.cross_entropy(logits, batch["y"]) + min(1.0, calls[0] / 20) * logits.square().mean()

    return case(Tower(), loss, several(vectors), also=lambda: calls)


# Stored on the side ---------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """A mixture of experts, whose router leaves its logits on itself for the loss to find."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.logits: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.logits = self.router(x)
        weights, chosen = self.logits.softmax(-1).topk(2, -1)
        for place, expert in enumerate(self.experts):
            x = x + (weights * (chosen == place)).sum(-1, keepdim=True) * expert(x).tanh()
        return x


def balance(logits: Tensor) -> Tensor:
    """The auxiliary loss: a product of two means over all tokens of the batch."""
    shares = logits.softmax(-1).flatten(0, -2)
    chosen = nn.functional.one_hot(shares.argmax(-1), 3).double()
    return 3 * (shares.mean(0) * chosen.mean(0)).sum()


@kind
def experts_with_router_logits_on_themselves() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return classify(model, batch) + 0.1 * sum(balance(block.logits) for block in model.blocks)

    return case(Tower(block=Experts), loss, several(sequences))


@kind
def experts_with_a_light_auxiliary_loss() -> Case:
    """At the thousandth that people give it."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return classify(model, batch) + 1e-3 * sum(balance(block.logits) for block in model.blocks)

    return case(Tower(block=Experts), loss, several(sequences))


@kind
def experts_with_a_z_loss() -> Case:
    """The router's logits on themselves, and a penalty that is a mean over tokens."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = classify(model, batch)
        return loss + 0.1 * sum(block.logits.logsumexp(-1).square().mean() for block in model.blocks)

    return case(Tower(block=Experts), loss, several(sequences))


@kind
def losses_collected_in_a_list() -> Case:
    """Blocks append a penalty to a list that they share; the loss adds them up and empties it."""
    penalties: list[Tensor] = []

    class Penalised(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            penalties.append(x.square().mean())
            return x

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        penalties.clear()
        return classify(model, batch) + 0.1 * torch.stack(penalties).sum()

    return case(Tower(block=Penalised), loss, several(vectors))


@kind
def hidden_states_through_forward_hooks() -> Case:
    """Feature matching: hooks of the user's collect what blocks return, with its graph."""
    model, collected = Tower(), []
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _inputs, output: collected.append(output))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        collected.clear()
        return classify(model, batch) + 0.1 * sum(hidden.square().mean() for hidden in collected)

    return case(model, loss, several(vectors))


@kind
def hooks_inside_blocks() -> Case:
    """The same from inside a block: what a block computes on the way has a graph that the loss goes through."""
    model, collected = Tower(), []
    for block in model.blocks:
        block.norm.register_forward_hook(lambda _module, _inputs, output: collected.append(output))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        collected.clear()
        return classify(model, batch) + 0.1 * sum(hidden.square().mean() for hidden in collected)

    return case(model, loss, several(vectors))


# Blocks that are not quite blocks -------------------------------------------------------------------------------------


@kind
def weight_tying() -> Case:
    return case(Embedded(tied=True), language, several(text))


@kind
def one_block_used_again_and_again() -> Case:
    """ALBERT's way: three passes through the same two blocks."""

    class Repeated(Tower):
        def features(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = super().features(x)
            return x

    return case(Repeated(), classify, several(vectors))


@kind
def blocks_that_take_integers() -> Case:
    """Each field of a table has an embedding and a small network of its own; they are repeated, and fed integers."""

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mlp = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, indices: Tensor) -> Tensor:
            return self.mlp(self.embed(indices)).relu()

    class Fields(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fields = nn.ModuleList(Field() for _ in range(3))
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(sum(field(x[:, place]) for place, field in enumerate(self.fields)))

    def rows_of(rows: int) -> dict[str, Tensor]:
        return {"x": torch.randint(0, VOCABULARY, (rows, 3)), "y": torch.randint(0, CLASSES, (rows,))}

    return case(Fields(), classify, several(rows_of))


@kind
def blocks_that_write_their_input() -> Case:
    class Writing(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(0.9))

    return case(Tower(block=Writing), classify, several(vectors))


@kind
def blocks_that_return_more() -> Case:
    """Hidden states, a dictionary and None; the loss takes from each."""

    class Talking(Block):
        def forward(self, x: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any], None]:
            x = super().forward(x)
            return x, {"sum": state["sum"] + x.mean(-1), "depth": state["depth"] + 1}, None

    class Talkative(Tower):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x, state = self.first(x), {"sum": x.new_zeros(x.shape[:-1]), "depth": 0}
            for block in self.blocks:
                x, state, _ = block(x, state)
            return self.head(x), state["sum"] / state["depth"]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits, means = model(batch["x"])
        return nn.functional.cross_entropy(logits, batch["y"]) + means.square().mean()

    return case(Talkative(block=Talking), loss, several(vectors))


@kind
def blocks_with_attention_over_rows() -> Case:
    """Rows look at one another inside the model, as in a transformer over a table."""

    class Across(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.mlp = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(self.attention(x[None], x[None], x[None], need_weights=False)[0][0])

    return case(Tower(block=Across), classify, several(vectors))


@kind
def transformer_encoder_of_pytorch() -> Case:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, tokens: Tensor) -> Tensor:
            ahead = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=torch.float64)
            return self.head(self.encoder(self.embed(tokens), mask=ahead, is_causal=True))

    return case(Encoder(), language, several(text))


@kind
def twins_that_share_their_encoder() -> Case:
    """A siamese network: the same blocks run twice in one forward."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        one, other = model(batch["one"]), model(batch["other"])
        return nn.CosineEmbeddingLoss()(one, other, batch["same"])

    def pairs(rows: int) -> dict[str, Tensor]:
        return {"one": randn(rows, WIDTH), "other": randn(rows, WIDTH), "same": torch.arange(rows) % 2 * 2 - 1}

    return case(Tower(), loss, several(pairs))


@kind
def gradients_turned_round() -> Case:
    """Domain adaptation: an autograd function of the user's own inside each block."""

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return -0.5 * gradient

    class Reversed(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + Reverse.apply(x)

    return case(Tower(block=Reversed), classify, several(sequences))


@kind
def rows_with_an_early_exit() -> Case:
    """How often blocks run depends on the values of the batch."""

    class Early(Tower):
        def features(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x) if float(x.detach().mean()) < 0.3 else x
            return x

    return case(Early(), classify, several(lambda rows: {**vectors(rows), "x": randn(rows, WIDTH) + 0.2}))


@kind
def parameters_that_only_some_batches_use() -> Case:
    """Experts by domain: a batch trains one of them, and the other's gradients are None."""

    class Domains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleList(Tower() for _ in range(2))

        def forward(self, x: Tensor, domain: int) -> Tensor:
            return self.towers[domain](x)

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"], batch["domain"]), batch["y"])

    batches = [{**vectors(ROWS), "domain": domain} for domain in (0, 1, 0)]
    return case(Domains(), loss, batches)


@kind
def rows_that_use_different_parameters() -> Case:
    """Which head a row trains is its own matter: a micro-batch may leave a head without a gradient."""

    class Heads(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.others = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            features, sides = self.features(x), (x[:, 0] > 0).long()
            logits = self.head(features)
            for side in sides.unique().tolist():
                logits = logits.index_add(
                    0, (sides == side).nonzero()[:, 0], self.others[side](features[sides == side])
                )
            return logits

    return case(Heads(), classify, several(vectors), optimizer=lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0.1))


@kind
def positions_by_a_slice_of_a_parameter() -> Case:
    class Positioned(Embedded):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(randn(1, 2 * LENGTH, WIDTH))

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens) + self.positions[:, : tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    return case(Positioned(), language, several(text))
