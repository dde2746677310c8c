"""Record the operator calls of a block's forward pass: what each allocates, what backward saves, and its time.

Calls are counted below autograd, in order, with gradients enabled; that count is the operator's index everywhere in
`fit`. It does not know what is worth saving.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tonnage.fit.moving.saved_tensors import storage_key
from tonnage.fit.survey.meter import clocked
from tonnage.fit.survey.profile import OperatorProfile
from tonnage.hardware import Gpu

# Runs one operator and returns a function that gives its time after the pass.
Clock = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], tuple[Any, Callable[[], float]]]
Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]

# Autograd's own calls: their number depends on saved-tensor hooks.
UNCOUNTED = frozenset({torch.ops.aten.detach.default})
_COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor")


@dataclass
class RecordedOperator:
    """One recorded operator call."""

    function: OpOverload
    inputs: tuple[int, ...]
    base: int | None  # the operator whose storage it views or writes into
    layouts: tuple[Layout, ...]  # of its output tensors
    made_bytes: int
    differentiated: bool  # whether autograd saw it; False inside a custom autograd function
    external: bool  # views or writes into a tensor from outside
    read_s: Callable[[], float]
    saved_bytes: int = 0
    keepable: bool = True

    @property
    def writes(self) -> bool:
        return self.function._schema.is_mutable

    @property
    def repeatable(self) -> bool:
        """False for collectives and for operators that change a tensor from outside."""
        return self.function.namespace not in _COLLECTIVES and not (self.external and self.writes)

    @property
    def can_be_left_out(self) -> bool:
        """Whether it may be skipped if unread: False inside custom autograd functions and if it returns no tensor."""
        schema = self.function._schema
        written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
        plain = 0 < len(self.layouts) == len(schema.returns) and (not self.writes or written[0])
        return self.differentiated and self.repeatable and plain

    @property
    def is_view(self) -> bool:
        return not self.made_bytes and not self.writes and (self.external or self.base is not None)


class OperatorRecorder(TorchDispatchMode):
    """Records every operator called inside it. `saving` around the same pass records what backward saves."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__()
        self.operators: list[RecordedOperator] = []
        self.overlooked = False  # other hooks hid from `saving` what an operator saved
        self._pack: object = None
        self._clock = clock or (lambda func, args, kwargs: (func(*args, **kwargs), lambda: 0.0))
        self._makers: dict[int, int] = {}  # storage -> the operator that allocated it
        self._reads: set[int] = set()  # operators whose storage was read

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in UNCOUNTED:
            return func(*args, **kwargs)
        # The hook that currently sees what is saved for backward.
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self.overlooked = self.overlooked or (hooks[0] if hooks else None) is not self._pack
        given = {storage_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        outputs, read_s = self._clock(func, args, kwargs)
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        made = {storage_key(t): t.untyped_storage().nbytes() for t in tensors if storage_key(t) not in given}
        shared = [storage_key(t) for t in tensors if storage_key(t) in given]
        operator = RecordedOperator(
            function=func,
            inputs=tuple(sorted({self._makers[key] for key in given if key in self._makers})),
            base=next((self._makers[key] for key in shared if key in self._makers), None),
            layouts=tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors),
            made_bytes=sum(made.values()),
            differentiated=torch.is_grad_enabled(),
            external=any(key not in self._makers for key in shared),
            read_s=read_s,
        )
        if operator.writes and operator.base is not None:
            # If saved, it would hold the later value when a reader of the earlier one runs again.
            root = self.operators[operator.base]
            root.keepable = root.keepable and operator.base not in self._reads
        elif not operator.is_view:
            self._reads.update(operator.inputs)
        self._makers |= dict.fromkeys(made, len(self.operators))
        self.operators.append(operator)
        return outputs

    @contextmanager
    def saving(self, *, hold: bool) -> Iterator[None]:
        """Record what is saved for backward; without `hold` nothing is kept, and backward is impossible."""
        seen: set[int] = set()

        def pack(tensor: Tensor) -> Tensor | None:
            key = storage_key(tensor)
            if key in self._makers and key not in seen:
                self.operators[self._makers[key]].saved_bytes += tensor.untyped_storage().nbytes()
            seen.add(key)
            # Detached, to avoid a cycle between an operator's output and its autograd node.
            return tensor.detach() if hold else None

        self._pack = pack
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield


def profile_operators(
    block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], clock: Clock | None = None
) -> tuple[OperatorProfile, ...]:
    """Return the profile of every operator call in one forward pass of the block."""
    recorder = OperatorRecorder(clock)
    with recorder.saving(hold=True), recorder, torch.enable_grad():
        outputs = block(*args, **kwargs)
    del outputs
    return tuple(profile_of(index, operator) for index, operator in enumerate(recorder.operators))


def profile_of(index: int, operator: RecordedOperator) -> OperatorProfile:
    return OperatorProfile(
        index=index,
        name=str(operator.function),
        output_bytes=operator.made_bytes,
        kept_bytes=operator.saved_bytes,
        seconds=operator.read_s(),
        inputs=operator.inputs,
        base=operator.base,
        writes=operator.writes,
        keepable=operator.keepable and bool(operator.made_bytes),
        repeatable=operator.repeatable,
    )


def operations_clock(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Callable[[], float]]:
    """Return the FLOPs of matrix products in place of seconds."""
    outputs = func(*args, **kwargs)
    operations = matrix_operations(func, args, kwargs, outputs)
    return outputs, lambda: operations


def event_clock(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Callable[[], float]]:
    """Time an operator on the current CUDA device between two events."""
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    outputs = func(*args, **kwargs)
    after.record()

    def read_s() -> float:
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3

    return outputs, read_s


def virtual_clock(gpu: Gpu) -> Clock:
    """Return a clock that estimates operator times on that card."""

    def clock(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Callable[[], float]]:
        outputs: list[Any] = []
        seconds, _ = clocked(lambda: outputs.append(func(*args, **kwargs)), gpu)
        return outputs[-1], lambda: seconds

    return clock


def matrix_operations(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return the FLOPs of a matrix product, convolution or attention; 0 for anything else."""
    count = flop_registry.get(func.overloadpacket)
    if count is None:
        return 0.0
    name = func.overloadpacket.__name__
    if "attention" in name:
        # Two products forward, five backward. (PyTorch's own count rejects grouped queries in 2.11.)
        tensors = [value for value in args if isinstance(value, Tensor) and value.dim() == 4]
        backward = "backward" in name
        query, key, value = tensors[1:4] if backward else tensors[:3]
        rows, heads, length, width = query.shape
        causal = any(argument is True for argument in args)
        forward = 2 * rows * heads * length * key.shape[2] * (width + value.shape[3]) * (0.5 if causal else 1.0)
        return forward * 2.5 if backward else forward
    positional = [value for value in args if not isinstance(value, torch.dtype)]
    # Without the arguments of matrix products that do not affect their size.
    named = {name: value for name, value in kwargs.items() if name not in ("out", "out_dtype", "alpha", "beta")}
    return float(count(*positional, **named, out_val=result))
