"""The operators of one typical step in the order they began, from which the clock computes its time.

Most calls of a step repeat, so each distinct one is stored once and the step is a sequence of their indices.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tonnage.clock.operators import OperatorCall

# A kernel is one of Triton's; a node is one that autograd's engine evaluates; a region is a named range. What `streams`
# reads has kinds of its own: how streams wait for each other, and collectives between GPUs.
CallKind = Literal["operator", "kernel", "node", "region", "stream", "collective"]
_COMPILED = {"region": "Torch-Compiled Region", "node": "CompiledFunctionBackward"}
# Operators whose caller waits for a value from the GPU.
_READS = "_local_scalar_dense nonzero masked_select _unique2 unique_dim unique_consecutive equal"
READS_BACK = frozenset(_READS.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedCall(OperatorCall):
    """A distinct call. A list of tensors has a type like "float[]".

    `devices` holds "cuda", "cpu", "pinned" (page-locked host memory) or "" for each argument.
    """

    kind: CallKind = "operator"
    devices: tuple[str, ...] = ()

    @property
    def on_card(self) -> bool:
        """Whether any of its tensors is on the GPU."""
        return "cuda" in self.devices

    @property
    def is_compiled(self) -> bool:
        """Whether it is code compiled by torch.compile, or its backward."""
        return self.kind in _COMPILED and self.name.split(":")[0] == _COMPILED[self.kind]


class CallInStep(NamedTuple):
    """One call in the step: its nesting depth, phase and thread (0: the script's own)."""

    call: CapturedCall
    depth: int
    phase: str
    thread: int
    parent: int | None
    is_inner: bool  # within another operator
    is_compiled: bool = False  # within code compiled by torch.compile


@dataclass(frozen=True, kw_only=True)
class CapturedStep:
    """What one step called.

    `number` is the step's number in the marks. `sequence`, `depths` and `threads` have equal length; `phases` lists
    where each phase begins. `samples` and `tokens` are those of the step's inputs, None if unclear.
    """

    number: int
    training: bool
    calls: tuple[CapturedCall, ...]
    sequence: tuple[int, ...]
    depths: tuple[int, ...]
    threads: tuple[int, ...]
    phases: tuple[tuple[int, str], ...]
    module_calls: int
    optimizer_parameters: int
    samples: int | None
    tokens: int | None
    settings: dict[str, str]

    def moments(self) -> Iterator[CallInStep]:
        """Yield every call in order; `parent` is the index of its caller."""
        begins = dict(self.phases)
        phase = ""
        opens = [(call, call.kind == "operator", call.is_compiled) for call in self.calls]
        # By thread: the index of each open call, and whether it is within an operator or compiled code.
        open_calls: dict[int, list[tuple[int, bool, bool]]] = {}
        for place, (number, depth, thread) in enumerate(zip(self.sequence, self.depths, self.threads, strict=True)):
            phase = begins.get(place, phase)
            above = open_calls.setdefault(thread, [])
            del above[depth:]
            call, is_operator, begins_compiled = opens[number]
            parent, is_inner, is_compiled = above[-1] if above else (None, False, False)
            yield CallInStep(call, depth, phase, thread, parent, is_inner, is_compiled)
            above.append((place, is_inner or is_operator, is_compiled or begins_compiled))
