"""Tokens of images, held against what the processors and models of transformers make of them."""

import pytest

from tonnage.errors import BadLayout
from tonnage.models import find_model
from tonnage.models.pictures import picture_tokens, with_pictures


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("vit-base", 197), ("vit-large", 197), ("vit-huge", 257), ("deit-base", 198), ("clip-vit-large-patch14", 257)],
)
def test_the_class_token_counts(name: str, tokens: int) -> None:
    assert find_model(name).stacks[0].tokens == tokens


@pytest.mark.parametrize(
    ("name", "size", "sequences", "tower", "language"),
    [
        ("llava-1.5-7b", "", 1, 577, 576),  # 24 × 24 patches and the class token, which the language model does not see
        ("gemma-3-4b", "", 1, 4096, 256),  # 64 × 64 patches, pooled
        ("qwen2.5-vl-7b", "1036", 1, 5476, 1369),  # 74 × 74 patches, merged two by two
        ("qwen2.5-vl-7b", "1280x720", 1, 92 * 52, 46 * 26),  # rounded to multiples of 28 pixels
        ("qwen3-vl-8b", "1024", 1, 4096, 1024),  # patches of 16 pixels
        ("llava-1.6-mistral-7b", "672", 5, 577, 2880),  # four tiles and the whole
        ("llama-4-scout", "336", 1, 577, 144),  # shuffled two by two
    ],
)
def test_tokens_of_an_image(name: str, size: str, sequences: int, tower: int, language: int) -> None:
    shape, tokens = with_pictures(find_model(name), 1, size)
    assert (shape.stacks[0].sequences, shape.stacks[0].tokens, tokens) == (sequences, tower, language)


def test_several_images_and_none() -> None:
    two, tokens = with_pictures(find_model("llava-1.5-7b"), 2, "")
    assert (two.stacks[0].sequences, tokens) == (2, 1152)
    none, tokens = with_pictures(find_model("llava-1.5-7b"), 0, "")
    assert (none.stacks[0].sequences, tokens) == (0, 0)


def test_a_vision_model_takes_larger_images() -> None:
    shape, tokens = with_pictures(find_model("vit-base"), None, "384")
    assert (shape.fixed_tokens, tokens) == (577, 0)


def test_a_tower_of_any_size_has_a_usual_one() -> None:
    picture = find_model("qwen2.5-vl-7b").stacks[0].picture
    assert picture is not None and picture_tokens(picture).language == 37 * 37


@pytest.mark.parametrize(
    ("name", "images", "size", "problem"),
    [
        ("llama-3.1-8b", 1, "", "sees no images"),
        ("llama-3.1-8b", None, "224", "sees no images"),
        ("vit-base", 2, "", "one image"),
        ("llava-1.5-7b", -1, "", "0 to"),
        ("llava-1.5-7b", 10**9, "", "0 to"),
        ("llava-1.5-7b", 1, "large", "no size"),
        ("llava-1.5-7b", 1, "0", "pixels"),
        ("llava-1.5-7b", 1, "99999999999", "pixels"),
        ("llava-1.5-7b", 1, "1x2x3", "no size"),
    ],
)
def test_nonsense_is_refused(name: str, images: int | None, size: str, problem: str) -> None:
    with pytest.raises(BadLayout, match=problem):
        with_pictures(find_model(name), images, size)
