"""The answer that keeps a program from raising, read from the frames that ask."""

import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import flag_programs
from tonnage.script.code_paths import answer_that_enters, answer_without_error

FRAMES: list[bool | None] = []


class Flag:
    """A flag whose value is asked for, as of a tensor on the virtual GPU."""

    def __bool__(self) -> bool:
        frames = []
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_name != "answer_to" and len(frames) < 20:
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
    with suppress(ValueError, AssertionError, SystemExit):
        function(Flag())
    return FRAMES[0]


RAISES_WITHOUT = {
    True: "raises_unless asserts asserts_both returns_early in_a_loop by_a_name by_a_function fails_by_a_function of_all",
    False: "asserts_not raises_if_either exits of_any",
}


@pytest.mark.parametrize(
    ("name", "answer"), [(name, answer) for answer, names in RAISES_WITHOUT.items() for name in names.split()]
)
def test_the_answer_is_the_one_that_does_not_raise(name: str, answer: bool) -> None:
    function = getattr(flag_programs, name)
    assert answer_to(function) is answer
    FRAMES.clear()
    function(Flag())  # raises nothing: every question got such an answer


@pytest.mark.parametrize("name", "chooses skips waits raises_anyway may_raise_later keeps".split())
def test_a_flag_that_decides_something_else_has_no_such_answer(name: str) -> None:
    assert answer_to(getattr(flag_programs, name)) is None


class Waited:
    """A flag of a `while`: it counts the rounds, and enters where the code says that it does."""

    def __init__(self) -> None:
        self.answers: list[bool | None] = []

    def __bool__(self) -> bool:
        self.answers.append(answer_that_enters(sys._getframe(1)))
        return self.answers[-1] is True


def test_a_while_is_entered_once() -> None:
    flag = Waited()
    assert flag_programs.rounds_of(flag) == 3
    assert flag.answers[::2] == [True, True, True]


@pytest.mark.parametrize("name", ["chooses", "raises_if_either", "asserts_both", "skips"])
def test_other_tests_enter_no_loop(name: str) -> None:
    flag = Waited()
    with suppress(ValueError, AssertionError):
        getattr(flag_programs, name)(flag)
    assert flag.answers and True not in flag.answers


class Checker:
    """A class whose method raises, and that refers to something that must not be kept."""

    def fail(self) -> None:
        raise ValueError

    def check(self, flag: object) -> object:
        held = Held()
        if not flag:
            self.fail()
        gone = weakref.ref(held)
        del held
        return gone()


class Held:
    """Something that a function drops."""


def test_asking_keeps_nothing_of_what_a_function_drops() -> None:
    flag = Flag()
    FRAMES.clear()
    assert Checker().check(flag) is None
    assert FRAMES == [True]
