"""Models of images and of sequences that are no language: convolutions, batch norms, recurrent layers, graphs."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fit.zoo.building import (
    CLASSES,
    LENGTH,
    ROWS,
    VOCABULARY,
    WIDTH,
    Block,
    Case,
    Tower,
    case,
    classify,
    ids,
    images,
    kind,
    randn,
    seen,
    sequences,
    several,
    vectors,
)

# isort: split
import transformers as hf


class Residual(nn.Module):
    """torchvision's basic block."""

    def __init__(self, channels: int, norm: Any = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = norm(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, norm: Any = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=False), norm(6), nn.ReLU(inplace=True))
        self.layer1 = nn.Sequential(Residual(6, norm), Residual(6, norm))
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer1(self.stem(x)).mean((2, 3)))


@kind
def resnet_with_batch_norm() -> Case:
    return case(ResNet(), classify, several(images), optimizer=lambda p: torch.optim.SGD(p, 0.05, 0.9))


@kind
def resnet_with_frozen_batch_norm() -> Case:
    """Norms in evaluation mode while the rest trains, as detectors have them."""
    built = case(ResNet(), classify, several(images))
    for module in built.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return built


@kind
def resnet_with_batch_norm_without_running_statistics() -> Case:
    def norm(channels: int) -> nn.Module:
        return nn.BatchNorm2d(channels, track_running_stats=False)

    return case(ResNet(norm), classify, several(images))


@kind
def resnet_with_group_norm() -> Case:
    return case(ResNet(lambda channels: nn.GroupNorm(2, channels)), classify, several(images))


@kind
def batch_norm_mlp() -> Case:
    layers = [nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()]
    return case(nn.Sequential(*layers, nn.Linear(16, CLASSES)), classify, several(vectors))


@kind
def batch_statistics_by_hand() -> Case:
    """A norm over the batch that is of no class PyTorch knows."""

    class Whitened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Linear(WIDTH, WIDTH)
            self.scale = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            centred = x - x.mean(0, keepdim=True)
            return x + self.scale(self.mlp(centred / (centred.var(0, keepdim=True) + 1e-5).sqrt()))

    return case(Tower(block=Whitened), classify, several(vectors))


@kind
def vit() -> Case:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = hf.ViTForImageClassification(hf.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=CLASSES))
    return seen(case(model, image_loss, several(images)))


def image_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(pixel_values=batch["x"], labels=batch["y"]).loss


@kind
def swin() -> Case:
    config = hf.SwinConfig(
        image_size=8,
        patch_size=2,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[1, 2],
        window_size=2,
        drop_path_rate=0.0,
        num_labels=CLASSES,
    )
    return seen(case(hf.SwinForImageClassification(config), image_loss, several(images)))


@kind
def convnext_with_drop_path() -> Case:
    config = hf.ConvNextConfig(
        patch_size=2, hidden_sizes=[6, 8], depths=[2, 2], num_stages=2, drop_path_rate=0.5, num_labels=CLASSES
    )
    return seen(case(hf.ConvNextForImageClassification(config), image_loss, several(images)))


