"""A captured step on a card: which calls launch something, and how long it takes."""

from dataclasses import replace

import pytest

from tonnage.clock import kernels
from tonnage.clock.captured import CapturedCall, CapturedStep
from tonnage.clock.launch import Launch
from tonnage.clock.step import WAITING, launches_of, reads_back, settings_of, step_time
from tonnage.hardware import find_gpu

H200, A100, T4 = find_gpu("h200"), find_gpu("a100-80"), find_gpu("t4")
FLOAT, HALF = "float", "c10::BFloat16"


def call(name: str, *shapes: tuple[int, ...], types: str = HALF, device: str = "cuda") -> CapturedCall:
    return CapturedCall(name=name, shapes=shapes, types=(types,) * len(shapes), devices=(device,) * len(shapes))


def step(*calls: CapturedCall, depths: tuple[int, ...] = (), times: int = 1) -> CapturedStep:
    count = len(calls)
    return CapturedStep(
        number=2, training=True, calls=calls, sequence=tuple(range(count)) * times, depths=(depths or (0,) * count) * times,
        threads=(0,) * count * times, phases=((0, "forward"),), module_calls=1, optimizer_parameters=0, samples=4,
        tokens=4096, settings={"matmul_tf32": "False", "cudnn_tf32": "True"},
    )  # fmt: skip


PRODUCT = call("mm", (4096, 4096), (4096, 4096))


def launched(captured: CapturedStep) -> list[str]:
    return [moment.call.name for moment, launch in launches_of(captured, settings_of(captured)) if launch is not None]


def test_views_launch_nothing_and_what_stays_on_the_host_neither() -> None:
    on_host = call("mm", (8, 8), (8, 8), device="cpu")
    assert launched(step(call("transpose", (8, 8)), on_host, PRODUCT)) == ["mm"]


def test_autocast_calls_an_operator_again_and_the_inner_one_counts() -> None:
    wide = call("mm", (4096, 4096), (4096, 4096), types=FLOAT)
    (_, outer), (_, inner) = launches_of(step(wide, PRODUCT, depths=(0, 1)), settings_of(step(wide)))
    assert outer is None
    assert inner is not None
    assert inner.precision == "bf16"


@pytest.mark.parametrize("inner", [True, False])
def test_an_operator_that_stands_for_others_counts_where_nothing_inside_was_recorded(inner: bool) -> None:
    relu, clamp = call("relu", (1024, 1024)), call("clamp_min", (1024, 1024))
    found = launched(step(relu, clamp, depths=(0, 1)) if inner else step(relu))
    assert found == (["clamp_min"] if inner else ["relu"])


def test_attention_counts_beside_what_it_fills() -> None:
    around = call("_scaled_dot_product_efficient_attention_backward", *[(2, 8, 512, 64)] * 4)
    kernel = call("_efficient_attention_backward", *[(2, 512, 8, 64)] * 4)
    fill = call("zero_", (2, 8, 512, 64))
    assert launched(step(around, fill, depths=(0, 1))) == [around.name, "zero_"]
    assert launched(step(around, kernel, depths=(0, 1))) == [kernel.name]


def test_an_operator_that_nobody_knows_is_counted_by_its_bytes() -> None:
    (_, launch), = launches_of(step(call("mylib::twist", (4096, 4096))), settings_of(step(PRODUCT)))  # fmt: skip
    assert isinstance(launch, Launch)
    assert launch.kind == "elementwise"


def test_a_call_that_is_made_again_and_again_is_costed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    plain = kernels.seconds
    monkeypatch.setattr(kernels, "seconds", lambda launch, gpu: asked.append(launch.name) or plain(launch, gpu))
    once, often = step_time(step(PRODUCT), H200), step_time(step(PRODUCT, times=50), H200)
    assert len(asked) == 2
    assert len(often.timeline.spans) == 50 * len(once.timeline.spans)


def test_large_products_run_at_a_good_share_of_the_peak_and_hide_the_host() -> None:
    found = step_time(step(PRODUCT, times=50), H200)
    assert found.share_of_peak is not None
    assert 0.4 < found.share_of_peak < 0.95
    assert found.time_by_kind[WAITING] < 0.2 * found.step_s


def test_small_operators_wait_for_the_host() -> None:
    found = step_time(step(call("add", (16, 16), (16, 16)), times=200), H200)
    assert found.time_by_kind[WAITING] > 0.8 * found.step_s


def test_a_range_holds_its_time_and_is_wider_where_nothing_was_measured() -> None:
    many = step(PRODUCT, times=50)
    ours, other = step_time(many, H200), step_time(many, A100)
    for found in (ours, other):
        assert found.low_s < found.step_s < found.high_s
    assert other.high_s / other.low_s > ours.high_s / ours.low_s


def test_a_slower_card_takes_longer() -> None:
    many = step(PRODUCT, call("add", (8192, 8192), (8192, 8192)), times=20)
    times = [step_time(many, card).step_s for card in (H200, A100, T4)]
    assert times == sorted(times)


def test_reading_a_value_back_makes_the_host_wait() -> None:
    assert reads_back(call("_local_scalar_dense", ()))
    to_host = replace(call("copy_", (8,), (8,)), devices=("cpu", "cuda"))
    assert reads_back(to_host)
    assert reads_back(replace(to_host, devices=("cuda", "cpu")))
    assert not reads_back(call("copy_", (8,), (8,)))  # within the card
    waiting = [PRODUCT, call("_local_scalar_dense", ())]
    assert step_time(step(*waiting, times=3), H200).step_s > step_time(step(PRODUCT, times=3), H200).step_s


def test_what_comes_from_the_host_takes_the_link_s_time() -> None:
    batch = (64 << 20,)
    within = call("copy_", batch, batch, types=FLOAT)
    pageable = replace(within, devices=("cuda", "cpu"))
    pinned = replace(pageable, devices=("cuda", "pinned"))
    on_card_s, pinned_s, pageable_s = (step_time(step(one), H200).step_s for one in (within, pinned, pageable))
    assert on_card_s < pinned_s / 10
    assert pinned_s < pageable_s


def test_a_copy_is_waited_for_unless_it_need_not_be_and_its_memory_is_pinned() -> None:
    copy = replace(call("copy_", (8,), (8,)), devices=("cuda", "pinned"))
    unwaited = replace(copy, shapes=((8,), (8,), ()), types=(HALF, HALF, "Scalar"), values=("", "", "True"))
    assert reads_back(copy)
    assert not reads_back(unwaited)
    assert reads_back(replace(unwaited, devices=("cuda", "cpu")))


def test_rows_that_are_taken_by_index_are_as_many_as_their_gradients() -> None:
    taken = replace(call("index", (1000, 256), ()), types=(HALF, ""), devices=("cuda", ""))
    gradient = call("_index_put_impl_", (1000, 256), (), (50_000, 256))
    moved = [
        next(launch for moment, launch in launches_of(captured, settings_of(captured)) if moment.call is taken)
        for captured in (step(taken), step(taken, gradient))
    ]
    assert moved[0] is not None
    assert moved[1] is not None
    assert moved[1].moved_bytes > 10 * moved[0].moved_bytes
