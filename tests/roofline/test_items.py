import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.clock.operators import Work
from tonnage.roofline.items import Activity, Item, gathered, short_kernel_name, timeline_of


def kernel(name: str = "add", seconds: float = 1.0, **more) -> Item:
    return Item(name=name, seconds=seconds, work=Work(10.0, 100.0), **more)


def test_like_items_are_one() -> None:
    first, second = gathered([kernel(), kernel("mul"), kernel(seconds=3.0)])
    assert (first.name, first.calls, first.launches, first.seconds) == ("add", 2, 2, 4.0)
    assert first.work == Work(20.0, 200.0)
    assert second.calls == 1


def test_grids_of_another_size_are_another_item() -> None:
    assert len(gathered([kernel(blocks=1), kernel(blocks=262144)])) == 2


def test_shares_are_weighted_by_time() -> None:
    (item,) = gathered([kernel(seconds=1.0, sm_share=0.2), kernel(seconds=3.0, sm_share=0.6)])
    assert item.sm_share == pytest.approx(0.5)


def test_what_is_not_known_of_one_is_not_known_of_the_sum() -> None:
    unknown = Item(name="add", seconds=1.0, work=Work(None, None))
    (item,) = gathered([kernel(), unknown])
    assert item.work.operations is None and item.work.intensity is None


def test_intensity() -> None:
    assert Work(10.0, 100.0).intensity == 0.1
    assert Work(0.0, 100.0).intensity is None


def test_nothing_ran() -> None:
    assert timeline_of([]) is None


def test_a_gap_is_the_host_s_until_the_launch() -> None:
    line = timeline_of([Activity(0.0, 1.0, -0.1), Activity(4.0, 5.0, 3.0)])
    assert (line.span_s, line.busy_s, line.host_s, line.queue_s) == (5.0, 2.0, 2.0, 1.0)


def test_a_kernel_that_waited_in_the_queue_waited_for_nobody() -> None:
    line = timeline_of([Activity(0.0, 1.0, 0.0), Activity(1.5, 2.0, 0.5)])
    assert (line.host_s, line.queue_s) == (0.0, 0.5)


def test_streams_that_overlap_are_busy_once() -> None:
    line = timeline_of([Activity(0.0, 4.0), Activity(1.0, 2.0), Activity(3.0, 6.0)])
    assert (line.busy_s, line.span_s, line.launches) == (6.0, 6.0, 3)


activities = st.builds(
    lambda start, length, lead: Activity(start, start + length, start - lead),
    st.floats(0, 100),
    st.floats(0, 10),
    st.floats(0, 5),
)


@given(st.lists(activities, min_size=1))
def test_busy_and_idle_make_the_span(ran: list[Activity]) -> None:
    line = timeline_of(ran)
    assert line.busy_s + line.host_s + line.queue_s == pytest.approx(line.span_s, abs=1e-6)
    assert min(line.busy_s, line.host_s, line.queue_s) >= 0


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_NNT", "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_NNT"),
        ("void at::vectorized_elementwise_kernel<4, at::CUDAFunctorOnSelf_add<float>>(int, T2)", "elementwise add"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, 0>(int)", "layer_norm"),
        ("void at::<unnamed>::cunn_SoftMaxForwardReg<float, long, 4>(T3 *)", "cunn_SoftMaxForwardReg"),
        ("void reduce_kernel<512, 1, ReduceOp<float, func_wrapper_t<float, sum_functor<float>>>>(T3)", "reduce sum"),
        ("void k<4, at::native::AUnaryFunctor<float, binary_internal::MulFunctor<float>>>()", "k Mul"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(x)>()", "elementwise Gelu"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("kernel", "kernel"),
        ("", ""),
    ],
)
def test_short_names(name: str, short: str) -> None:
    assert short_kernel_name(name) == short
