from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.hardware import find_gpu
from tonnage.roofline import Bound, Item, Work, catalogue_ceilings, judge
from tonnage.roofline.classes import NEAR

H200 = catalogue_ceilings(find_gpu("h200"))
BANDWIDTH, RATE = H200.memory_bytes_per_s, H200.rate("bf16")


def item(memory: float | None, compute: float | None, *, seconds: float = 1e-3, **more) -> Item:
    """One that reaches these shares of the two ceilings."""
    moved = None if memory is None else memory * seconds * BANDWIDTH
    operations = None if compute is None else compute * seconds * RATE
    return Item(name="kernel", seconds=seconds, work=Work(operations, moved, "bf16"), **more)


@pytest.mark.parametrize(
    ("asked", "bound", "because"),
    [
        (item(0.9, 0.1), Bound.MEMORY, "bytes"),
        (item(0.2, 0.8), Bound.COMPUTE, "operations"),
        (item(0.2, 0.1), Bound.LATENCY, "stalls"),
        (item(0.2, 0.1, blocks=8), Bound.LATENCY, "blocks"),
        (item(0.2, 0.1, seconds=3e-6), Bound.LATENCY, "launch"),
        (item(0.01, None, sm_share=0.9), Bound.COMPUTE, "pipes"),
        (item(0.5, 0.02, sm_share=0.7), Bound.COMPUTE, "pipes"),
        (item(None, 0.1, dram_share=0.8), Bound.MEMORY, "bytes"),
        (item(0.1, 0.1, on_chip_share=0.9), Bound.MEMORY, "caches"),
        (item(None, None), Bound.UNKNOWN, "unknown"),
        (item(None, None, seconds=1e-6), Bound.LATENCY, "launch"),
        (item(0.4, None), Bound.UNKNOWN, "unknown"),
        (item(0.7, None), Bound.MEMORY, "bytes"),
    ],
)
def test_classes(asked: Item, bound: Bound, because: str) -> None:
    verdict = judge(asked, H200)
    assert (verdict.bound, verdict.because) == (bound, because)


def test_a_busy_memory_pipe_does_not_make_a_matrix_product_memory_bound() -> None:
    """94 % of the memory pipe, 93 % of the SMs, 21 % of DRAM: what Nsight Compute says of a large product."""
    verdict = judge(item(0.21, None, sm_share=0.93, on_chip_share=0.94), H200)
    assert verdict.bound is Bound.COMPUTE and verdict.share == pytest.approx(0.93)


def test_parts_of_a_model_are_bound_by_what_takes_longer() -> None:
    moved, operations = 1e9, 1e9 * H200.ridge("bf16")
    part = Item(name="part", work=Work(operations * 0.9, moved, "bf16"))
    assert judge(part, H200).bound is Bound.MEMORY
    assert judge(replace(part, work=Work(operations * 1.1, moved, "bf16")), H200).bound is Bound.COMPUTE
    tiny = Item(name="part", launches=2, work=Work(10.0, 10.0))
    assert judge(tiny, H200).bound is Bound.LATENCY and judge(tiny, H200).bound_s == 2 * H200.kernel_floor_s


@pytest.mark.parametrize(
    ("link", "because"), [("HtoD (Pageable -> Device)", "pageable"), ("DtoH (Device -> Pinned)", "pinned")]
)
def test_copies_to_and_from_the_host_are_the_link_s(link: str, because: str) -> None:
    moved = H200.host_link_bytes_per_s / 4
    verdict = judge(Item(name="copy", seconds=1.0, work=Work(None, moved), link=link), H200)
    assert (verdict.bound, verdict.because, verdict.share) == (Bound.LINK, because, 0.25)


shares = st.one_of(st.none(), st.floats(0, 1.5))


@given(memory=shares, compute=shares, sm=shares, on_chip=shares, seconds=st.floats(1e-7, 10))
def test_a_verdict_holds_what_it_says(memory, compute, sm, on_chip, seconds) -> None:
    verdict = judge(item(memory, compute, seconds=seconds, sm_share=sm, on_chip_share=on_chip), H200)
    known = [share for share in (verdict.memory_share, verdict.compute_share) if share is not None]
    if verdict.bound in (Bound.MEMORY, Bound.COMPUTE) and verdict.because != "caches":
        assert verdict.share == max(known) >= NEAR
    if verdict.bound is Bound.LATENCY:
        assert max(known, default=0) < 0.6
    assert verdict.bound_s == pytest.approx(max(known, default=0) * seconds)


@given(factor=st.floats(0.01, 100))
def test_a_class_does_not_depend_on_the_size_of_the_work(factor: float) -> None:
    one = item(0.6, 0.5)
    work = Work(one.work.operations * factor, one.work.moved_bytes * factor, "bf16")
    assert judge(replace(one, seconds=one.seconds * factor, work=work), H200).bound is Bound.MEMORY


def test_a_part_that_waits_for_its_launch_does_not_claim_the_memory() -> None:
    verdict = judge(Item(name="part", launches=2, work=Work(10.0, 10.0)), H200)
    assert verdict.bound is Bound.LATENCY
    assert verdict.memory_share is not None and verdict.memory_share < NEAR
