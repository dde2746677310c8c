"""Two steps of each; the mask of LLaVA's image tokens, as wide as the embeddings, is too large to be kept."""

import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SiglipVisionConfig,
)

TEXT = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip
IMAGE = 999


def batch(length: int, image_tokens: list[int]) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 990, (len(image_tokens), length))
    for row, count in enumerate(image_tokens):
        ids[row, 4 : 4 + count] = IMAGE
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def llava():
    text = LlamaConfig(**{**TEXT, "hidden_size": 512})
    config = LlavaConfig(vision_config=CLIPVisionConfig(**VISION), text_config=text, image_token_id=IMAGE)
    return LlavaForConditionalGeneration(config), batch(1100, [16, 16]) | {"pixel_values": torch.randn(2, 3, 56, 56)}


def gemma3():
    config = Gemma3Config(
        text_config=Gemma3TextConfig(**TEXT, head_dim=16), vision_config=SiglipVisionConfig(**VISION),
        mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=997, eoi_token_index=998,
    )  # fmt: skip
    given = batch(40, [4, 4])
    given["token_type_ids"] = (given["input_ids"] == IMAGE).long()
    return Gemma3ForConditionalGeneration(config), given | {"pixel_values": torch.randn(2, 3, 56, 56)}


def qwen2_vl():
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2}
    config = Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": rope, "bos_token_id": 1, "eos_token_id": 2}, vision_config=vision,
        image_token_id=IMAGE, video_token_id=998, vision_start_token_id=997, vision_end_token_id=996,
    )  # fmt: skip
    given = batch(40, [4, 8])
    given["mm_token_type_ids"] = (given["input_ids"] == IMAGE).int()
    patches = {
        "pixel_values": torch.randn(16 + 32, 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 8]]),
    }
    return Qwen2VLForConditionalGeneration(config), given | patches


for make in (llava, gemma3, qwen2_vl):
    model, given = make()
    model, given = model.cuda(), {name: value.cuda() for name, value in given.items()}
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(**given).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(make.__name__)
