"""Every planted bug is caught, and by what it does: not because the real code has changed its names."""

import pytest

from serve.simulation.bugs import BUGS, first_failure


@pytest.mark.parametrize("name", BUGS)
def test_bug_is_caught(name: str) -> None:
    failure = first_failure(name)
    assert failure is not None, f"no seed shows it: {BUGS[name].__doc__}"
    assert not isinstance(failure.__cause__, (AttributeError, TypeError)), str(failure)


@pytest.mark.parametrize("name", BUGS)
def test_bug_replaces_what_exists(name: str) -> None:
    bug = BUGS[name]
    methods = {name for name, value in vars(bug).items() if callable(value)} - {"also", "_weak"}
    assert methods and methods <= set(dir(bug.__base__))
