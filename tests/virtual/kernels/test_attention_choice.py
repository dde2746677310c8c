"""Which attention backend each card takes."""

from typing import Any

import pytest
import torch

from tonnage.virtual.kernels.attention_choice import _TAKES, CUDNN, EFFICIENT, FLASH, MATH, Question, can_use

pytestmark = pytest.mark.usefixtures("gpu")
T4, A100, ADA, H100, B200 = (7, 5), (8, 0), (8, 9), (9, 0), (10, 0)
ORDER = {T4: (FLASH, EFFICIENT, MATH), A100: (FLASH, EFFICIENT, MATH), ADA: (FLASH, EFFICIENT, MATH)}


def _choice(
    capability: tuple[int, int], width: int = 64, dtype: torch.dtype = torch.float16, *, version: tuple[int, int] = (2, 11),
    dropout: float = 0.0, grad: bool = True, keys: int = 32, mask: torch.Tensor | None = None,
) -> int:  # fmt: skip
    query = torch.empty(2, 8, 32, width, dtype=dtype, device="cuda", requires_grad=grad)
    key = torch.empty(2, 8, keys, width, dtype=dtype, device="cuda", requires_grad=grad)
    asked = Question(query, key, key, mask, dropout, False, False, capability, version)
    order: Any = ORDER.get(capability, (CUDNN, FLASH, EFFICIENT, MATH))
    return next(backend for backend in order if _TAKES[backend](asked))


@pytest.mark.parametrize(
    ("capability", "dtype", "backend"),
    [
        (T4, torch.float16, EFFICIENT), (T4, torch.bfloat16, MATH), (A100, torch.float16, FLASH), (ADA, torch.bfloat16, FLASH),
        (H100, torch.bfloat16, CUDNN), (B200, torch.float16, CUDNN), (H100, torch.float32, EFFICIENT),
        (H100, torch.float64, MATH),
    ],
)  # fmt: skip
def test_card_and_type(capability: tuple[int, int], dtype: torch.dtype, backend: int) -> None:
    assert _choice(capability, dtype=dtype) == backend


def test_wide_heads() -> None:
    assert _choice(H100, 256) == CUDNN
    assert _choice(B200, 256) == FLASH
    assert _choice(ADA, 208) == EFFICIENT
    assert _choice(ADA, 208, grad=False) == FLASH
    assert _choice(ADA, 256, dropout=0.1) == EFFICIENT
    assert _choice(H100, 512) == EFFICIENT
    assert _choice(H100, 65) == FLASH


def test_dropout_of_newer_versions_is_in_sixteenths() -> None:
    assert _choice(H100, dropout=0.1) == CUDNN
    assert _choice(H100, dropout=0.1, version=(2, 12)) == FLASH
    assert _choice(H100, dropout=0.125, version=(2, 12)) == CUDNN


def test_masks() -> None:
    mask = torch.empty(2, 1, 32, 32, dtype=torch.float16, device="cuda")
    assert _choice(H100, mask=mask) == CUDNN
    assert _choice(A100, mask=mask) == EFFICIENT
    assert _choice(H100, mask=mask.requires_grad_()) == EFFICIENT
    assert _choice(H100, mask=torch.empty(8, 32, 32, dtype=torch.float16, device="cuda")) == EFFICIENT


def test_a_single_key_is_not_for_cudnn() -> None:
    assert _choice(H100, keys=1) == FLASH


def test_what_python_asks() -> None:
    query = torch.empty(2, 8, 32, 64, dtype=torch.float16, device="cuda")
    params = torch.backends.cuda.SDPAParams(query, query, query, None, 0.0, False, False)
    assert can_use(FLASH, params) and can_use(CUDNN, params)
    wide = torch.empty(2, 8, 32, 512, dtype=torch.float16, device="cuda")
    assert not can_use(FLASH, torch.backends.cuda.SDPAParams(wide, wide, wide, None, 0.0, False, False))
