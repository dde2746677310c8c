"""Functions that are replaced for a while."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

from tonnage.script.wrapping import wrap


def test_a_function_is_replaced_until_it_is_undone() -> None:
    def double(number: int) -> int:
        """Return twice the number."""
        return 2 * number

    def around(plain: Any, /, *arguments: int) -> int:
        return -int(plain(*arguments))

    library = SimpleNamespace(double=double)
    with ExitStack() as undo:
        wrap(undo, library, "double", around)
        assert library.double(3) == -6
        assert library.double.__doc__ == double.__doc__
        wrap(undo, library, "double", around)
        assert library.double(3) == 6
    assert library.double is double
