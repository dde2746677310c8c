"""Complex numbers and Fourier transforms (cuFFT)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .spec import BF16, F16, Case, Made, case, t

C64 = torch.complex64


def cases() -> Iterator[Case]:
    for shape in ((64,), (4, 100), (4, 97), (8, 1024), (2, 3, 1000), (16, 16000), (4, 65537)):
        for name in ("fft", "ifft", "hfft"):
            yield case(f"fft.{name}", getattr(torch.fft, name), t(*shape, dtype=C64))
        for name in ("rfft", "fft"):
            yield case(f"fft.{name}", getattr(torch.fft, name), t(*shape))
        yield case("fft.irfft", torch.fft.irfft, t(*shape, dtype=C64))
        yield case("fft.irfft", torch.fft.irfft, t(*shape, dtype=C64), n=shape[-1])
        yield case("fft.rfft", torch.fft.rfft, t(*shape), n=2 * shape[-1], note="padded")
        yield case("fft.rfft", torch.fft.rfft, t(*shape), norm="ortho")
        yield case("fft.rfft", torch.fft.rfft, t(*shape, layout="transposed") if len(shape) == 2 else t(*shape), dim=0)
        yield case("fft convolution", _fft_convolution, t(*shape), t(shape[-1]))
    for shape in ((2, 3, 32, 32), (1, 64, 56), (4, 14, 14, 64), (2, 8, 16, 16, 16)):
        yield case("fft.fft2", torch.fft.fft2, t(*shape, dtype=C64))
        yield case("fft.rfft2", torch.fft.rfft2, t(*shape))
        yield case("fft.rfft2", torch.fft.rfft2, t(*shape), dim=(1, 2), norm="ortho")
        yield case("fft.irfft2", torch.fft.irfft2, t(*shape, dtype=C64))
        yield case("fft.fftn", torch.fft.fftn, t(*shape))
        yield case("fft.rfftn", torch.fft.rfftn, t(*shape))
        yield case("fft.fftshift", torch.fft.fftshift, t(*shape))
    yield case("fft.rfft", torch.fft.rfft, t(4, 1024, dtype=F16), note="fp16")
    window = Made(lambda d: torch.hann_window(400, device=d))
    for samples in (16000, 480000):
        for center in (True, False):
            yield case("stft", lambda x, w, c: torch.stft(x, 400, 160, window=w, center=c, return_complex=True), t(2, samples), window, center)
        yield case("mel", lambda x, w: torch.log10(torch.stft(x, 400, 160, window=w, return_complex=True)[..., :-1].abs() ** 2 + 1e-10), t(2, samples), window, note="whisper")
    yield case("istft", lambda x, w: torch.istft(x, 400, 160, window=w), t(2, 201, 101, dtype=C64), window)
    for shape in ((33, 64), (2, 128, 8, 64)):
        yield case("view_as_complex", lambda x: torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)), t(*shape))
        yield case("rope complex", _complex_rope, t(*shape, dtype=BF16), t(shape[-1] // 2, dtype=C64, grad=False))
        yield case("rope complex", _complex_rope, t(*shape), t(shape[-1] // 2, dtype=C64, grad=False))
        yield case("polar", torch.polar, t(*shape), t(*shape))
        yield case("complex", torch.complex, t(*shape), t(*shape))
        for name in ("abs", "angle", "conj_physical", "exp", "sqrt", "reciprocal", "sum", "mean", "sgn"):
            yield case(f"complex {name}", getattr(torch, name), t(*shape, dtype=C64))
        for name in ("mul", "add", "div"):
            yield case(f"complex {name}", getattr(torch, name), t(*shape, dtype=C64), t(*shape, dtype=C64))
            yield case(f"complex {name}", getattr(torch, name), t(*shape, dtype=C64), t(*shape), note="with real")
        yield case("complex real", lambda x: x.real.contiguous(), t(*shape, dtype=C64))
        yield case("complex conj resolve", lambda x: x.conj().resolve_conj(), t(*shape, dtype=C64))
        yield case("complex matmul conj", lambda x: x.mH @ x, t(*shape, dtype=C64))


def _fft_convolution(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    n = 2 * x.shape[-1]
    return torch.fft.irfft(torch.fft.rfft(x, n=n) * torch.fft.rfft(k, n=n), n=n)[..., : x.shape[-1]]


def _complex_rope(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)
