"""A virtual H200 for the tests, modelled as torch 2.11: the version that the measurements were taken with."""

from collections.abc import Iterator

import pytest

from tonnage.hardware import find_gpu
from tonnage.virtual.session import Session


@pytest.fixture(scope="module")
def gpu() -> Iterator[Session]:
    """One open virtual GPU for all tests of a module."""
    session = Session(find_gpu("h200"), "2.11")
    session.open()
    yield session
    session.close()
