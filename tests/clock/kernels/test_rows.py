import pytest

from clock.kernels.calls import BF16, FP32, H200, SETTINGS, call
from tonnage.clock.kernels import rows

IMAGES = (32, 64, 56, 56)


def read(name: str, *arguments: object):
    return rows.OPERATORS[name](call(name, *arguments), SETTINGS)


def test_a_norm_has_a_block_for_each_row() -> None:
    x, weight = ((8, 512, 768), BF16), ((768,), BF16)
    made = read("native_layer_norm", x, "[768]", weight, weight)
    assert made.shape == (8 * 512 * 768, 8 * 512) and made.variant == "layer_norm_narrow"
    assert read("_fused_rms_norm", ((8, 512, 767), FP32), "[767]", ((767,), FP32)).variant == "layer_norm_plain"


def test_gradients_of_a_weight_are_a_kernel_of_their_own() -> None:
    x, moment, weight = ((4096, 1024), FP32), ((4096, 1), FP32), ((1024,), FP32)
    with_weight = read("native_layer_norm_backward", x, x, "[1024]", moment, moment, weight, weight)
    without = read("native_layer_norm_backward", x, x, "[1024]", moment, moment, "", "")
    assert (with_weight.kernels, without.kernels) == (2, 1)
    assert rows.seconds(with_weight, H200) > rows.seconds(without, H200)


@pytest.mark.parametrize(
    ("columns", "variant"),
    [(512, "softmax_warp"), (4096, "softmax_registers"), (16384, "softmax_shared"), (50257, "softmax")],
)
def test_a_softmax_by_the_length_of_its_rows(columns: int, variant: str) -> None:
    assert read("_softmax", ((64, columns), BF16), "-1", "False").variant == f"{variant}_narrow"


def test_a_softmax_into_floats_writes_more() -> None:
    assert read("_softmax", ((64, 512), BF16), "-1", "True").moved_bytes == 64 * 512 * 6


def test_a_batch_norm_has_a_block_for_each_channel() -> None:
    channel = ((64,), FP32)
    made = read("native_batch_norm", (IMAGES, BF16), channel, channel, channel, channel)
    assert made.shape == (32 * 64 * 56 * 56, 64) and made.variant == "batch_norm_statistics+batch_norm"
    last = read("cudnn_batch_norm", (IMAGES, FP32, (200704, 1, 3584, 64)), channel, channel, channel, channel)
    assert last.variant == "cudnn_batch_norm_last"


def test_a_batch_norm_of_rows_reads_them_as_they_lie() -> None:
    assert (
        read("native_batch_norm", ((32768, 1024), BF16, (1024, 1))).variant
        == "batch_norm_statistics_last+batch_norm_last"
    )
    assert read("native_batch_norm_backward", ((8, 4), BF16), ((8, 4), BF16)).variant == "batch_norm_backward_last"
    assert rows.seconds(read("native_batch_norm", ((32768, 1024), BF16)), H200) < 1e-3


def test_few_channels_leave_most_of_a_card_idle() -> None:
    few, many = (
        rows.seconds(read("native_batch_norm", (shape, BF16)), H200)
        for shape in ((64, 16, 112, 112), (64, 256, 28, 28))
    )
    assert few > 1.5 * many


def test_a_loss_reads_a_number_for_each_row() -> None:
    assert read("nll_loss_forward", ((8192, 50257), FP32), ((8192,), "long int")).shape == (8192, 1)
