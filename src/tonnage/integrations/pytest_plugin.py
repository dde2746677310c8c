"""`@pytest.mark.gpu_memory(limit="2 GiB")`: fails a test that needs more GPU memory, and reports where it went.

On a machine with a GPU it is measured there; elsewhere, as in CI, the test runs on a virtual one. Pytest loads this
module in every run, so it imports neither Tonnage nor torch until a test has a limit.
"""

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tonnage.integrations.gate import MemoryGate

_MARK = "gpu_memory"
_MARK_WORDS = (
    "gpu_memory(limit, card=None): fail where the test needs more GPU memory than limit, such as '2 GiB'; "
    "without a GPU it runs on a virtual card"
)
_CARD = "h200"
_GATE = pytest.StashKey["MemoryGate"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two options."""
    group = parser.getgroup("gpu memory (tonnage)")
    group.addoption(
        "--gpu-memory-fail-above",
        metavar="SIZE",
        help="hold every test without a gpu_memory mark to this limit, such as 2GiB",
    )
    group.addoption(
        "--gpu-memory-card",
        metavar="NAME",
        help="the virtual card where there is no GPU (default: h200); a CUDA build of torch needs it here, beforehand",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark, and reject invalid sizes and names before any test runs."""
    config.addinivalue_line("markers", _MARK_WORDS)
    above, card = config.getoption("--gpu-memory-fail-above"), config.getoption("--gpu-memory-card")
    if above is None and card is None:
        return
    from tonnage.errors import RequestError
    from tonnage.hardware import find_cuda_gpu
    from tonnage.units import parse_bytes

    try:
        if above is not None:
            parse_bytes(above)
        gpu = find_cuda_gpu(card or _CARD)
    except RequestError as error:
        raise pytest.UsageError(error.words) from None
    from tonnage.integrations.meter import expect_virtual

    expect_virtual(gpu)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start measuring before the fixtures, so that their allocations count."""
    limit, card = _asked(item)
    if limit is not None:
        item.stash[_GATE] = _open(item, limit, card)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Check the limit after the test."""
    gate = item.stash.get(_GATE, None)
    if gate is None:
        return (yield)
    try:
        result = yield
    except BaseException as error:
        # A test that ran out of memory keeps its own error; the report is added as a section.
        from tonnage.integrations.gate import is_out_of_memory

        if is_out_of_memory(error):
            item.add_report_section("call", "GPU memory", gate.words(error))
        raise
    item.user_properties.append(("gpu_memory_bytes", gate.needed_bytes))
    if not gate.is_passed:
        pytest.fail(gate.words(), pytrace=False)
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Stop measuring after the fixtures are torn down."""
    try:
        return (yield)
    finally:
        gate = item.stash.get(_GATE, None)
        if gate is not None:
            del item.stash[_GATE]
            gate.close()


def _asked(item: pytest.Item) -> tuple[str | None, str]:
    """Return the limit and the card, from the nearest mark or else the options."""
    card: str = item.config.getoption("--gpu-memory-card") or _CARD
    mark = item.get_closest_marker(_MARK)
    if mark is None:
        return item.config.getoption("--gpu-memory-fail-above"), card
    return _limit_of(*mark.args, default_card=card, **mark.kwargs)


def _limit_of(limit: str | int, *, card: str | None = None, default_card: str) -> tuple[str, str]:
    return str(limit), card or default_card


def _open(item: pytest.Item, limit: str, card: str) -> "MemoryGate":
    from tonnage.errors import TonnageError
    from tonnage.integrations.gate import MemoryGate
    from tonnage.integrations.meter import meter
    from tonnage.units import parse_bytes

    try:
        return MemoryGate(meter(card), parse_bytes(limit), item.path)
    except TonnageError as error:
        words = error.words
    pytest.fail(f"{_MARK}: {words}", pytrace=False)
