"""Programs that ask a flag, to raise by it or not. They are in no test's module, because pytest rewrites assertions there."""

import sys
from typing import Any


def raises_unless(flag: Any) -> None:
    if not flag.all():
        raise ValueError("support")


def asserts(flag: Any) -> None:
    assert flag.all(), "degenerate box"


def asserts_not(flag: Any) -> None:
    assert not flag


def raises_if_either(flag: Any) -> int:
    if flag or flag:
        raise ValueError("one of them")
    return 1


def asserts_both(flag: Any) -> None:
    assert flag and flag


def returns_early(flag: Any) -> None:
    if flag:
        return
    message = "the tensors differ"
    raise ValueError(message)


def in_a_loop(flag: Any) -> int:
    total = 0
    for index in range(3):
        if not flag:
            raise ValueError("of this one")
        total += index
    return total


def by_a_name(flag: Any) -> None:
    is_valid = bool(flag)
    total = 3
    if not is_valid:
        raise ValueError(f"{total} are not valid")


def _is_valid(flag: Any) -> bool:
    return not flag.item()


def by_a_function(flag: Any) -> None:
    if _is_valid(flag):
        raise ValueError("valid")


def exits(flag: Any) -> None:
    if flag:
        print("diverged")
        sys.exit(1)


def _fail(message: str) -> None:
    raise ValueError(message)


def fails_by_a_function(flag: Any) -> None:
    if not flag:
        _fail("not valid")


def of_any(flag: Any) -> None:
    if any(each.item() for each in [flag]):
        raise ValueError("one of many")


def of_all(flag: Any) -> None:
    if not all(each.item() for each in [flag]):
        raise ValueError("not all")


def chooses(flag: Any) -> int:
    if flag:
        return 1
    return 2


def skips(flag: Any) -> None:
    for _ in range(2):
        if flag:
            continue


def waits(flag: Any) -> None:
    while flag:
        pass


def raises_anyway(flag: Any) -> None:
    if flag:
        raise ValueError("one")
    raise ValueError("other")


def may_raise_later(flag: Any) -> None:
    if flag:
        print("a warning")
    if len(sys.argv) > 1000:
        raise ValueError


def keeps(flag: Any) -> list[bool]:
    return [bool(flag), True]


def rounds_of(flag: Any) -> int:
    rounds = 0
    for _ in range(3):
        while flag:
            rounds += 1
    return rounds
