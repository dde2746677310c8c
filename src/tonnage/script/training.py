"""Which framework runs a script's training steps, and how: facts that a recording keeps to give specific advice.

They are read from the frames on the stack, the outermost model and the optimizer, not guessed from names:

| fact | means |
|---|---|
| `trainer` | "transformers", "trl", "lightning" or "accelerate"; missing for the script's own loop |
| `arguments` | the class of the trainer's settings, such as "SFTConfig" |
| `batch`, `eval_batch`, `accumulation` | samples per forward and GPU in training and evaluation; forwards per step |
| `library` | the library of the model's class: "timm", "transformers", "diffusers" |
| `checkpointing` | the model's method that turns recomputation on |
| `recomputed` | modules that it then recomputes, one name per line |
| `sdpa` | "yes" if a transformers model supports fused attention |
| `optimizers`, `stepping` | full names of the classes created; how many optimizers have stepped |
| `embeddings` | shapes of the embedding tables, such as "50257x768" |
"""

import sys
from types import FrameType
from typing import Any

_OF_TRANSFORMERS = "transformers.trainer"
_DRIVERS = (_OF_TRANSFORMERS, "lightning.pytorch.trainer.", "pytorch_lightning.trainer.")
_CHECKPOINTING = {
    "timm": "set_grad_checkpointing",
    "diffusers": "enable_gradient_checkpointing",
    "transformers": "gradient_checkpointing_enable",
}
_SUPPORT = {"diffusers": "_supports_gradient_checkpointing", "transformers": "supports_gradient_checkpointing"}


def facts_of_driver(frame: FrameType | None) -> tuple[dict[str, str], Any]:
    """Return facts from the frames, and Lightning's module, whose parts are called as if they were models."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        driver: Any = frame.f_locals.get("self") if name.startswith(_DRIVERS) else None
        if hasattr(driver, "accumulate_grad_batches"):
            accumulation = str(driver.accumulate_grad_batches)
            return {"trainer": "lightning", "accumulation": accumulation}, getattr(driver, "lightning_module", None)
        if name == _OF_TRANSFORMERS and hasattr(driver, "args"):
            settings = driver.args
            kinds = {kind.__module__.partition(".")[0] for kind in type(settings).__mro__}
            return {
                "trainer": "trl" if "trl" in kinds else "transformers",
                "arguments": type(settings).__name__,
                "batch": str(settings.per_device_train_batch_size),
                "eval_batch": str(settings.per_device_eval_batch_size),
                "accumulation": str(settings.gradient_accumulation_steps),
            }, None
        frame = frame.f_back
    # The script's own loop, which may use an Accelerator.
    state = sys.modules.get("accelerate.state")
    if state is None or not state.AcceleratorState._shared_state:
        return {}, None
    return {"trainer": "accelerate", "accumulation": str(state.GradientState().num_steps)}, None


def facts_of_model(model: Any) -> dict[str, str]:
    """Return a model's capabilities, from the first library class beneath wrappers (DDP, peft)."""
    torch = sys.modules["torch"]
    facts, beneath = {}, [model]
    while len(beneath) < 8:
        inner = getattr(beneath[-1], "module", None) or getattr(beneath[-1], "base_model", None)
        if type(beneath[-1]).__module__.startswith("peft.tuners"):
            inner = beneath[-1].model
        if not isinstance(inner, torch.nn.Module) or inner is beneath[-1]:
            break
        beneath.append(inner)
    for module in beneath:
        names = [kind.__module__.partition(".")[0] for kind in type(module).__mro__]
        library = next((name for name in names if name in _CHECKPOINTING), None)
        if library is None:
            continue
        facts["library"] = library
        if hasattr(module, method := _CHECKPOINTING[library]) and getattr(module, _SUPPORT.get(library, method)):
            facts["checkpointing"] = method
        if getattr(module, "_supports_sdpa", False):
            facts["sdpa"] = "yes"
        break
    named = list(model.named_modules())
    recomputed = []
    for path, module in named:  # by its class in transformers; in diffusers, these two kinds of blocks
        kinds = [kind.__name__ for kind in type(module).__mro__]
        is_block = kinds[0].endswith(("ResnetBlock2D", "TransformerBlock"))
        if is_block if type(module).__module__.startswith("diffusers.") else "GradientCheckpointingLayer" in kinds:
            recomputed.append(path)
    tables = [module.weight for _, module in named if isinstance(module, torch.nn.Embedding)]
    facts["recomputed"] = "\n".join(recomputed)
    facts["embeddings"] = " ".join("x".join(map(str, table.shape)) for table in tables)
    return {key: value for key, value in facts.items() if value}


def name_of_optimizer(optimizer: Any) -> str:
    """Return the class name as a script would import it ("torch.optim.AdamW"); "" for a wrapper of another optimizer."""
    kind = type(optimizer)
    if kind.__module__.startswith(("accelerate.", "lightning.", "pytorch_lightning.")):
        return ""
    return f"{'torch.optim' if kind.__module__.startswith('torch.optim.') else kind.__module__}.{kind.__name__}"
