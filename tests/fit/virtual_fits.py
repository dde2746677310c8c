"""What fit chooses and refuses on the virtual GPU.

In a process of its own: autograd's engine learns how many devices there are at the first backward pass, and other tests
have had theirs on the CPU.

    python tests/fit/virtual_fits.py DIRECTORY MODEL ...
"""

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

FP8_WIDTHS = (1024, 8192)  # rounding costs more than the products of the one save, and less than those of the other
CARRIED = {"llama": 0.3, "dropout": 0.67}  # of the plain peak
HOST_DECIDES_BYTES = 130 << 20  # what the short Llama fits into with host memory, and not without


def run(directory: Path, models: Iterable[str]) -> dict[str, Any]:
    """Everything that happened, from a process that runs this file; plans are saved in the directory."""
    command = [sys.executable, __file__, str(directory), *models]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr
    return dict(json.loads(process.stdout.splitlines()[-1]))


def main(directory: str, *models: str) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from transformers import LlamaForCausalLM  # noqa: F401

    from tonnage.virtual import virtual_gpu

    gc.freeze()  # what was imported: each training begins with a garbage collection
    with virtual_gpu("h200"):
        found = {
            "no host memory": _no_host_memory(),  # while nothing else was on the card
            "fits": {name: _fit(name) for name in models},
            "carried": {name: _carried(name, share, Path(directory)) for name, share in CARRIED.items()},
            "too small": _too_small(),
            "fp8": {str(width): _with_fp8(width) for width in FP8_WIDTHS},
            "fitted again": _fitted_again(),
            "wrong in parts": _wrong_in_parts(),
            "problems": {name: _problem(provoke) for name, provoke in _PROBLEMS.items()},
        }
    print(json.dumps(found))


# Models ---------------------------------------------------------------------------------------------------------------


def _builders() -> dict[str, Callable[[], Any]]:
    return {
        "llama": llama,
        "gpt2": gpt2,
        "t5": t5,
        "vit": vit,
        "resnet": resnet,
        "timm": timm_vit,
        "dropout": hand_written,
    }


def llama(layers: int = 3, rows: int = 4) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config), _tokens(4096, rows), lambda model, batch: model(**batch).loss


def short_llama() -> Any:
    """A search that ends with nothing tries every way, so it has one block to try them on."""
    return llama(layers=1, rows=2)


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=4096, n_embd=256, n_layer=3, n_head=8, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config), _tokens(4096), lambda model, batch: model(**batch).loss


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=4096,
        d_model=256,
        d_kv=32,
        d_ff=1024,
        num_layers=3,
        num_heads=8,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    # Short: the virtual GPU computes the distances of its positions, a square of integers.
    return T5ForConditionalGeneration(config), _tokens(4096, length=384), lambda model, batch: model(**batch).loss


def _tokens(vocabulary: int, rows: int = 4, length: int = 1024) -> Any:
    import torch

    tokens = torch.randint(0, vocabulary, (rows, length), device="cuda")
    return {"input_ids": tokens, "labels": tokens.clone()}


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=256, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=8)
    return ViTForImageClassification(config), _images(), lambda model, batch: model(**batch).loss


def resnet() -> Any:
    """Its blocks change the shape of what flows, and are stages of different sizes."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=32, hidden_sizes=[64, 128, 256], depths=[2, 2, 2])
    return ResNetForImageClassification(config), _images(), lambda model, batch: model(**batch).loss


def timm_vit() -> Any:
    import torchvision_names  # noqa: F401

    # isort: split
    import timm
    from torch import nn

    def loss(model: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(model(batch["pixel_values"]), batch["labels"])

    return timm.create_model("vit_tiny_patch16_224", depth=3, num_classes=2), _images(), loss


def _images() -> Any:
    import torch

    return {
        "pixel_values": torch.randn(32, 3, 224, 224, device="cuda"),
        "labels": torch.randint(0, 2, (32,), device="cuda"),
    }


def hand_written() -> Any:
    import torch
    from torch import nn

    from fit.cases import DropoutNet

    batch = {"x": torch.randn(8, 4096, 8, device="cuda"), "y": torch.randint(0, 5, (8, 4096), device="cuda")}
    return (
        DropoutNet(width=256),
        batch,
        lambda model, batch: nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten()),
    )


# What happens to them -------------------------------------------------------------------------------------------------


def _training(build: Callable[[], Any]) -> Any:
    """On a card that the one before has left."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    model, batch, loss = build()
    model = model.cuda().train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch, loss


