"""Kernels that refuse tensors which are too large for them, by version of PyTorch; where published runs stopped."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tonnage.virtual import virtual_gpu

CARD = "h200"


def _depthwise(batch: int, channels: int, side: int, kernel: int, last: bool = False) -> torch.Tensor:
    layout = torch.channels_last if last else torch.contiguous_format
    x = torch.empty(batch, channels, side, side, dtype=torch.half, device="cuda", memory_format=layout)
    w = torch.empty(channels, 1, kernel, kernel, dtype=torch.half, device="cuda", memory_format=layout)
    return F.conv2d(x, w, stride=2, padding=kernel // 2, groups=channels)


def test_a_depthwise_kernel_takes_less_than_two_to_the_31_elements() -> None:
    with virtual_gpu(CARD, torch="2.4"):
        assert _depthwise(128, 192, 264, 3).shape == (128, 192, 132, 132)
        with pytest.raises(RuntimeError, match="canUse32BitIndexMath"):
            _depthwise(192, 192, 264, 3)
        assert _depthwise(192, 192, 264, 3, last=True).shape == (192, 192, 132, 132), "cuDNN's"
        assert _depthwise(768, 256, 128, 3).shape == (768, 256, 64, 64), "cuDNN's, which has many channels"


# PyTorch asks for cuDNN's version once in a process.
NEWER = f"""
import torch
import torch.nn.functional as F
from tonnage.virtual import virtual_gpu

def convolve(batch, channels, side, kernel, layout):
    x = torch.empty(batch, channels, side, side, dtype=torch.half, device="cuda", memory_format=layout)
    w = torch.empty(channels, 1, kernel, kernel, dtype=torch.half, device="cuda", memory_format=torch.contiguous_format)
    return F.conv2d(x, w, stride=2, padding=kernel // 2, groups=channels)

with virtual_gpu("{CARD}", torch="2.9"):
    print(tuple(convolve(192, 192, 264, 3, torch.contiguous_format).shape))
    for kernel in (3, 7):
        try:
            convolve(192, 192, 264, kernel, torch.channels_last)
        except RuntimeError as error:
            print("canUse32BitIndexMath" in str(error))
"""


def test_newer_cudnn_takes_over_but_for_channels_last() -> None:
    words = subprocess.run(
        [sys.executable, "-c", NEWER], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert words == ["(192, 192, 132, 132)", "True", "True"]


@pytest.mark.parametrize(
    ("backend", "fails", "runs"),
    [(SDPBackend.FLASH_ATTENTION, "2.4", "2.1"), (SDPBackend.EFFICIENT_ATTENTION, "2.4", "2.8")],
)
def test_attention_over_more_sequences_than_a_launch_has_blocks(backend: SDPBackend, fails: str, runs: str) -> None:
    for version, sequences in ((fails, 65535), (runs, 65536), (fails, 65536)):
        with virtual_gpu(CARD, torch=version), sdpa_kernel(backend):
            q = torch.empty(sequences, 2, 49, 32, dtype=torch.half, device="cuda")
            if (version, sequences) == (fails, 65536):
                with pytest.raises(RuntimeError, match="invalid configuration argument"):
                    F.scaled_dot_product_attention(q, q, q)
            else:
                assert F.scaled_dot_product_attention(q, q, q).shape == q.shape


def test_attention_in_plain_operators_computes_in_float_since_2_5() -> None:
    peaks = {}
    for version in ("2.4", "2.6"):
        with virtual_gpu(CARD, torch=version) as gpu, sdpa_kernel(SDPBackend.MATH):
            q = torch.empty(4, 8, 512, 64, dtype=torch.half, device="cuda")
            F.scaled_dot_product_attention(q, q, q)
            peaks[version] = gpu.peak_allocated_bytes
    assert 1.5 * peaks["2.4"] < peaks["2.6"]


def test_rows_that_a_mask_hides_are_looked_for_since_2_5() -> None:
    peaks = {}
    for version in ("2.4", "2.6"):
        with virtual_gpu(CARD, torch=version) as gpu, sdpa_kernel(SDPBackend.MATH):
            q, mask = torch.empty(4, 8, 512, 64, device="cuda"), torch.empty(4, 8, 512, 512, device="cuda")
            F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
            peaks[version] = gpu.peak_allocated_bytes
    assert peaks["2.6"] - peaks["2.4"] >= 4 * 8 * 512 * 512, "one byte for each weight"


@pytest.mark.parametrize(
    ("channels", "filters", "side", "kernel", "stride", "mebibytes"),
    [
        (64, 64, 112, 3, 1, 8190.7),
        (256, 256, 28, 3, 1, 8193.2),
        (256, 512, 28, 1, 2, 6144.3),
        (3, 64, 224, 7, 2, 5118.9),
    ],
)
def test_a_convolution_of_more_elements_has_a_workspace_for_two_to_the_31(
    channels: int, filters: int, side: int, kernel: int, stride: int, mebibytes: float
) -> None:
    """Batches of 1.2 times 2^31 elements; workspaces as an H200 showed them with torch 2.11."""
    batch = int(1.2 * 2**31 / max(channels * side**2, filters * (side // stride) ** 2)) + 1
    with virtual_gpu(CARD, torch="2.11"):
        x = torch.empty(batch, channels, side, side, dtype=torch.half, device="cuda")
        w = torch.empty(filters, channels, kernel, kernel, dtype=torch.half, device="cuda")
        before = torch.cuda.memory_allocated()
        y = F.conv2d(x, w, stride=stride, padding=kernel // 2)
        workspace = torch.cuda.max_memory_allocated() - before - 2 * y.numel()
    assert workspace / 2**20 == pytest.approx(mebibytes, abs=0.1)


def test_before_1_13_a_process_holds_all_of_torchs_kernels() -> None:
    held = {}
    for version in ("1.12", "1.13"):
        with virtual_gpu("rtx-3090", torch=version) as gpu:
            torch.zeros(1, device="cuda")
            free, total = torch.cuda.mem_get_info()
            held[version] = total - free - torch.cuda.memory_reserved()
            del gpu
    assert held["1.12"] == pytest.approx((1644 - 158) << 20, rel=0.05), "pytorch/pytorch#49877"
    assert held["1.13"] < held["1.12"] / 2
