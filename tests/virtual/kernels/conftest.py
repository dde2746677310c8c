"""What an operator allocates and frees, as text that a measured row can be compared with."""

from collections.abc import Callable
from typing import Any

import pytest

from tonnage.virtual.modelled import ModelledSession as Session

Events = Callable[[Callable[[], Any]], str]


@pytest.fixture
def events(gpu: Session) -> Events:
    """Runs a call and tells its allocations ("+bytes") and frees ("-place in the list of allocations") in order."""

    def record(call: Callable[[], Any]) -> str:
        first = len(gpu.device.allocations)
        result = call()
        now = gpu.device.sequence
        made = gpu.device.allocations[first:]
        rows = [(a.born, f"+{a.requested_bytes}") for a in made]
        rows += [(a.died, f"-{place}") for place, a in enumerate(made) if a.died and a.died <= now]
        del result
        return " ".join(text for _, text in sorted(rows))

    return record
