"""The answer that keeps a program from raising, read from the frames that ask."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

import flag_programs
from tonnage.script.code_paths import answer_without_error

FRAMES: list[bool | None] = []


class Flag:
    """A flag whose value is asked for, as of a tensor on the virtual GPU."""

    def __bool__(self) -> bool:
        frames = []
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_name != "answer_to":
            frames.append(frame)
            frame = frame.f_back  # type: ignore[assignment]
        FRAMES.append(answer_without_error(frames))
        return bool(FRAMES[-1])

    def item(self) -> bool:
        return bool(self)

    def all(self) -> "Flag":
        return self


def answer_to(function: Callable[[Any], object]) -> bool | None:
    """The answer that the first question of the function gets."""
    FRAMES.clear()
    try:
        function(Flag())
    except (ValueError, AssertionError, SystemExit):
        pass
    return FRAMES[0]


@pytest.mark.parametrize(
    ("function", "answer"),
    [
        (flag_programs.raises_unless, True), (flag_programs.asserts, True), (flag_programs.asserts_not, False), (flag_programs.raises_if_either, False), (flag_programs.asserts_both, True),
        (flag_programs.returns_early, True), (flag_programs.in_a_loop, True), (flag_programs.by_a_name, True), (flag_programs.by_a_function, True), (flag_programs.exits, False),
        (flag_programs.fails_by_a_function, True), (flag_programs.of_any, False), (flag_programs.of_all, True),
    ],
)  # fmt: skip
def test_the_answer_is_the_one_that_does_not_raise(function: Callable[[Any], object], answer: bool) -> None:
    assert answer_to(function) is answer
    FRAMES.clear()
    function(Flag())  # raises nothing: every question got such an answer


@pytest.mark.parametrize(
    "function",
    [
        flag_programs.chooses,
        flag_programs.skips,
        flag_programs.waits,
        flag_programs.raises_anyway,
        flag_programs.may_raise_later,
        flag_programs.keeps,
    ],
)
def test_a_flag_that_decides_something_else_has_no_such_answer(function: Callable[[Any], object]) -> None:
    assert answer_to(function) is None
