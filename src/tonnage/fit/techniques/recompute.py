"""Recompute: blocks whose forward runs again in backward, whole, in part, or operator by operator.

It does not know how the modes were chosen: `choose.frontier` makes the choice within a block, the solver that between blocks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from torch.utils.checkpoint import checkpoint

from tonnage.fit.choose.frontier import needed
from tonnage.fit.measure.profile import BlockProfile, OperatorProfile, Profile
from tonnage.fit.modules import find_blocks, replace_forward
from tonnage.fit.randomness import active_dropout
from tonnage.fit.recomputing.replay import Replayer
from tonnage.fit.recomputing.rerun import Rerun
from tonnage.fit.recomputing.sliced import SlicedRerun, check_rows_apart
from tonnage.fit.technique import Estimate, NotApplicable, Technique
from tonnage.fit.training import Training, Undo
from tonnage.units import format_bytes

Mode = str | Sequence[int | str]
_STREAMING = ("weight-streaming", "nvme")


@dataclass(frozen=True, kw_only=True)
class Recompute(Technique):
    """Modes by the name of a block, blocks without one are kept as they are:

    "keep"         as it is
    "block"        keep the input, run all of it again
    "part:mlp"     the same for its child `mlp` alone
    [3, 17, 20]    keep the outputs of these operator calls, run again what backward needs of the others; as
                   "17:aten.mm.default" the call must be of that operator

    With `slices`, blocks of mode "block" run over that many slices of the batch, one after another.
    """

    name: ClassVar[str] = "recompute"
    title: ClassVar[str] = "recompute in backward"
    order: ClassVar[int] = 40

    modes: Mapping[str, Mode]
    slices: int = 1

    @classmethod
    def all(cls, model: nn.Module, *, slices: int = 1) -> "Recompute":
        return cls.every(model, 1, slices=slices)

    @classmethod
    def every(cls, model: nn.Module, k: int, *, slices: int = 1) -> "Recompute":
        """Every k-th block, the first one among them."""
        return cls(modes=dict.fromkeys(list(find_blocks(model))[::k], "block"), slices=slices)

    @classmethod
    def attention(cls, model: nn.Module) -> "Recompute":
        """Only the attention of each block."""
        parts = {name: _attention(block) for name, block in find_blocks(model).items()}
        return cls(modes={name: f"part:{part}" for name, part in parts.items() if part is not None})

    def why_not(self, training: Training) -> str | None:
        if self.slices < 1:
            return f"slices={self.slices} is no number of slices"
        if getattr(training.model, "is_gradient_checkpointing", False):
            return "the model recomputes its blocks already (gradient_checkpointing_disable() turns that off)"
        wrong = (_why_not_mode(training, name, mode) for name, mode in self.modes.items())
        return next((reason for reason in (*wrong, self._why_not_slices(training)) if reason), None)

    def _why_not_slices(self, training: Training) -> str | None:
        if self.slices == 1:
            return None
        for name in (name for name, mode in self.modes.items() if mode == "block"):
            dropping = active_dropout(training.model.get_submodule(name))
            if dropping:
                return f"{name} draws random numbers ({dropping}), and slices would draw others than the whole batch"
        return None

    def estimate(self, profile: Profile) -> Estimate:
        blocks = [block for block in profile.blocks if self.modes.get(block.name, "keep") != "keep"]
        gone = {block.name: _gone_bytes(block, self.modes[block.name]) for block in blocks}
        seconds = sum(_again_s(block, self.modes[block.name]) for block in blocks)
        # While one block's backward runs, what it had not kept is there again.
        back = max(gone.values(), default=0)
        back = -(-back // self.slices)
        why = (
            f"{len(blocks)} of {len(profile.blocks)} blocks leave {format_bytes(sum(gone.values()))} less, "
            f"{format_bytes(back)} of it is back while one of them runs again"
        )
        return Estimate(saved_bytes=sum(gone.values()) - back, seconds=seconds, why=why)

    def apply(self, training: Training) -> Undo:
        reason = self.why_not(training)
        if reason is not None:
            raise NotApplicable(f"Blocks cannot be recomputed: {reason}.", hint="Change the modes, or leave it out.")
        if self.slices > 1:
            check_rows_apart(training, [name for name, mode in self.modes.items() if mode == "block"])
        with ExitStack() as stack:
            for name, mode in self.modes.items():
                if mode != "keep":
                    block = training.model.get_submodule(name)
                    stack.callback(self._place(block, mode, compiled=_is_compiled(training, block)))
            return stack.pop_all().close

    def _place(self, block: nn.Module, mode: Mode, *, compiled: bool) -> Undo:
        if isinstance(mode, str) and mode.startswith("part:"):
            part = block.get_submodule(mode.removeprefix("part:"))
            again = _checkpointed(part.forward) if compiled else Rerun(part, part.forward, Replayer({}))
            return replace_forward(part, again)
        # The operators of a compiled forward are not there to be seen.
        replayer = None if compiled else Replayer({} if isinstance(mode, str) else _kept(mode))
        if self.slices > 1 and mode == "block":
            return replace_forward(block, SlicedRerun(block, block.forward, replayer, self.slices))
        return replace_forward(block, Rerun(block, block.forward, replayer))


def _kept(mode: Sequence[int | str]) -> dict[int, str | None]:
    """Operators by index, with the name that was profiled where it is given."""
    pairs = (str(entry).partition(":") for entry in mode)
    return {int(index): name or None for index, _, name in pairs}


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """What the compiler understands: it runs this part again inside the backward that it makes for the block."""

    def again(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return again


def _is_compiled(training: Training, block: nn.Module) -> bool:
    """Whether its forward is compiled code, or a function around such."""
    cells = getattr(block.forward, "__closure__", None) or ()
    around = (block.forward, *(cell.cell_contents for cell in cells))
    return "compile" in training.applied or any(hasattr(part, "_torchdynamo_orig_callable") for part in around)


def _why_not_mode(training: Training, name: str, mode: Mode) -> str | None:
    modules = dict(training.model.named_modules())
    if name not in modules:
        return f"the model has no block {name!r}"
    if mode == "keep":
        return None
    block = modules[name]
    wrong = _why_not_words(name, block, mode) if isinstance(mode, str) else _why_not_operators(training, name, mode)
    return wrong or _why_not_again(name, block)


def _why_not_words(name: str, block: nn.Module, mode: str) -> str | None:
    if mode == "block":
        return None
    if not mode.startswith("part:"):
        return f"{name} has the mode {mode!r}, which is none of keep, block, part:NAME or a list of operators"
    part = mode.removeprefix("part:")
    if part in dict(block.named_modules()):
        return None
    return f"{name} has no part {part!r}, its parts are {', '.join(child for child, _ in block.named_children())}"


def _why_not_operators(training: Training, name: str, mode: Sequence[int | str]) -> str | None:
    if _is_compiled(training, training.model.get_submodule(name)):
        return f"{name} is compiled, and the operators inside cannot be told apart: use block or part:NAME"
    streaming = next((other for other in _STREAMING if other in training.applied), None)
    if streaming:
        return f"the copies of {streaming} come between the operators of {name}: use block or part:NAME"
    wrong = [entry for entry in mode if not str(entry).partition(":")[0].isdecimal()]
    return f"{name} is to keep operator {wrong[0]!r}, which is no index" if wrong else None


def _why_not_again(name: str, block: nn.Module) -> str | None:
    """Why running this block twice is not running it once."""
    for module in block.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training and module.track_running_stats:
            return f"{name} has a batch norm, whose running statistics would take in each batch twice"
    if any(parameter._backward_hooks for parameter in block.parameters()):
        return f"{name} has a hook on a parameter's gradient, which would run twice"
    return None


def _attention(block: nn.Module) -> str | None:
    names = [name for name, _ in block.named_children()]
    return next((name for name in names if "attn" in name.lower() or "attention" in name.lower()), None)


def _gone_bytes(block: BlockProfile, mode: Mode) -> int:
    """What the block leaves less than it would."""
    if mode == "block":
        return block.kept_bytes
    if isinstance(mode, str):
        return sum(operator.kept_bytes for operator in _part(block, mode))
    kept_bytes = sum(block.operators[index].output_bytes for index in _kept(mode))
    return max(0, block.kept_bytes - kept_bytes)


def _again_s(block: BlockProfile, mode: Mode) -> float:
    if isinstance(mode, str) and mode != "block":
        return sum(operator.seconds for operator in _part(block, mode))
    if not block.operators:
        return block.forward_s
    kept = [] if isinstance(mode, str) else list(_kept(mode))
    return sum(block.operators[index].seconds for index in needed(block.operators, kept))


def _part(block: BlockProfile, mode: str) -> Iterator[OperatorProfile]:
    part = mode.removeprefix("part:")
    return (o for o in block.operators if o.module == part or o.module.startswith(part + "."))