def _plain_peak(build: Callable[[], Any]) -> int:
    import torch

    model, optimizer, batch, loss = _training(build)
    for _ in range(2):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_reserved()


def _fit(name: str) -> dict[str, Any]:
    """Into two thirds of what the plain step takes, and a step then."""
    import torch

    import tonnage

    build = _builders()[name]
    plain_bytes = _plain_peak(build)
    model, optimizer, batch, loss = _training(build)
    budget = plain_bytes * 2 // 3
    fitted = tonnage.fit(model, optimizer, loss=loss, sample=batch, budget=budget, host="8 GiB")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        fitted.step(batch)
    found = {
        "budget": budget,
        "plain": plain_bytes,
        "predicted": fitted.plan.peak_bytes,
        "allocated": fitted.measured.peak_allocated_bytes,
        "rehearsed": fitted.measured.peak_reserved_bytes,
        "measured": torch.cuda.max_memory_reserved(),
        "techniques": [technique.name for technique in fitted.techniques],
        "text": str(fitted),
    }
    fitted.undo()
    return {**found, "plain again": is_plain(model, optimizer)}


def is_plain(model: Any, optimizer: Any) -> bool:
    """Nothing of fit is left on it."""
    untouched = all(
        "forward" not in module.__dict__ and not module._forward_hooks and not module._forward_pre_hooks
        for module in model.modules()
    )
    unhooked = all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    caching = getattr(getattr(model, "config", None), "use_cache", True)
    return untouched and unhooked and caching and "step" not in optimizer.__dict__


def _fitted_again() -> dict[str, Any]:
    """To a budget that needs host memory, after steps."""
    import tonnage

    model, optimizer, batch, loss = _training(short_llama)
    fitted = tonnage.fit(model, optimizer, loss=loss, sample=batch, budget="1 GiB", host="8 GiB")
    found = []
    for budget in (1 << 30, HOST_DECIDES_BYTES):
        fitted = fitted.refit(budget)
        found.append(
            {
                "budget": budget,
                "rehearsed": fitted.measured.peak_reserved_bytes,
                "techniques": [technique.name for technique in fitted.techniques],
                "left out": fitted.left_out,
                "steps": sorted({int(state["step"]) for state in optimizer.state_dict()["state"].values()}),
            }
        )
        for _ in range(2):
            fitted.step(batch)
    fitted.undo()
    return {"in turn": found, "plain": is_plain(model, optimizer)}


