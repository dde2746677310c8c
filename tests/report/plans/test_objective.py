"""What a plan says of images and of frozen parts."""

from tonnage.budget.training.configuration import Configuration
from tonnage.models import find_model
from tonnage.models.freezing import freeze
from tonnage.models.pictures import with_pictures
from tonnage.report.plans.objective import part_words


def test_images_and_frozen_parts_are_said() -> None:
    shape, _ = with_pictures(find_model("llava-1.5-7b"), 2, "")
    images, frozen = part_words(freeze(shape, "vision"), Configuration(seq=2048))
    assert images == "images of a sample: 2 × 577 tokens in their tower, 1,152 of the 2,048 of a sequence"
    assert frozen.startswith("6.76 B parameters are trained; 303.5 M parameters are frozen, in 16 bits")


def test_adapters_leave_frozen_parts_out() -> None:
    shape = freeze(find_model("llava-1.5-7b"), "vision")
    assert list(part_words(shape, Configuration(lora_rank=16))) == [
        "303.5 M parameters are frozen with no adapters beside them"
    ]


def test_a_model_of_text_alone_says_nothing() -> None:
    assert not list(part_words(find_model("llama-3.1-8b"), Configuration()))
