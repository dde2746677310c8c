import pytest

from clock.kernels.calls import BF16, FP32, H200, SETTINGS, call
from tonnage.clock.kernels import reductions
from tonnage.clock.kernels.reductions import FIRST, INNER, LAST, WHOLE, ReductionGrid, grid_of

IMAGES = (8, 64, 32, 32)


def read(name: str, *arguments: object):
    return reductions.OPERATORS[name](call(name, *arguments), SETTINGS)


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        ([((4096, 768), BF16), "[0]", "False", ""], (768, 4096, FIRST)),
        ([((4096, 768), BF16), "[-1]", "False", ""], (4096, 768, LAST)),
        ([((4096, 768), BF16), ""], (1, 4096 * 768, WHOLE)),
        ([(IMAGES, BF16), "[0, 2, 3]", "False", ""], (64, 8 * 1024, INNER)),
        ([(IMAGES, BF16, (65536, 1, 2048, 64)), "[0, 2, 3]", "False", ""], (64, 8 * 1024, FIRST)),
        ([((4, 512, 768), BF16), "", "", ""], (768, 2048, FIRST)),
    ],
)
def test_axes(arguments: list, shape: tuple[int, ...]) -> None:
    assert read("sum", *arguments).shape == shape


def test_a_mean_without_axes_on_record_is_of_the_last() -> None:
    assert read("mean", ((4096, 768), FP32), "", "", "").shape == (4096, 768, LAST)


def test_grids() -> None:
    # A warp for each short row; all threads of a block for a long one.
    assert grid_of(4096, 1024, LAST, H200) == ReductionGrid(512, 256, 32, 0)
    assert grid_of(64, 65536, LAST, H200).loads == 128
    # Down the rows of a narrow matrix, a thousand blocks share an output, and the last one adds up what they left.
    assert grid_of(192, 100352, FIRST, H200) == ReductionGrid(128, 2112, 24, 264)


def test_a_narrow_matrix_takes_longer_than_its_bytes_say() -> None:
    narrow, wide = (read("sum", (shape, BF16), "[0]", "", "") for shape in ((100352, 192), (12544, 1536)))
    assert narrow.moved_bytes == pytest.approx(wide.moved_bytes, rel=0.01)
    assert reductions.seconds(narrow, H200) > 2 * reductions.seconds(wide, H200)
