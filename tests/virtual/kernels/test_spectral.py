"""Fourier transforms against rows measured on an H200 with torch 2.11."""

from collections.abc import Callable

import pytest
import torch

from tonnage.virtual.kernels.spectral import work_area_bytes

pytestmark = pytest.mark.usefixtures("gpu")
Events = Callable[[Callable[[], object]], str]
REAL, COMPLEX = torch.float32, torch.complex64


def _empty(*shape: int, dtype: torch.dtype = REAL) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def test_inverse_transforms_work_on_a_copy(events: Events) -> None:
    x = _empty(64, dtype=COMPLEX)
    assert events(lambda: torch.fft.irfft(x)) == "+504 +512 -1"


def test_several_dimensions(events: Events) -> None:
    x = _empty(2, 3, 32, 32)
    assert events(lambda: torch.fft.rfftn(x)) == "+26112 +26112 -0"
    assert events(lambda: torch.fft.rfft2(x, dim=(1, 2))) == "+26112 +24576 -1"
    assert torch.fft.rfftn(x).shape == (2, 3, 32, 17)


def test_outputs_are_nested_as_the_transform_leaves_them() -> None:
    assert torch.fft.rfft2(_empty(2, 3, 32, 32), dim=(1, 2)).stride() == (1632, 17, 1, 51)


@pytest.mark.parametrize(
    ("batch", "signal", "source", "output", "size"),
    [
        (4, (97,), REAL, COMPLEX, 0), (4, (194,), REAL, COMPLEX, 3104), (4, (194,), COMPLEX, COMPLEX, 6208),
        (6, (2000,), REAL, COMPLEX, 48000), (6, (2000,), COMPLEX, COMPLEX, 0), (8, (2048,), REAL, COMPLEX, 0),
        (16, (16000,), COMPLEX, COMPLEX, 0),
        (16, (32000,), COMPLEX, COMPLEX, 4096000), (6, (32, 62), COMPLEX, REAL, 47616),
    ],
)  # fmt: skip
def test_work_areas(batch: int, signal: tuple[int, ...], source: torch.dtype, output: torch.dtype, size: int) -> None:
    assert work_area_bytes(batch, signal, source, output) == size


def test_the_size_of_a_complex_number_passes_through_a_complex_result(events: Events) -> None:
    x = _empty(33, 64, dtype=COMPLEX)
    assert events(lambda: x.abs()) == "+8448 +16896 -1"
    assert events(lambda: x.angle()) == "+16896 +8448 -0"
