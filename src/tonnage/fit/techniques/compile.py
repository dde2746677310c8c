"""Apply torch.compile block by block: pointwise operators are fused, and backward saves less.

Equal blocks share one compilation, so a deep model compiles as fast as one block. If compiling fails at the first
call, all blocks run eagerly and a warning says why. Techniques applied later see just another forward.
"""

import functools
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from tonnage.fit.modules import active_dropout, find_blocks, is_cache_idle, replace_forward, without_cache
from tonnage.fit.stepping.stochastic import has_triton
from tonnage.fit.technique import Technique
from tonnage.fit.training import Training, set_attributes
from tonnage.fit.virtual import on_virtual_gpu

MODES = ("default", "max-autotune-no-cudagraphs")
# A block is compiled for training, for inference, and for the sizes of a last, smaller batch.
VARIANTS_OF_A_BLOCK = 8


class Compile(Technique, name="compile"):
    """Compiles the named `blocks`, or every repeated block if None."""

    blocks: tuple[str, ...] | None = None
    mode: str = "default"

    def why_not(self, training: Training) -> str | None:
        if self.mode not in MODES:
            return f"mode={self.mode!r} is not one of {', '.join(MODES)}: CUDA graphs hold memory outside the budget."
        if on_virtual_gpu(training.device) and not has_triton():
            return "The virtual GPU compiles only where Triton is installed (pip install triton)."
        blocks = self._chosen(training.model)
        if not blocks:
            return "The model has no repeated blocks, and compiling it whole would take minutes for each input size."
        kinds = attrgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        for name, block in blocks.items():
            for child, module in block.named_modules():
                if child and any(kinds(module)):
                    return f"{name}.{child} carries hooks, which break a compiled graph in pieces."
        return compiler_problem(training.device.type)

    def place(self, training: Training, stack: ExitStack) -> None:
        blocks = self._chosen(training.model)
        from torch._inductor import list_mode_options

        # torch.compile takes a mode or options, so a mode as options. Compiled code has its own random numbers unless it
        # falls back to PyTorch's operators.
        same_draws = {"fallback_random": True} if active_dropout(training.model) is not None else {}
        options, failed = {**list_mode_options(self.mode), **same_draws}, list[str]()
        if is_cache_idle(training):
            stack.callback(without_cache(training.model))
        # Dynamo's recompile limits must be what the blocks may need: beyond them it silently runs eagerly.
        import torch._dynamo

        config, needed = torch._dynamo.config, len(blocks) * VARIANTS_OF_A_BLOCK
        limits = {name: getattr(config, name) for name in ("recompile_limit", "accumulated_recompile_limit")}
        stack.callback(set_attributes(config, **{name: max(limit, needed) for name, limit in limits.items()}))
        for block in blocks.values():
            stack.callback(replace_forward(block, _compiled(block.forward, options, failed)))

    def _chosen(self, model: nn.Module) -> dict[str, nn.Module]:
        found = find_blocks(model)
        if self.blocks is None:
            return found
        return {name: found[name] if name in found else model.get_submodule(name) for name in self.blocks}


@functools.cache
def compiler_problem(device_type: str) -> str | None:
    """Return why torch.compile does not work on this machine, or None; tried once on a tiny function."""
    try:
        compiled = torch.compile(lambda x: x.sin() + 1)
        compiled(torch.ones(8, device=device_type))
    except Exception as problem:
        return f"torch.compile does not work here: {_first_line(problem)}"
    return None


def _first_line(problem: Exception) -> str:
    """Return the backend's message without Dynamo's wrapping."""
    inner = getattr(problem, "inner_exception", problem)
    line = next((line.strip() for line in str(inner).splitlines() if line.strip()), "no reason given")
    return f"{type(inner).__name__}: {line.rstrip('.')}"


def _compiled(eager: Callable[..., Any], options: dict[str, Any], failed: list[str]) -> Callable[..., Any]:
    """Compile a forward; after the first failure all that share this list run eagerly."""
    from torch._dynamo.exc import TorchDynamoException

    compiled = torch.compile(eager, dynamic=False, options=options)

    @functools.wraps(eager)
    def forward(*arguments: Any, **keywords: Any) -> Any:
        if not failed:
            try:
                return compiled(*arguments, **keywords)
            except TorchDynamoException as problem:
                failed.append(_first_line(problem))
                warnings.warn(
                    f"Blocks run eagerly, for compiling one failed: {failed[0]}. Memory and time will be those of the "
                    "model without compile.",
                    stacklevel=2,
                )
        return eager(*arguments, **keywords)

    return forward
