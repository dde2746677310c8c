"""Normalisations, forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from .spec import BF16, F32, FLOATS, Case, apply, case, module, t

ROWS_COLUMNS = ((1, 8), (5, 33), (32, 64), (64, 768), (512, 768), (1000, 1024), (4096, 1024), (8192, 768), (8192, 4096), (100, 4097), (16384, 96), (65536, 128),
                (2, 16384), (100_000, 32), (31, 512), (33, 512), (128, 128), (16384, 2048), (3136, 384))  # fmt: skip


def cases() -> Iterator[Case]:
    yield from layer_norms()
    yield from group_norms()
    yield from batch_norms()
    yield from parametrised()


@contextlib.contextmanager
def without_cudnn() -> Iterator[None]:
    with torch.backends.cudnn.flags(enabled=False):
        yield


def layer_norms() -> Iterator[Case]:
    for dtype in FLOATS:
        for rows, columns in ROWS_COLUMNS:
            x, w, b = t(rows, columns, dtype=dtype), t(columns, dtype=dtype), t(columns, dtype=dtype)
            yield case("layer_norm", F.layer_norm, x, (columns,), w, b)
            yield case("layer_norm", F.layer_norm, x, (columns,), note="no affine")
            yield case("layer_norm", F.layer_norm, x, (columns,), w, note="no bias")
            yield case("layer_norm", F.layer_norm, x, (columns,), t(columns, dtype=dtype, grad=False), t(columns, dtype=dtype, grad=False), note="frozen")
            yield case("rms_norm", F.rms_norm, x, (columns,), w)
            yield case("rms_norm", F.rms_norm, x, (columns,), note="no weight")
            yield case("_fused_rms_norm", torch._fused_rms_norm, x, (columns,), w, 1e-6)
            yield case("llama rms norm", _llama_norm, x, w)
            if dtype is not F32:
                yield case("layer_norm", F.layer_norm, x, (columns,), t(columns), t(columns), note="fp32 weights")
                yield case("rms_norm", F.rms_norm, x, (columns,), t(columns), note="fp32 weight")
        yield case("layer_norm", F.layer_norm, t(4, 100, 64, dtype=dtype, layout="transposed"), (64,), t(64, dtype=dtype), t(64, dtype=dtype), note="transposed")
        yield case("layer_norm", F.layer_norm, t(4, 20, 16, 16, dtype=dtype), (16, 16), t(16, 16, dtype=dtype), t(16, 16, dtype=dtype))
        yield case("layer_norm", F.layer_norm, t(4, 100, 64, dtype=dtype, grad=False), (64,), t(64, dtype=dtype), t(64, dtype=dtype), note="input without grad")
        yield case("layer_norm", F.layer_norm, t(4, 100, 64, dtype=dtype, grad=False), (64,), t(64, dtype=dtype, grad=False), t(64, dtype=dtype, grad=False),
                   note="no grad")  # fmt: skip
        yield case("LayerNorm2d", lambda x, w, b: F.layer_norm(x.permute(0, 2, 3, 1), (64,), w, b).permute(0, 3, 1, 2), t(2, 64, 14, 14, dtype=dtype),
                   t(64, dtype=dtype), t(64, dtype=dtype), note="convnext")  # fmt: skip


def _llama_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.to(F32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def group_norms() -> Iterator[Case]:
    for dtype in FLOATS:
        for n, c, side, groups in ((2, 32, 16, 8), (1, 320, 64, 32), (4, 64, 7, 1), (2, 128, 33, 32), (8, 512, 8, 32), (16, 96, 3, 96), (2, 48, 128, 4)):
            x = t(n, c, side, side, dtype=dtype)
            yield case("group_norm", F.group_norm, x, groups, t(c, dtype=dtype), t(c, dtype=dtype))
            yield case("group_norm", F.group_norm, x, groups, note="no affine")
            yield case("group_norm", F.group_norm, t(n, c, side, side, dtype=dtype, layout="channels_last"), groups, t(c, dtype=dtype), t(c, dtype=dtype), note="channels_last")
            yield case("instance_norm", F.instance_norm, x)
            yield case("instance_norm", apply, module(lambda c=c: nn.InstanceNorm2d(c, affine=True), dtype), x, note="affine")
            yield case("instance_norm", apply, module(lambda c=c: nn.InstanceNorm2d(c, affine=True, track_running_stats=True), dtype), x, note="running statistics")
        yield case("group_norm", F.group_norm, t(4, 64, 100, dtype=dtype), 8, t(64, dtype=dtype), t(64, dtype=dtype), note="3-D")
        yield case("group_norm", F.group_norm, t(1, 512, 16000, dtype=dtype), 512, t(512, dtype=dtype), t(512, dtype=dtype), note="wav2vec2")
        yield case("local_response_norm", F.local_response_norm, t(2, 16, 14, 14, dtype=dtype), 5)
        yield case("instance_norm", F.instance_norm, t(2, 16, 100, dtype=dtype), note="3-D")


def batch_norms() -> Iterator[Case]:
    shapes = ((8, 64, 32, 32), (32, 256, 14, 14), (4, 16, 7, 9), (64, 512, 7, 7), (16, 64, 112, 112), (1, 3, 5, 5), (256, 64, 8, 8), (2, 2048, 4, 4))
    for dtype in FLOATS:
        for around, word in ((contextlib.nullcontext, "cuDNN allowed"), (without_cudnn, "native")):
            for train in (True, False):
                note = f"{word} train={train}"
                for shape in shapes:
                    for layout in ("", "channels_last"):
                        x = t(*shape, dtype=dtype, layout=layout)
                        yield case("batch_norm", apply, module(lambda c=shape[1]: nn.BatchNorm2d(c), dtype, train), x, note=note, around=around)
                        if dtype is not F32:
                            yield case("batch_norm", apply, module(lambda c=shape[1]: nn.BatchNorm2d(c), F32, train), x, note=f"{note} fp32 weights", around=around)
                for shape in ((32, 100), (256, 1024), (8, 64, 100), (4, 4, 1)):
                    yield case("batch_norm 1d", apply, module(lambda c=shape[1]: nn.BatchNorm1d(c), dtype, train), t(*shape, dtype=dtype), note=note, around=around)
                for layout in ("", "channels_last"):
                    yield case("batch_norm 3d", apply, module(lambda: nn.BatchNorm3d(16), dtype, train), t(2, 16, 8, 9, 10, dtype=dtype, layout=layout), note=note, around=around)
                yield case("batch_norm", apply, module(lambda: nn.BatchNorm2d(64, affine=False), dtype, train), t(*shapes[0], dtype=dtype), note=f"{note} no affine", around=around)
                yield case("batch_norm", apply, module(lambda: nn.BatchNorm2d(64, track_running_stats=False), dtype, train), t(*shapes[0], dtype=dtype),
                           note=f"{note} no statistics", around=around)  # fmt: skip
        frozen = module(lambda: nn.BatchNorm2d(64).requires_grad_(False), dtype, train=False)
        yield case("batch_norm", apply, frozen, t(*shapes[0], dtype=dtype), note="frozen")
        yield case("batch_norm", apply, module(lambda: nn.BatchNorm2d(64), dtype), t(*shapes[0], dtype=dtype, grad=False), note="input without grad")


def parametrised() -> Iterator[Case]:
    for dtype in (F32, BF16):
        yield case("weight_norm", apply, module(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(64, 128)), dtype), t(8, 64, dtype=dtype))
        yield case("weight_norm", apply, module(lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(16, 32, 3)), dtype), t(8, 16, 50, dtype=dtype))
        yield case("weight_norm old", apply, module(lambda: nn.utils.weight_norm(nn.Linear(64, 128)), dtype), t(8, 64, dtype=dtype))
    yield case("spectral_norm", apply, module(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(64, 128))), t(8, 64))
    yield case("spectral_norm", apply, module(lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(16, 32, 3))), t(8, 16, 14, 14))
    yield case("spectral_norm old", apply, module(lambda: nn.utils.spectral_norm(nn.Linear(64, 128))), t(8, 64))
    yield case("orthogonal", apply, module(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(64, 64))), t(8, 64))
