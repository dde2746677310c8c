"""Runs a script under torch's own MemTracker, and reads the sizes of its model.

MemTracker follows tensors that are made on a device, and has Tonnage's virtual GPU for one here. Fake tensors would do too, but
not for scripts as they are: a model cannot be moved to the card, and no value can be read. The tracker's statistics by module
are reset after each pass, as its documentation asks.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch


class Observed:
    """The model and the optimizers of a script, as they were seen at work."""

    def __init__(self, tracker: Any, torch: Any) -> None:
        self.tracker, self.torch = tracker, torch
        self.roots: dict[Any, None] = {}
        self.optimizers: dict[Any, None] = {}
        self.autocast = False

    def before_forward(self, module: Any, _: Any) -> None:
        within = self.tracker._mod_tracker
        if within.is_bw or not set(within.parents) <= {"Global"}:
            return
        self.roots[module] = None
        self.autocast |= self.torch.is_autocast_enabled("cuda")
        if not self.torch.is_grad_enabled():
            self.tracker.reset_mod_stats()

    def before_step(self, optimizer: Any, *_: Any) -> None:
        self.optimizers[optimizer] = None

    def sizes(self) -> dict[str, Any]:
        """Parameters, largest layer, precision and optimizer of the largest module that the script called itself."""
        from accelerate.utils import calculate_maximum_sizes

        torch, model = self.torch, max(self.roots, key=_parameters, default=None)
        if model is None or not _parameters(model):
            return {}
        half = any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in model.parameters())
        found = {
            "parameters": _parameters(model),
            "largest_layer": max(sum(p.numel() for p in layer.parameters(recurse=False)) for layer in model.modules()),
            "precision": "float16" if half or self.autocast else "float32",
            "optimizer": type(next(iter(self.optimizers))).__name__ if self.optimizers else "",
        }
        # accelerate makes every model in float32, whatever it is trained in.
        return found | {"float32_bytes": calculate_maximum_sizes(model.to("meta", torch.float32))[0]}


def track(script: Path, words: list[str], gpu: str, torch_version: str | None, tracks: bool = True) -> dict[str, Any]:
    """What MemTracker has at its peak, and what the arithmetic of other estimators needs to know of the model."""
    from tonnage.hardware import find_cuda_gpu
    from tonnage.script.running import Program, run_as_main
    from tonnage.virtual.builds import new_session
    from tonnage.virtual.imports import quick_imports

    session = new_session(find_cuda_gpu(gpu), torch_version)
    session.open(capture=False)
    session.device.lift_limit()
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    tracker = MemTracker()
    seen, backward = Observed(tracker, torch), torch.Tensor.backward

    def reset_after(*arguments: Any, **options: Any) -> None:
        backward(*arguments, **options)
        tracker.reset_mod_stats()

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.Tensor, "backward", reset_after))
        stack.callback(register_module_forward_pre_hook(seen.before_forward).remove)
        stack.callback(register_optimizer_step_pre_hook(seen.before_step).remove)
        if tracks:
            stack.enter_context(tracker)
        ending = run_as_main(Program.of_file(script), words, torch, quick_imports())
        peaks = tracker.get_tracker_snapshot("peak")
        found = {"peak": sum(held["Total"] for device, held in peaks.items() if device.type == "cuda")}
        if ending.outcome != "ok" or ending.exit_status:
            found["refused"] = ending.error.strip().splitlines()[-1][:160] if ending.error else "the script failed"
        return found | seen.sizes()


def _parameters(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
