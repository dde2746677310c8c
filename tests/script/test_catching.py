"""Each function leads to `probe`, which asks whether an error raised there would be caught on the way out."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tonnage.script.catching import is_caught, stacks


class Shortage(RuntimeError):
    pass


def probe() -> bool:
    frames = []
    for frame in stacks(sys._getframe(), threading.get_ident()):
        if frame.f_code is ask.__code__:
            break
        frames.append(frame)
    return is_caught(Shortage, frames)


def ask(function: Callable[[], bool]) -> bool:
    return function()


def plain() -> bool:
    return probe()


def by_its_type() -> bool:
    try:
        return probe()
    except Shortage:
        return False


def by_a_wider_type_among_several() -> bool:
    try:
        return probe()
    except (KeyError, RuntimeError) as error:
        print(error)
    return False


def by_anything() -> bool:
    try:
        return probe()
    except:  # noqa: E722
        return False


def where_it_depends() -> bool:
    try:
        return probe()
    except Exception as error:
        if "out of memory" in str(error):
            return False
        raise


def by_a_name_that_is_not_known() -> bool:
    try:
        return probe()
    except globals()["Shortage"]:
        return False


def suppressed() -> bool:
    with contextlib.suppress(Shortage):
        return probe()
    return False


@contextlib.contextmanager
def tolerant() -> Iterator[None]:
    try:
        yield
    except RuntimeError:
        print("never mind")


def in_a_tolerant_block() -> bool:
    with tolerant():
        return probe()
    return False


def raised_as_another_that_is_caught() -> bool:
    try:
        try:
            return probe()
        except RuntimeError as error:
            raise ValueError("too large") from error
    except ValueError:
        return False


CATCH = [
    by_its_type,
    by_a_wider_type_among_several,
    by_anything,
    where_it_depends,
    by_a_name_that_is_not_known,
    suppressed,
    in_a_tolerant_block,
    raised_as_another_that_is_caught,
]


def by_another_type() -> bool:
    try:
        return probe()
    except (KeyError, ValueError):
        return False


def always_again() -> bool:
    try:
        return probe()
    except Exception as error:
        for number in range(3):
            if number:
                continue
        print(error)
        raise


def as_another() -> bool:
    try:
        return probe()
    except Exception as error:
        raise ValueError("too large") from error


def exits() -> bool:
    try:
        return probe()
    except Exception as error:
        print(error)
        sys.exit(1)


def finally_cleans_up() -> bool:
    try:
        return probe()
    finally:
        print("clean")


@contextlib.contextmanager
def timed() -> Iterator[None]:
    try:
        yield
    finally:
        print("took a while")


def in_a_timed_block() -> bool:
    with timed(), open(__file__):
        return probe()


def in_a_handler() -> bool:
    try:
        raise KeyError
    except KeyError:
        return probe()


def in_a_function_made_in_a_try() -> bool:
    try:

        def inner() -> bool:
            return probe()

    except RuntimeError:
        return False
    return inner()


def in_a_case() -> bool:
    match 1:
        case 1:
            try:
                return probe()
            except ValueError:
                return False
    return False


PASS_ON = [
    plain,
    by_another_type,
    always_again,
    as_another,
    exits,
    finally_cleans_up,
    in_a_timed_block,
    in_a_handler,
    in_a_function_made_in_a_try,
    in_a_case,
]


@pytest.mark.parametrize("function", CATCH, ids=lambda function: function.__name__)
def test_what_catches_it_is_seen(function: Callable[[], bool]) -> None:
    assert ask(function)


@pytest.mark.parametrize("function", PASS_ON, ids=lambda function: function.__name__)
def test_what_lets_it_pass_is_none(function: Callable[[], bool]) -> None:
    assert not ask(function)


def test_a_future_keeps_the_error_for_who_asks() -> None:
    with ThreadPoolExecutor(1) as pool:
        frames = pool.submit(lambda: list(stacks(sys._getframe(), 0))).result()
        assert is_caught(Shortage, frames)


def test_code_without_source_is_taken_to_catch_nothing() -> None:
    names: dict = {"probe": probe}
    exec("def made():\n  try:\n    return probe()\n  except Exception:\n    return 0", names)
    assert not ask(names["made"])
