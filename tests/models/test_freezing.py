"""Which parts of a model `--freeze` leaves to be trained."""

import pytest

from tonnage.budget.training.configuration import Configuration
from tonnage.budget.training.states import stages
from tonnage.errors import BadLayout
from tonnage.models import ModelShape, find_model
from tonnage.models.freezing import freeze

ONE = Configuration()


def trained(shape: ModelShape) -> int:
    return round(float(next(stages(shape, ONE)).trained.parameters))


def modes(shape: ModelShape) -> list[set[str]]:
    return [{layer.frozen for layer in stack.layers} for stack in shape.stacks]


def test_a_frozen_tower_keeps_still() -> None:
    shape = freeze(find_model("llava-1.5-7b"), "vision")
    # A CLIP ViT-L at 336 pixels has 303.5 M parameters.
    assert shape.parameters - trained(shape) == pytest.approx(303.5e6, rel=1e-3)
    assert modes(shape) == [{"still"}, {""}]


def test_the_projector_alone_passes_gradients_through_the_language_model() -> None:
    for words in ("vision,language", "all-but-projector"):
        shape = freeze(find_model("llava-1.5-7b"), words)
        # 1024 × 4096 and 4096 × 4096, with biases.
        assert trained(shape) == 1024 * 4096 + 4096 * 4096 + 2 * 4096
        assert modes(shape) == [{"still"}, {"passing"}]
        assert not shape.trains_head and not shape.trains_table and shape.trains_projector


def test_the_last_layers_with_the_head() -> None:
    whole = find_model("llama-3.1-8b")
    shape = freeze(whole, "all-but-last-4")
    layer = whole.decoder.layers[-1].parameters
    assert trained(shape) == 4 * layer + whole.head_parameters + whole.other_parameters
    assert [layer.frozen for layer in shape.decoder.layers] == ["still"] * 28 + [""] * 4


def test_embeddings_alone() -> None:
    shape = freeze(find_model("llama-3.1-8b"), "embeddings")
    assert shape.parameters - trained(shape) == shape.embedding_parameters
    tied = freeze(find_model("qwen2.5-vl-3b"), "embeddings")
    assert not tied.trains_head


def test_an_encoder() -> None:
    shape = freeze(find_model("whisper-large-v3"), "encoder")
    assert modes(shape) == [{"still"}, {""}]
    # Half of Whisper and more is its encoder.
    assert 0.5 < trained(shape) / shape.parameters < 0.65


@pytest.mark.parametrize(
    ("name", "words", "problem"),
    [
        ("llama-3.1-8b", "vision", "no part 'vision'"),
        ("llama-3.1-8b", "language", "nothing is left"),
        ("llama-3.1-8b", "last-4", "no part"),
        ("llama-3.1-8b", "all-but-last-0", "no part"),
        ("llama-3.1-8b", "all-but-last-33", "32 layers"),
        ("llama-3.1-8b", "", "no part"),
        ("llava-1.5-7b", "vision,projector,language", "nothing is left"),
    ],
)
def test_nonsense_is_refused(name: str, words: str, problem: str) -> None:
    with pytest.raises(BadLayout, match=problem):
        freeze(find_model(name), words)
