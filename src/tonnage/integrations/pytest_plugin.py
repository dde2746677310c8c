"""`@pytest.mark.gpu_memory(limit="2 GiB")`: fails a test that needs more GPU memory, and reports where it went.

On a machine with a GPU it is measured there; elsewhere, as in CI, the test runs on a virtual one. Pytest loads this
module in every run, so it imports neither Tonnage nor torch until a test has a limit.
"""

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tonnage.integrations.meter import MemoryGate

_MARK = "gpu_memory"
_MARK_WORDS = (
    "gpu_memory(limit, card=None): fail where the test needs more GPU memory than limit, such as '2 GiB'; "
    "without a GPU it runs on a virtual card"
)
_CARD = "h200"
_GATE: "pytest.StashKey[MemoryGate]" = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
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
    card: str = item.config.getoption("--gpu-memory-card") or _CARD
    mark = item.get_closest_marker(_MARK)
    limit = item.config.getoption("--gpu-memory-fail-above")
    if mark is None and limit is None:
        return
    from tonnage.errors import TonnageError

    try:
        if mark is not None:  # the nearest mark comes before the options
            limit, marked_card = _settings_of(mark)
            card = marked_card or card
        from tonnage.integrations.meter import MemoryGate, VirtualMeter, meter
        from tonnage.units import parse_bytes

        opened = MemoryGate(meter(card), parse_bytes(limit), item.path)
        if isinstance(opened.meter, VirtualMeter):
            # Pytest manages its own temporary folders, and later tests use them too.
            opened.meter.redirection.write_through(item.config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]
        opened.meter.open()
    except TonnageError as error:
        words = error.words
    else:
        item.stash[_GATE] = opened
        return
    pytest.fail(f"{_MARK}: {words}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Check the limit after the test."""
    gate = item.stash.get(_GATE, None)
    if gate is None:
        return (yield)
    try:
        result = yield
    except BaseException as error:
        # A test that ran out of memory keeps its own error; the report is added as a section. The error is known by its
        # name, because a test without torch should not import it.
        if type(error).__name__ == "OutOfMemoryError":
            item.add_report_section("call", "GPU memory", gate.words(error))
        elif words := gate.meter.dependence(error):
            item.add_report_section("call", "values of the virtual GPU", words)
        raise
    item.user_properties.append(("gpu_memory_bytes", gate.meter.peak_bytes()))
    if gate.meter.peak_bytes() > gate.limit_bytes:
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
            gate.meter.close()


def _settings_of(mark: pytest.Mark) -> tuple[str, str | None]:
    """Return the limit of a mark, and its card if it names one; raises RequestError if it is written wrongly."""
    from tonnage.errors import RequestError

    written = [*map(repr, mark.args), *(f"{name}={value!r}" for name, value in mark.kwargs.items())]
    call = f"@pytest.mark.{_MARK}({', '.join(written)})"
    unknown = [name for name in mark.kwargs if name not in ("limit", "card")]
    limits = [*mark.args, *(mark.kwargs[name] for name in mark.kwargs if name == "limit")]
    if unknown:
        problem = f"{call} has {unknown[0]}=, which the mark does not take."
    elif not limits:
        problem = f"{call} has no limit."
    elif len(limits) > 1:
        problem = f"{call} has {len(limits)} limits; the card is given by name."
    elif isinstance(limits[0], bool) or not isinstance(limits[0], str | int):
        problem = f"{call} has a limit that is neither a size nor a number of bytes."
    elif not isinstance(mark.kwargs.get("card"), str | None):
        problem = f"{call} has a card that is no name."
    else:
        return str(limits[0]), mark.kwargs.get("card")
    raise RequestError(problem, hint=f'Write it like @pytest.mark.{_MARK}(limit="2 GiB", card="t4").')
