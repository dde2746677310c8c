"""Recompute: blocks whose forward runs again in backward, whole, in part, or operator by operator.

The modes are chosen elsewhere: by `choose.frontier` within a block, by the solver between blocks.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from tonnage.fit.modules import active_dropout, find_blocks, replace_forward
from tonnage.fit.recomputing.replay import Replayer
from tonnage.fit.recomputing.rerun import GraphRerun, Rerun
from tonnage.fit.recomputing.sliced import SlicedRerun, check_rows_apart
from tonnage.fit.recomputing.trial import RerunFinding, find_out, try_blocks
from tonnage.fit.technique import NotApplicable, Technique
from tonnage.fit.training import Training

Mode = str | Sequence[int | str]
_STREAMING = ("weight-streaming", "nvme")


class Recompute(Technique, name="recompute"):
    """Recomputes blocks in backward, by a mode per block name; other blocks stay as they are:

    "keep"         as it is
    "block"        save the input, rerun everything
    "part:mlp"     the same for its child `mlp` alone
    [3, 17, 20]    save the outputs of these operator calls, rerun what backward needs of the others; in the form
                   "17:aten.mm.default" the operator is checked

    With `slices`, blocks of mode "block" run over that many slices of the batch, one after another.

    Before it is applied, each block runs twice on the first rows of the sample. RNG states, and buffers and attributes
    that it changes (running statistics, counters), are restored for the second run. If gradients flow other than through
    its arguments and outputs, the graph of its first run is kept too. If a second run still gives other values, the
    block cannot be recomputed; see `recomputable`.
    """

    modes: Mapping[str, Mode]
    slices: int = 1

    @classmethod
    def all(cls, model: nn.Module, *, slices: int = 1) -> "Recompute":
        return cls.every(model, 1, slices=slices)

    @classmethod
    def every(cls, model: nn.Module, k: int, *, slices: int = 1) -> "Recompute":
        """Recompute every k-th block, starting with the first."""
        return cls(modes=dict.fromkeys(list(find_blocks(model))[::k], "block"), slices=slices)

    @classmethod
    def attention(cls, model: nn.Module) -> "Recompute":
        """Recompute only the attention of each block."""
        modes = {}
        for name, block in find_blocks(model).items():
            children = (child for child, _ in block.named_children())
            part = next((child for child in children if "attn" in child.lower() or "attention" in child.lower()), None)
            if part is not None:
                modes[name] = f"part:{part}"
        return cls(modes=modes)

    def why_not(self, training: Training) -> str | None:
        if self.slices < 1:
            return f"slices={self.slices} is no number of slices"
        if getattr(training.model, "is_gradient_checkpointing", False):
            return "the model recomputes its blocks already (gradient_checkpointing_disable() turns that off)"
        modules = dict(training.model.named_modules())
        streaming = next((other for other in _STREAMING if other in training.applied), None)
        for name, mode in self.modes.items():
            if name not in modules:
                return f"the model has no block {name!r}"
            block = modules[name]
            if mode == "block" and self.slices > 1:
                dropping = active_dropout(block)
                if dropping:
                    return (
                        f"{name} draws random numbers ({dropping}), and slices would draw others than the whole batch"
                    )
                if any(isinstance(module, _BatchNorm) and module.training for module in block.modules()):
                    return f"{name} has a batch norm, whose statistics of a slice are not those of the batch"
            if mode in ("keep", "block"):
                continue
            if isinstance(mode, str):
                part = mode.removeprefix("part:")
                if part == mode:
                    known = "keep, block, part:NAME or a list of operators"
                    return f"{name} has the mode {mode!r}, which is none of {known}"
                if part not in dict(block.named_modules()):
                    parts = ", ".join(child for child, _ in block.named_children())
                    return f"{name} has no part {part!r}, its parts are {parts}"
                continue
            if _is_compiled(training, block):
                return f"{name} is compiled, and the operators inside cannot be told apart: use block or part:NAME"
            if streaming:
                return f"the copies of {streaming} come between the operators of {name}: use block or part:NAME"
            wrong = [entry for entry in mode if not str(entry).partition(":")[0].isdecimal()]
            if wrong:
                return f"{name} is to keep operator {wrong[0]!r}, which is no index"
        return None

    def place(self, training: Training, stack: ExitStack) -> None:
        modes = {name: mode for name, mode in self.modes.items() if mode != "keep"}
        module_names = {
            name: mode.replace("part:", f"{name}.", 1) if isinstance(mode, str) and mode != "block" else name
            for name, mode in modes.items()
        }
        findings = find_out(training, [*module_names.values()])
        for name, mode in modes.items():
            reason = self._why_not_found(training, mode, findings[module_names[name]])
            if reason is not None:
                raise self._not_applicable(f"{module_names[name]} cannot run twice: {reason}")
        if self.slices > 1:
            check_rows_apart(training, [name for name, mode in modes.items() if mode == "block"])
        for name, mode in modes.items():
            module = training.model.get_submodule(module_names[name])
            compiled = _is_compiled(training, training.model.get_submodule(name))
            forward = self._recomputing(module, mode, findings[module_names[name]], compiled=compiled)
            stack.callback(replace_forward(module, forward))
        # A block that calls other operators than it should keep would rerun whole in training.
        names = [name for name, mode in modes.items() if not isinstance(mode, str)]
        by_operators: dict[str, Any] = {name: training.model.get_submodule(name) for name in names}
        if by_operators:
            # The other blocks' inputs are not kept either: what sends them to the host is not applied yet.
            try_blocks(training, [*module_names.values()], twice=False)
        for name, block in by_operators.items():
            if block.forward.differs:
                differs = f"{name} calls other operators than those profiled ({block.forward.differs})"
                raise self._not_applicable(f"{differs}: use mode block")

    def _not_applicable(self, reason: str) -> NotApplicable:
        return NotApplicable(self.refusal.format(reason=reason), hint=self.hint)

    def _why_not_found(self, training: Training, mode: Mode, finding: RerunFinding) -> str | None:
        sliced = self.slices > 1 and mode == "block"
        if finding.reason or (sliced and finding.slots):
            return finding.reason or f"it changes {finding.slots[0].key}, and slices would change it once each"
        if finding.slots and not isinstance(mode, str):
            return f"it changes {finding.slots[0].key}, which only the modes block and part:NAME can do"
        if finding.beside is None:
            return None
        if sliced or not isinstance(mode, str):
            return f"{finding.beside}, which only the modes block and part:NAME without slices can do"
        streaming = next((other for other in _STREAMING if other in training.applied), None)
        return f"{finding.beside}, which cannot be done beside {streaming}" if streaming else None

    def _recomputing(
        self, module: nn.Module, mode: Mode, finding: RerunFinding, *, compiled: bool
    ) -> Callable[..., Any]:
        """Return the forward that replaces the module's own."""
        forward = module.forward
        if compiled and isinstance(mode, str) and mode != "block":
            # torch.compile supports checkpoint(): it recomputes this part inside the block's compiled backward. Equal
            # parts get the same function, so that their blocks share one compilation.
            if isinstance(forward, MethodType) and forward.__self__ is module:
                return MethodType(_checkpointed_function(forward.__func__), module)
            return _checkpointed(forward)
        if finding.beside is not None:
            return GraphRerun(module, forward, None, finding.slots)
        # Operators are kept by index, with the profiled name if given; those of a compiled forward cannot be observed.
        entries = () if isinstance(mode, str) else (str(entry).partition(":") for entry in mode)
        replayer = None if compiled else Replayer({int(index): name or None for index, _, name in entries})
        if self.slices > 1 and mode == "block":
            return SlicedRerun(module, forward, replayer, self.slices)
        return Rerun(module, forward, replayer, finding.slots)


def recomputable(training: Training, names: Sequence[str]) -> dict[str, str | None]:
    """Return why each of these blocks cannot be recomputed whole, or None. Runs each twice on the sample."""
    technique = Recompute(modes=dict.fromkeys(names, "block"))
    findings = find_out(training, names)
    return {name: technique._why_not_found(training, "block", findings[name]) for name in names}


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def again(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    again.__name__ = "forward"  # pickle looks up a module's method by this name and finds the plain one
    return again


_checkpointed_function = functools.cache(_checkpointed)


def _is_compiled(training: Training, block: nn.Module) -> bool:
    """Return whether its forward is compiled code, or a function around it."""
    forward = getattr(block.forward, "forward", block.forward)  # unwrap a replaced forward
    cells = getattr(forward, "__closure__", None) or ()
    around = (block.forward, forward, *(cell.cell_contents for cell in cells))
    return "compile" in training.applied or any(hasattr(part, "_torchdynamo_orig_callable") for part in around)