@kind
def vit_of_timm_with_drop_path() -> Case:
    import timm

    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": CLASSES}
    model = timm.create_model("vit_tiny_patch16_224", **sizes, drop_path_rate=0.5)
    return case(model, classify, several(images))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._step(3, 4), self._step(4, 4)])
        self.middle = self._step(4, 4)
        self.up = nn.ModuleList([self._step(8, 4), self._step(8, 4)])
        self.out = nn.Conv2d(4, 1, 1)

    def _step(self, inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for step in self.down:
            x = step(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for step in self.up:
            x = nn.functional.interpolate(x, scale_factor=2)
            x = step(torch.cat([x, skips.pop()], 1))
        return self.out(x)


def masks(rows: int) -> dict[str, Tensor]:
    return {"image": randn(rows, 3, 8, 8), "mask": (randn(rows, 1, 8, 8) > 0.5).double()}


@kind
def u_net() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(model(batch["image"]), batch["mask"])

    return case(UNet(), loss, several(masks))


@kind
def u_net_with_dice_over_the_batch() -> Case:
    """One ratio of sums over all pixels of all rows."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found, wanted = model(batch["image"]).sigmoid(), batch["mask"]
        return 1 - (2 * (found * wanted).sum() + 1) / (found.sum() + wanted.sum() + 1)

    return case(UNet(), loss, several(masks))


@kind
def diffusion() -> Case:
    """Noise and times drawn in the loss."""

    def loss(model: nn.Module, images: Tensor) -> Tensor:
        noise, share = torch.randn_like(images), torch.rand(len(images), 1, 1, 1, dtype=images.dtype)
        found = model(share.sqrt() * images + (1 - share).sqrt() * noise)
        return nn.functional.mse_loss(found, noise[:, :1])

    return case(UNet(), loss, several(lambda rows: randn(rows, 3, 8, 8)))


# Sequences and graphs -------------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """An LSTM over packed sequences, whose lengths must be on the CPU."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=True, dropout=dropout)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=tokens.shape[1])[0])


def tagged(rows: int) -> dict[str, Tensor]:
    lengths = torch.randint(2, LENGTH + 1, (rows,))
    outside = torch.arange(LENGTH) >= lengths[:, None]
    tags = torch.randint(0, CLASSES, (rows, LENGTH)).masked_fill(outside, -100)
    return {"tokens": ids(rows), "lengths": lengths, "tags": tags}


def tagging_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"], batch["lengths"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["tags"].flatten())


@kind
def lstm_tagger_with_lengths_on_the_cpu() -> Case:
    return case(Tagger(), tagging_loss, several(tagged))


@kind
def lstm_tagger_with_dropout() -> Case:
    return case(Tagger(dropout=0.3), tagging_loss, several(tagged))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0])


@kind
def gru() -> Case:
    return case(Recurrent(), classify, several(sequences))


@kind
def recurrent_layer_that_takes_time_first() -> Case:
    """[time, batch, features]: the batch is the second dimension."""

    class TimeFirst(Recurrent):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(WIDTH, WIDTH)

    def time_first(rows: int) -> dict[str, Tensor]:
        return {name: tensor.transpose(0, 1).contiguous() for name, tensor in sequences(rows).items()}

    return case(TimeFirst(), classify, several(time_first))


@kind
def state_carried_from_batch_to_batch() -> Case:
    """Truncated backpropagation through time: the last hidden state is the next batch's first."""

    class Stateful(Recurrent):
        def __init__(self) -> None:
            super().__init__()
            self.hidden: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            out, hidden = self.gru(x, self.hidden)
            self.hidden = hidden.detach()
            return self.head(out)

    return case(Stateful(), classify, [sequences(ROWS) for _ in range(3)])


@kind
def graphs_in_one_batch() -> Case:
    """As PyTorch Geometric gives them: nodes of all graphs, edges between them, and whose graph a node is."""

    class Graphs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor, edges: Tensor, graph: Tensor, count: int) -> Tensor:
            for layer in self.layers:
                x = x.index_add(0, edges[1], layer(x)[edges[0]]).relu()
            return self.head(x.new_zeros(count, WIDTH).index_add(0, graph, x))

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        logits = model(batch["x"], batch["edge_index"], batch["batch"], len(batch["y"]))
        return nn.functional.cross_entropy(logits, batch["y"])

    def graphs(count: int) -> dict[str, Tensor]:
        graph = torch.arange(count).repeat_interleave(3)
        edges = torch.randint(0, 3, (2, 5 * count)) + 3 * torch.arange(count).repeat_interleave(5)
        return {
            "x": randn(3 * count, WIDTH),
            "edge_index": edges,
            "batch": graph,
            "y": torch.randint(0, CLASSES, (count,)),
        }

    return case(Graphs(), loss, several(graphs))


@kind
def bags_of_words_with_offsets() -> Case:
    """As recommenders have them: the indices of all rows, one after another, and where each row begins."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean")
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
            x = self.bag(indices, offsets)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["indices"], batch["offsets"]), batch["y"])

    def bags(rows: int) -> dict[str, Tensor]:
        lengths = torch.randint(1, 4, (rows,))
        return {
            "indices": torch.randint(0, VOCABULARY, (int(lengths.sum()),)),
            "offsets": lengths.cumsum(0) - lengths,
            "y": torch.randint(0, CLASSES, (rows,)),
        }

    return case(Bags(), loss, several(bags))
