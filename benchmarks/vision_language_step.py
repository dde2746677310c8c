"""Two training steps of a vision-language model, or of one of text or images alone, for `tonnage run`.

The case comes as JSON in the first argument.
"""

import json
import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForImageTextToText


def parts_of(model: Any) -> dict[str, list[Any]]:
    """The modules that `--freeze` names."""
    inner = model.model
    tower = getattr(inner, "vision_tower", None) or getattr(inner, "visual", None)
    projector = getattr(inner, "multi_modal_projector", None) or tower.merger
    language = [inner.language_model, model.lm_head]
    return {
        "vision": [tower],
        "projector": [projector],
        "language": language,
        "embeddings": [inner.get_input_embeddings()],
    }


def build(case: dict[str, Any]) -> Any:
    """The model, its frozen parts in 16 bits unless all is FP32."""
    config = dict(case["config"])
    kind = AutoModelForImageClassification if config["model_type"] == "vit" else AutoModelForCausalLM
    kind = AutoModelForImageTextToText if "vision_config" in config else kind
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    wide = torch.bfloat16 if case["precision"] == "bf16" else torch.float32
    narrow = torch.float32 if case["precision"] == "fp32" else torch.bfloat16
    with torch.device("cuda"):
        model = kind.from_config(config, dtype=narrow)
    if case.get("lora"):
        from peft import LoraConfig, get_peft_model

        # The same name for all matrices of the layers of the language model.
        targets = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
        return get_peft_model(model, LoraConfig(r=case["lora"], target_modules=targets))
    if kind is not AutoModelForImageTextToText:
        whole = [model.to(wide)] if not case["frozen"] else []
        last = case["freeze"].removeprefix("all-but-last-")
        model.requires_grad_(bool(whole))
        for module in () if whole else (*model.model.layers[-int(last) :], model.model.norm, model.lm_head):
            module.to(wide).requires_grad_(True)
        return model
    parts = parts_of(model)
    model.requires_grad_(False)
    for name in ("vision", "projector", "language"):
        for module in parts[name]:
            # A merger is within its tower.
            if name not in case["frozen"]:
                module.to(wide).requires_grad_(True)
    return model


def inputs_of(case: dict[str, Any], model: Any) -> dict[str, Any]:
    """A micro-batch whose sequences begin with their images."""
    batch, seq, images, tokens = case["batch"], case["seq"], case["images"], case["image_tokens"]
    config = case["config"]
    if config["model_type"] == "vit":
        images = torch.randn(batch, 3, 224, 224, device="cuda")
        return {"pixel_values": images, "labels": torch.randint(0, 1000, (batch,), device="cuda")}
    ids = torch.randint(10, 1000, (batch, seq), device="cuda")
    if "vision_config" not in config:
        return {"input_ids": ids, "labels": ids}
    image_token = model.config.image_token_id
    for image in range(images):
        # A token of text stands between two images.
        start = image * (tokens // images + 1)
        ids[:, start : start + tokens // images] = image_token
    inputs = {"input_ids": ids, "labels": ids}
    vision = config["vision_config"]
    if "image_size" in vision:
        inputs["pixel_values"] = torch.randn(batch * images, 3, case["image_size"], case["image_size"], device="cuda")
        if config["model_type"] in ("paligemma", "gemma3"):
            inputs["token_type_ids"] = (ids == image_token).long()
    else:
        across = case["image_size"] // vision["patch_size"]
        grid = torch.tensor([[1, across, across]] * (batch * images))
        width = 3 * 2 * vision["patch_size"] ** 2
        inputs["pixel_values"] = torch.randn(batch * images * across * across, width, device="cuda")
        inputs["image_grid_thw"] = grid.cuda()
        inputs["mm_token_type_ids"] = (ids == image_token).int()
    if case["precision"] != "fp32" and ("vision" in case["frozen"] or case["precision"] == "bf16" or case.get("lora")):
        inputs["pixel_values"] = inputs["pixel_values"].to(torch.bfloat16)
    return inputs


def main() -> None:
    case = json.loads(sys.argv[1])
    model = build(case)
    if case["checkpoint"] == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if case.get("lora"):
            model.enable_input_require_grads()
    model.train()
    model.config.use_cache = False
    inputs = inputs_of(case, model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], fused=True)
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16, enabled=case["precision"] == "bf16-mixed" and not case["lora"]):
            loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main()
