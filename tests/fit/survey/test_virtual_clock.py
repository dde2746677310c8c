"""Seconds on a card that is not there."""

from collections.abc import Iterator

import pytest

from tonnage.errors import RequestError
from tonnage.fit.survey.virtual_clock import adding_bytes_per_s, clocked, link_bytes_per_s
from tonnage.hardware import find_gpu
from tonnage.virtual.builds import new_session

torch = pytest.importorskip("torch")
if torch.version.cuda:
    pytest.skip("for the virtual GPU of a CPU build", allow_module_level=True)
H200, T4 = find_gpu("h200"), find_gpu("t4")


@pytest.fixture
def card() -> Iterator[None]:
    session = new_session(H200, "2.11")
    session.open(capture=True)
    yield
    session.close()


@pytest.mark.usefixtures("card")
def test_a_large_product_is_the_card_s_and_a_small_one_the_host_s() -> None:
    large = torch.empty(8192, 8192, device="cuda", dtype=torch.bfloat16)
    small = torch.empty(16, 16, device="cuda")
    card_s, host_s = clocked(lambda: large @ large, H200)
    assert 1.1e-3 < card_s < 2.5e-3 and host_s < card_s
    card_s, host_s = clocked(lambda: small @ small, H200)
    assert card_s < host_s


@pytest.mark.usefixtures("card")
def test_a_slower_card_takes_longer_and_its_host_no_longer() -> None:
    half = torch.empty(4096, 4096, device="cuda", dtype=torch.float16)
    (ours, host_s), (other, same) = (clocked(lambda: half @ half, gpu) for gpu in (H200, T4))
    assert other > 5 * ours
    assert same == pytest.approx(host_s, rel=0.1)


@pytest.mark.usefixtures("card")
def test_who_profiles_already_is_told() -> None:
    with torch.profiler.profile(), pytest.raises(RequestError, match="profiler"):
        clocked(lambda: None, H200)


def test_rates_are_shares_of_what_the_card_has() -> None:
    assert 0.7 < adding_bytes_per_s(H200) / H200.bandwidth_bytes_per_s < 1
    assert 0.7 < link_bytes_per_s(H200) / H200.pcie_bytes_per_s < 1