def _too_small() -> dict[str, Any]:
    """A budget below the parameters, and then the smallest one that it is told."""
    import tonnage
    from tonnage.fit.choose.solver import DoesNotFit

    model, optimizer, batch, loss = _training(short_llama)
    parameters_bytes = sum(parameter.nbytes for parameter in model.parameters())
    try:
        tonnage.fit(model, optimizer, loss=loss, sample=batch, budget=parameters_bytes // 2, host="8 GiB")
    except DoesNotFit as error:
        problem, smallest = str(error), error.smallest_bytes
    plain = is_plain(model, optimizer)
    found = {"problem": problem, "smallest": smallest, "parameters": parameters_bytes, "plain": plain}
    try:
        fitted = tonnage.fit(model, optimizer, loss=loss, sample=batch, budget=smallest, host="8 GiB")
    except DoesNotFit as error:
        return {**found, "measured": error.smallest_bytes}
    fitted.undo()
    return {**found, "measured": fitted.measured.peak_reserved_bytes}


def _with_fp8(width: int) -> dict[str, Any]:
    """Whether FP8 is used where it is allowed, and why not."""
    import torch

    import tonnage

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(
                torch.nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True) for _ in range(2)
            )

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    model = Encoder().to("cuda", torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fitted = tonnage.fit(
        model,
        optimizer,
        loss=lambda model, x: model(x).float().square().mean(),
        sample=torch.ones(4, width // 2, width, device="cuda", dtype=torch.bfloat16),
        exact=False,
        without=("compile",),
    )
    names, left_out = [technique.name for technique in fitted.techniques], dict(fitted.left_out)
    fitted.undo()
    return {"used": "fp8" in names, "left out": left_out.get("fp8"), "plain": is_plain(model, optimizer)}


def _no_host_memory() -> dict[str, Any]:
    """One budget with and without host memory."""
    import tonnage
    from tonnage.fit.choose.solver import DoesNotFit

    found: dict[str, Any] = {}
    for host in ("8 GiB", 0):
        model, optimizer, batch, loss = _training(short_llama)
        try:
            fitted = tonnage.fit(model, optimizer, loss=loss, sample=batch, budget=HOST_DECIDES_BYTES, host=host)
            found[str(host)] = {"fits": True, "host_bytes": fitted.plan.host_bytes}
            fitted.undo()
        except DoesNotFit as error:
            found[str(host)] = {"fits": False, "smallest": error.smallest_bytes}
    return found


def _wrong_in_parts() -> dict[str, Any]:
    """A step in micro-batches that breaks."""
    from unittest import mock

    import tonnage
    from tonnage.fit.techniques.micro_batches import MicroBatches

    model, optimizer, batch, loss = _training(short_llama)
    options = {"loss": loss, "sample": batch, "without": ("recompute", "activation-offload")}
    whole = tonnage.fit(model, optimizer, budget="1 GiB", **options)
    whole.undo()
    budget = whole.measured.peak_reserved_bytes - (8 << 20)
    names = []
    for broken in (False, True):
        with mock.patch.object(MicroBatches, "place", side_effect=ValueError("broken")) if broken else nullcontext():
            fitted = tonnage.fit(model, optimizer, budget=budget, **options)
        names.append([technique.name for technique in fitted.techniques])
        fitted.undo()
    return {"techniques": names, "left out": fitted.left_out}


def _carried(name: str, share: float, directory: Path) -> list[str]:
    """A plan for a share of the plain memory, to be applied on the CPU to an FP64 model of the same names."""
    import tonnage

    build = _builders()[name]
    budget = int(_plain_peak(build) * share)
    model, optimizer, batch, loss = _training(build)
    without = ("allocator", "autocast", "master-weights")
    fitted = tonnage.fit(model, optimizer, loss=loss, sample=batch, budget=budget, host="8 GiB", without=without)
    fitted.save(directory / f"{name}.json")
    fitted.undo()
    return [technique.name for technique in fitted.plan.techniques]


# What goes wrong ------------------------------------------------------------------------------------------------------


def _problem(provoke: Callable[[Any, Any, Any, Any], None]) -> dict[str, Any]:
    model, optimizer, batch, loss = _training(llama)
    try:
        provoke(model, optimizer, batch, loss)
    except Exception as error:
        return {"kind": type(error).__name__, "message": str(error), "plain": is_plain(model, optimizer)}
    return {"kind": "", "message": "", "plain": False}


def _not_scalar(model: Any, optimizer: Any, batch: Any, loss: Any) -> None:
    import tonnage

    tonnage.fit(model, optimizer, loss=lambda model, batch: model(**batch).logits, sample=batch)


def _elsewhere(model: Any, optimizer: Any, batch: Any, loss: Any) -> None:
    import torch

    import tonnage

    tonnage.fit(model, optimizer, loss=loss, sample={"input_ids": torch.zeros(4, 8, dtype=torch.long)})


def _breaking(model: Any, optimizer: Any, batch: Any, loss: Any) -> None:
    """A loss that raises once techniques are in place, and from then on always."""
    import tonnage

    seen = []

    def breaking(model: Any, batch: Any) -> Any:
        seen.extend(["a technique"] if "forward" in model.lm_head.__dict__ else [])
        if seen:
            raise ZeroDivisionError("in the middle of fit")
        return loss(model, batch)

    tonnage.fit(model, optimizer, loss=breaking, sample=batch)


def _twice(model: Any, optimizer: Any, batch: Any, loss: Any) -> None:
    import tonnage

    fitted = tonnage.fit(model, optimizer, loss=loss, sample=batch, measure=False)
    try:
        tonnage.fit(model, optimizer, loss=loss, sample=batch)
    finally:
        fitted.undo()


def _unknown(model: Any, optimizer: Any, batch: Any, loss: Any) -> None:
    import tonnage

    tonnage.fit(model, optimizer, loss=loss, sample=batch, without=["magic"])


def _no_size(model: Any, optimizer: Any, batch: Any, loss: Any) -> None:
    import tonnage

    tonnage.fit(model, optimizer, loss=loss, sample=batch, budget="forty")


_PROBLEMS = {
    "not scalar": _not_scalar,
    "elsewhere": _elsewhere,
    "midway": _breaking,
    "twice": _twice,
    "unknown name": _unknown,
    "no size": _no_size,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
