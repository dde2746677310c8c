"""A virtual H200 for the tests, modelled as torch 2.11: the version that the measurements were taken with."""

from collections.abc import Iterator

import pytest

from tonnage.hardware import find_gpu
from tonnage.virtual.builds import new_session
from tonnage.virtual.modelled import ModelledSession as Session


@pytest.fixture(scope="module")
def gpu() -> Iterator[Session]:
    """One open virtual GPU for all tests of a module."""
    session = new_session(find_gpu("h200"), "2.11")
    session.open()
    yield session
    session.close()
