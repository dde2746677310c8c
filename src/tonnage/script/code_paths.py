"""Finds the answer to a question that lets a program continue: the one after which it does not raise.

`if not valid.all(): raise ValueError(...)` and `assert (boxes[:, 2:] >= boxes[:, :2]).all()` ask a flag only to decide
whether to raise. The bytecode of the frames that ask tells which answer does: from the instruction that reads the flag,
the value is followed through `not`, `and`, `or`, `bool()`, `any()`, `all()`, a local name and `return` to the jump that
tests it; then the paths behind both sides of the jump are compared. Nothing is run, and source text is not needed.

Not followed: flags in containers, attributes and arithmetic, and comparisons of numbers.
"""

import dis
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from inspect import CO_OPTIMIZED, getattr_static
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

# Functions that end the program instead of returning.
EXITS = frozenset({"exit", "_exit", "quit", "abort"})
_PASS_A_FLAG_ON = frozenset({"bool", "any", "all"})
_STOPS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RETURN_GENERATOR", "YIELD_VALUE", "INTERPRETER_EXIT"})
_RAISES = frozenset({"RAISE_VARARGS", "RERAISE"})
_ALWAYS_JUMP = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"})
_FILLERS = frozenset({"NOP", "EXTENDED_ARG", "NOT_TAKEN", "PRECALL", "TO_BOOL", "RESUME", "COPY_FREE_VARS"})
_LONGEST_WALK = 200  # instructions that a flag is followed for

Continues = Callable[[int], bool]  # whether the call at an instruction returns


class Paths:
    """The instructions of a code object, and where each may lead."""

    def __init__(self, code: CodeType) -> None:
        self.instructions: list[dis.Instruction] = []
        self._offsets: list[int] = []
        self._numbers: list[int] = []  # for each offset: the instruction there, or the next that does something
        for instruction in dis.get_instructions(code):
            self._offsets.append(instruction.offset)
            self._numbers.append(len(self.instructions))
            if instruction.opname not in _FILLERS:
                self.instructions.append(instruction)

    def index_at(self, offset: int) -> int:
        """Return the number of the instruction at an offset, which may be that of its cache."""
        return self._numbers[bisect_right(self._offsets, offset) - 1]

    def successors(self, index: int) -> list[int]:
        """Return the instructions that may come next, apart from exception handlers."""
        instruction = self.instructions[index]
        if instruction.opname in _STOPS or instruction.opname in _RAISES:
            return []
        target = [self.index_at(instruction.argval)] if instruction.opcode in _JUMPS else []
        if instruction.opname in _ALWAYS_JUMP:
            return target
        following = [index + 1] if index + 1 < len(self.instructions) else []
        return following + target

    def always_raises(self, start: int, without: int, returns: Continues) -> bool:
        """Whether every path from `start` raises or ends the program before it returns, yields or comes to `without`."""
        waiting, seen = [start], {start}
        while waiting:
            index = waiting.pop()
            opname = self.instructions[index].opname
            if index == without or opname in _STOPS:
                return False
            if opname.startswith("CALL") and not returns(index):
                continue
            for following in self.successors(index):
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
        return True

    def answer(self, jump: int, returns: Continues) -> bool | None:
        """Return the value of the tested flag with which the jump does not lead to an error; None if both or neither do."""
        instruction = self.instructions[jump]
        if_jumping = "_IF_TRUE" in instruction.opname
        raises_on_jump = self.always_raises(self.index_at(instruction.argval), jump, returns)
        raises_after = self.always_raises(jump + 1, jump, returns)
        if raises_on_jump == raises_after:
            return None
        return if_jumping if raises_after else not if_jumping

    def enters_loop(self, jump: int) -> bool | None:
        """Return the value with which the test of a `while` goes into its body; None if the jump is no such test."""
        instruction = self.instructions[jump]
        if_jumping = "_IF_TRUE" in instruction.opname
        repeats_on_jump = self._repeats(self.index_at(instruction.argval), jump)
        repeats_after = self._repeats(jump + 1, jump)
        if repeats_on_jump == repeats_after:
            return None
        return if_jumping if repeats_on_jump else not if_jumping

    def _repeats(self, start: int, test: int) -> bool:
        """Whether a path leads into a loop that ends with a copy of this test, as the compiler makes one of a `while`."""
        position = self.instructions[test].positions
        for index in self._reached([start], test):
            instruction = self.instructions[index]
            is_copy = instruction.positions == position and _is_test(instruction)
            if is_copy and index in self._reached(self.successors(index), test):
                return True
        return False

    def _reached(self, starts: list[int], without: int) -> set[int]:
        """Return the instructions on the paths from here that do not pass one."""
        seen = {index for index in starts if index != without}
        waiting = list(seen)
        while waiting:
            new = {following for following in self.successors(waiting.pop()) if following != without} - seen
            seen |= new
            waiting += new
        return seen


_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})


@lru_cache(maxsize=1024)
def paths_of(code: CodeType) -> Paths:
    """Return the paths of a code object; they are kept for the next question."""
    return Paths(code)


def answer_without_error(frames: Sequence[FrameType]) -> bool | None:
    """Return the answer that keeps these frames (innermost first) from raising; None if the flag decides something else."""
    negated = False
    for frame in frames:
        paths = paths_of(frame.f_code)
        index = paths.index_at(frame.f_lasti)
        if not _is_test(paths.instructions[index]) and paths.instructions[index].opname != "UNARY_NOT":
            index += 1  # the instruction that takes the value
        found = _follow(paths, index, negated, frame)
        if isinstance(found, bool):
            return found
        if found is None:
            return None
        negated = found.negated
    return None


