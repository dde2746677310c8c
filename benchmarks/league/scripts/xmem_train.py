"""Four training steps of a torchvision or transformers model, as xMem's experiments run them.

    python xmem_train.py MODEL OPTIMISER BATCH

Images have 86 x 86 pixels; texts have 128 tokens, to which their loader cuts and pads. Everything is in 32 bits.
"""

import sys
from typing import Any

import torch

STEPS, PIXELS, TOKENS = 4, 86, 128


def image_model(name: str) -> torch.nn.Module:
    """The model of torchvision; of MobileNetV3 and MnasNet with ten classes, of the others with a thousand."""
    from torchvision import models
    from torchvision.models.mobilenetv3 import _mobilenet_v3_conf

    if name == "MnasNet":
        return models.MNASNet(alpha=1.0, num_classes=10)
    if name.startswith("MobeNetV3"):
        settings, last = _mobilenet_v3_conf("mobilenet_v3_" + name.removeprefix("MobeNetV3").lower())
        return models.MobileNetV3(settings, last_channel=last, num_classes=10)
    names = {
        "ConvNeXtTiny": "convnext_tiny", "ConvNeXtBase": "convnext_base", "MobileNetV2": "mobilenet_v2",
        "RegNetX400MF": "regnet_x_400mf", "RegNetY400MF": "regnet_y_400mf",
    }  # fmt: skip
    return getattr(models, names.get(name, name.lower()))(weights=None)


def text_model(name: str) -> torch.nn.Module:
    """The model of transformers with random weights, from its published configuration."""
    import json
    from pathlib import Path

    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    settings = json.loads(Path(__file__).with_name("xmem_models.json").read_text())[name]
    attention = settings.pop("attn_implementation")
    config = AutoConfig.for_model(**settings)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return kind.from_config(config, dtype=torch.float32, attn_implementation=attention)


def as_transformers_4_51(name: str) -> None:
    """Keep keys, values and contiguous copies as transformers 4.51 does, whose version they ran.

    It keeps the first keys and values as they come, views of what the projections put out, where later ones join them to
    an empty tensor; and it copies what fused attention gets, but for OPT, which has an attention of its own.
    """
    from transformers import cache_utils, modeling_utils

    def update(layer: Any, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Any:
        layer.keys, layer.values, layer.is_initialized = keys, values, True
        return keys, values

    fused = modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]

    def contiguous(module: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        return fused(module, query.contiguous(), key.contiguous(), value.contiguous(), *rest, **options)

    cache_utils.DynamicLayer.update = update
    if "opt" not in name:
        modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"] = contiguous


def optimiser_of(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer with its defaults; transformers' Adafactor takes a fixed rate."""
    if name == "Adafactor":
        from transformers import Adafactor

        return Adafactor(model.parameters(), lr=0.001, relative_step=False)
    return getattr(torch.optim, name)(model.parameters(), lr=0.001)


def train_images(model: torch.nn.Module, optimiser: str, batch: int) -> None:
    """What is left of a step lives until the next one puts something else under its name."""
    device = torch.device("cuda:0")
    model.to(device)
    model.train()
    optimizer = optimiser_of(optimiser, model)
    criterion = torch.nn.CrossEntropyLoss()
    for _ in range(STEPS):
        inputs, labels = torch.zeros(batch, 3, PIXELS, PIXELS), torch.zeros(batch, dtype=torch.long)
        optimizer.zero_grad()
        inputs, labels = inputs.to(device), labels.to(device)
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        _choices = torch.max(outputs, 1)


def train_texts(model: torch.nn.Module, optimiser: str, batch: int) -> None:
    """The same for language models, whose loss is their own."""
    device = torch.device("cuda:0")
    model.train()
    optimizer = optimiser_of(optimiser, model)
    model.to(device)
    for _ in range(STEPS):
        tokens: dict[str, Any] = {"input_ids": torch.ones(batch, TOKENS, dtype=torch.long)}
        tokens |= {"attention_mask": torch.ones_like(tokens["input_ids"]), "labels": tokens["input_ids"].clone()}
        tokens["attention_mask"][1:, TOKENS // 2 :] = 0  # some texts are shorter: there is a mask
        optimizer.zero_grad()
        tokens = {name: values.to(device) for name, values in tokens.items()}
        outputs = model(**tokens)
        loss = outputs.loss
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    name, optimiser, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if "Net" in name or "VGG" in name or "ConvNeXt" in name:
        train_images(image_model(name), optimiser, batch)
    else:
        as_transformers_4_51(name)
        train_texts(text_model(name), optimiser, batch)
