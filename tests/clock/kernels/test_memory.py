import pytest

from clock.kernels.calls import BF16, FP32, H200, SETTINGS, call, with_bandwidth
from tonnage.clock.kernels import copies, elementwise, fused, indexing, memory, optimizers, reductions, rows
from tonnage.clock.launch import Launch

ROWS = [1, 16, 128, 1024, 8192, 65536, 262144]


def of_rows(count: int) -> list[Launch]:
    """A launch of every kind over so many rows."""
    x, wide, column, weight = ((count, 1024), BF16), ((count, 1024), FP32), ((count, 1), BF16), ((1024,), BF16)
    index = ((count,), "long int")
    calls = [
        (elementwise, call("add", x, x)), (elementwise, call("mul", x, column)), (elementwise, call("gelu", x)),
        (copies, call("copy_", x, wide)), (copies, call("copy_", wide, x)), (elementwise, call("fill_", x)),
        (elementwise, call("native_dropout", x)), (reductions, call("sum", x, "[-1]", "")), (reductions, call("sum", x)),
        (rows, call("native_layer_norm", x, "", weight, weight)), (rows, call("_softmax", x, "-1", "False")),
        (rows, call("native_layer_norm_backward", x, x, "", column, column, weight, weight)),
        (indexing, call("gather", ((50000, 1024), BF16), "", ((count, 1024), "long int"), "", x)),
        (indexing, call("index_add", ((50000, 1024), BF16), "0", index, x)), (indexing, call("sort", x)),
        (optimizers, call("_fused_adamw_", *[(((count, 1024),), BF16)] * 4)),
    ]  # fmt: skip
    made = [module.OPERATORS[one.name](one, SETTINGS) for module, one in calls]
    return [*made, fused.fused(call("triton_poi_fused_add_0", x, x, x), SETTINGS)]


def seconds(launch: Launch, gpu=H200) -> float:
    module = {"elementwise": elementwise, "copy": copies, "reduction": reductions, "norm": rows, "indexing": indexing}
    module |= {"sorting": indexing, "optimizer": optimizers, "fused": fused}
    return module[launch.kind].seconds(launch, gpu)


def test_more_rows_never_take_less_time() -> None:
    for sizes in zip(*map(of_rows, ROWS), strict=True):
        times = [seconds(launch) for launch in sizes]
        assert times == sorted(times), sizes[0].name


@pytest.mark.parametrize("count", ROWS)
def test_twice_the_bandwidth_is_never_slower(count: int) -> None:
    for launch in of_rows(count):
        assert seconds(launch, with_bandwidth(H200, 2)) <= seconds(launch), launch.name


def test_no_kernel_is_faster_than_a_launch_and_large_ones_follow_the_bandwidth() -> None:
    small, large = of_rows(1)[0], of_rows(262144)[0]
    assert 0.5e-6 < seconds(small) < 3e-6
    assert seconds(large) == pytest.approx(large.moved_bytes / H200.bandwidth_bytes_per_s, rel=0.2)
    assert seconds(large, with_bandwidth(H200, 0.5)) == pytest.approx(2 * seconds(large), rel=0.05)


def test_a_large_tensor_is_worked_on_in_pieces() -> None:
    assert [memory.pieces(size) for size in (2**30, 2**31, 2**31 + 1, 5e9)] == [1, 1, 2, 4]


def test_an_unknown_operator_counts_as_elementwise() -> None:
    made = memory.fallback(call("somebody::special", ((1024, 1024), FP32), ((1024,), FP32)), SETTINGS)
    assert made.kind == "elementwise" and made.moved_bytes == 4 * (1024 * 1024 * 2 + 1024)
    assert memory.seconds(made, H200) > 1e-6


@pytest.mark.parametrize("name", ["view", "t", "expand", "empty_like", "linear", "to", "cross_entropy_loss", "dropout"])
def test_views_and_composites_launch_nothing(name: str) -> None:
    assert memory.fallback(call(name, ((1024, 1024), FP32)), SETTINGS) is None


def test_no_tensor_no_launch() -> None:
    assert memory.fallback(call("somebody::special", "3"), SETTINGS) is None


def test_arguments_that_are_not_known_give_no_launch() -> None:
    for module in (copies, elementwise, indexing, optimizers, reductions, rows):
        for reader in module.OPERATORS.values():
            assert reader(call("other"), SETTINGS) is None
            reader(call("other", "text", "text"), SETTINGS)
            reader(call("other", ((3,), BF16)), SETTINGS)


def test_nothing_is_both_silent_and_read() -> None:
    read = {
        name for module in (copies, elementwise, indexing, optimizers, reductions, rows) for name in module.OPERATORS
    }
    assert all(memory.fallback(call(name, ((8,), FP32)), SETTINGS) is not None for name in read)