def answer_that_enters(frame: FrameType) -> bool | None:
    """Return the answer with which a `while` that tests a flag goes into its body, where it is entered at its test."""
    paths = paths_of(frame.f_code)
    index = paths.index_at(frame.f_lasti)
    if not _is_test(paths.instructions[index]) or "JUMP_BACKWARD" in paths.instructions[index].opname:
        return None
    return paths.enters_loop(index)


class _HandedOn:
    """A flag that the function returns to its caller."""

    def __init__(self, negated: bool) -> None:
        self.negated = negated


def _follow(paths: Paths, index: int, negated: bool, frame: FrameType) -> bool | _HandedOn | None:
    """Follow a flag from the instruction that takes it to the jump that tests it."""
    returns = _asker(paths, frame)
    for _ in range(_LONGEST_WALK):
        if index >= len(paths.instructions):
            return None
        instruction = paths.instructions[index]
        opname = instruction.opname
        if _is_test(instruction):
            found = paths.answer(index, returns)
            return None if found is None else found != negated
        if opname == "UNARY_NOT":
            negated = not negated
        elif opname in ("RETURN_VALUE", "YIELD_VALUE", "LIST_APPEND"):
            return _HandedOn(negated)
        elif opname.startswith("CALL"):
            if _called_name(paths, index) not in _PASS_A_FLAG_ON:
                return None
        elif opname.startswith("STORE_") and isinstance(instruction.argval, str):
            loaded = _next_load(paths, index)
            if loaded is None:
                return None
            index = loaded
        elif opname != "COPY":
            return None
        index += 1
    return None


def _is_test(instruction: dis.Instruction) -> bool:
    return "JUMP" in instruction.opname and instruction.opname.endswith(
        ("_IF_TRUE", "_IF_FALSE", "_IF_TRUE_OR_POP", "_IF_FALSE_OR_POP")
    )


def _next_load(paths: Paths, store: int) -> int | None:
    """Return where the variable that is stored here is used next, in the order of the code."""
    name = paths.instructions[store].argval
    for index in range(store + 1, len(paths.instructions)):
        instruction = paths.instructions[index]
        if instruction.argval == name and instruction.opname.startswith("STORE_"):
            return None
        if instruction.argval == name and instruction.opname.startswith("LOAD_"):
            return index
    return None


def _called_name(paths: Paths, call: int) -> str:
    """Return the name of the function of a call with one argument, if it is a plain name before the argument."""
    instruction = paths.instructions[call]
    if instruction.arg != 1:
        return ""
    for index in range(call - 1, max(call - 40, -1), -1):
        earlier = paths.instructions[index]
        if earlier.opname in ("LOAD_GLOBAL", "LOAD_NAME") and earlier.argval in _PASS_A_FLAG_ON:
            return str(earlier.argval)
    return ""


def _asker(paths: Paths, frame: FrameType) -> Continues:
    """Return the question whether a call returns, for the calls of this frame's code."""

    def returns(call: int) -> bool:
        after = paths.instructions[call + 1].opname if call + 1 < len(paths.instructions) else ""
        if after not in ("POP_TOP", "RETURN_VALUE"):
            return True  # its value is used
        return not _ends(_callee(paths, call, frame))

    return returns


def _callee(paths: Paths, call: int, frame: FrameType) -> Any:
    """Return the function that is called: a global, or an attribute of a local or global name."""
    names: list[str] = []
    start = max(call - 40, -1)
    # The call's own statement begins after the last instruction that leaves nothing on the stack.
    for index in range(call - 1, start, -1):
        opname = paths.instructions[index].opname
        if opname in ("POP_TOP", "RETURN_VALUE") or opname.startswith(("STORE_", "POP_JUMP", "JUMP_")):
            start = index
            break
    owner: Any = None
    for instruction in paths.instructions[start + 1 : call]:
        if instruction.opname in ("PUSH_NULL", "LOAD_ASSERTION_ERROR"):
            continue
        if not names and instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF"):
            names.append(str(instruction.argval))
            is_local = instruction.opname in ("LOAD_FAST", "LOAD_DEREF")
            owner = _local(frame, names[0]) if is_local else _global(frame, names[0])
        elif names and instruction.opname in ("LOAD_METHOD", "LOAD_ATTR") and isinstance(instruction.argval, str):
            names.append(instruction.argval)
            owner = getattr_static(owner, names[-1], None)  # calls nothing of the script's
        else:
            break
    if names and names[-1] in EXITS:
        return names[-1]
    return owner


def _local(frame: FrameType, name: str) -> Any:
    variables = frame.f_locals
    value = variables.get(name)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & CO_OPTIMIZED:
        # NOTE: the frame keeps this copy of its variables, and with it tensors that the script drops.
        variables.clear()
    return value


def _global(frame: FrameType, name: str) -> Any:
    return frame.f_globals.get(name, frame.f_builtins.get(name))


def _ends(function: Any) -> bool:
    """Whether a function never returns."""
    if isinstance(function, str):
        return True
    if isinstance(function, MethodType | staticmethod | classmethod):
        function = function.__func__
    if not isinstance(function, FunctionType):
        return False
    code = function.__code__
    if code.co_flags & 0x2A0:  # generators and coroutines return before they run
        return False
    paths = paths_of(code)

    def returns(call: int) -> bool:
        after = paths.instructions[call + 1].opname if call + 1 < len(paths.instructions) else ""
        if after not in ("POP_TOP", "RETURN_VALUE"):
            return True
        for index in range(call - 1, max(call - 12, -1), -1):
            if paths.instructions[index].argval in EXITS:
                return False
            if paths.instructions[index].opname == "POP_TOP":
                break
        return True

    return paths.always_raises(0, -1, returns)
