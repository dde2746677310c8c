"""Embedding, indexing, scattering, and joining and cutting tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .spec import BF16, F32, FLOATS, Case, Made, apply, case, ints, mask, module, t


def cases() -> Iterator[Case]:
    yield from embeddings()
    yield from advanced()
    yield from scattering()
    yield from joining()
    yield from shaping()


def embeddings() -> Iterator[Case]:
    for dtype in FLOATS:
        for rows, width in ((100, 16), (50257, 768), (128, 64), (1000, 100), (32000, 4096), (2, 768)):
            for indices in ((5,), (4, 128), (3, 1024), (3073,), (8, 1024), (16, 4096)):
                yield case("embedding", F.embedding, ints(rows, *indices), t(rows, width, dtype=dtype))
        yield case("embedding", F.embedding, ints(1000, 4, 64), t(1000, 64, dtype=dtype), padding_idx=0, note="padding_idx")
        yield case("embedding", F.embedding, ints(1000, 8, 1024), t(1000, 64, dtype=dtype), padding_idx=0, note="padding_idx")
        for indices in ((4, 64), (8, 1024)):
            yield case("embedding", F.embedding, ints(1000, *indices), t(1000, 64, dtype=dtype), sparse=True, note="sparse")
            yield case("embedding", F.embedding, ints(1000, *indices), t(1000, 64, dtype=dtype), scale_grad_by_freq=True, note="by frequency")
            yield case("embedding", F.embedding, ints(1000, *indices), t(1000, 64, dtype=dtype), max_norm=1.0, note="max_norm", backward=False)
            yield case("embedding", F.embedding, ints(1000, *indices, dtype=torch.int32), t(1000, 64, dtype=dtype), note="int32")
            yield case("embedding", F.embedding, ints(1000, *indices, layout="transposed"), t(1000, 64, dtype=dtype), note="indices transposed")
            yield case("embedding", F.embedding, ints(1000, *indices, layout="expanded"), t(1000, 64, dtype=dtype), note="indices expanded")
        for mode in ("sum", "mean", "max"):
            for bags, length in ((16, 20), (512, 50)):
                yield case("embedding_bag", F.embedding_bag, ints(1000, bags, length), t(1000, 64, dtype=dtype), mode=mode)
                if mode != "max":
                    yield case("embedding_bag", F.embedding_bag, ints(1000, bags, length), t(1000, 64, dtype=dtype), mode=mode, sparse=True)
            offsets = Made(lambda d: torch.tensor([0, 5, 10, 70], device=d))
            yield case("embedding_bag", F.embedding_bag, ints(1000, 100), t(1000, 64, dtype=dtype), offsets, mode=mode, note="offsets")
        yield case("embedding_bag", F.embedding_bag, ints(1000, 16, 20), t(1000, 64, dtype=dtype), mode="sum", per_sample_weights=t(16, 20, dtype=dtype))


def advanced() -> Iterator[Case]:
    for dtype in FLOATS:
        for rows, width, n in ((100, 16, 30), (1000, 64, 5000), (50257, 768, 4096), (4096, 1024, 4096)):
            yield case("x[idx]", lambda x, i: x[i], t(rows, width, dtype=dtype), ints(rows, n))
            yield case("x[:, idx]", lambda x, i: x[:, i], t(min(width, 512), rows, dtype=dtype), ints(rows, n))
            yield case("index_select", torch.index_select, t(rows, width, dtype=dtype), 0, ints(rows, n))
            yield case("index_select", torch.index_select, t(rows, width, dtype=dtype), 1, ints(width, n))
            yield case("x[idx] = v", _assign, t(rows, width, dtype=dtype, grad=False), ints(rows, n), t(n, width, dtype=dtype, grad=False))
            yield case("x[idx] = 0", _assign, t(rows, width, dtype=dtype, grad=False), ints(rows, n), 0.0)
            yield case("index_put_ accumulate", lambda x, i, v: x.index_put_((i,), v, accumulate=True), t(rows, width, dtype=dtype, grad=False), ints(rows, n),
                       t(n, width, dtype=dtype, grad=False))  # fmt: skip
            yield case("index_put", lambda x, i, v: x.index_put((i,), v), t(rows, width, dtype=dtype), ints(rows, n), t(n, width, dtype=dtype))
            yield case("index_add", torch.index_add, t(rows, width, dtype=dtype), 0, ints(rows, n), t(n, width, dtype=dtype))
            yield case("index_add_", lambda x, i, v: x.index_add_(0, i, v), t(rows, width, dtype=dtype, grad=False), ints(rows, n), t(n, width, dtype=dtype, grad=False))
            yield case("index_copy", torch.index_copy, t(rows, width, dtype=dtype), 0, ints(rows, n), t(n, width, dtype=dtype))
            yield case("index_fill", torch.index_fill, t(rows, width, dtype=dtype), 0, ints(rows, n), 1.0)
            yield case("take", torch.take, t(rows, width, dtype=dtype), ints(rows * width, n))
            yield case("take_along_dim", torch.take_along_dim, t(rows, width, dtype=dtype), ints(width, rows, 3), 1)
            yield case("x[i, j]", lambda x, i, j: x[i, j], t(rows, width, dtype=dtype), ints(rows, n), ints(width, n))
            yield case("x[arange, j]", lambda x, j: x[torch.arange(x.shape[0], device=x.device), j], t(rows, width, dtype=dtype), ints(width, rows))
            yield case("x[mask]", lambda x, m: x[m], t(rows, width, dtype=dtype), mask(rows), note="rows by mask")
            yield case("x[mask]", lambda x, m: x[m], t(rows, width, dtype=dtype), mask(rows, width))
            yield case("x[mask] = 0", _assign, t(rows, width, dtype=dtype, grad=False), mask(rows, width), 0.0)
            yield case("x[mask] = v", _assign_tensor, t(rows, width, dtype=dtype, grad=False), mask(rows, width))
            yield case("x[rows mask] = 0", _assign, t(rows, width, dtype=dtype, grad=False), mask(rows), 0.0)
            yield case("masked_fill", torch.masked_fill, t(rows, width, dtype=dtype), mask(rows, width), 0.0)
            yield case("masked_fill", torch.masked_fill, t(rows, width, dtype=dtype), mask(width), 0.0, note="broadcast mask")
            yield case("masked_fill_", lambda x, m: x.masked_fill_(m, 0.0), t(rows, width, dtype=dtype, grad=False), mask(rows, width))
            yield case("masked_fill tensor", lambda x, m, v: x.masked_fill(m, v), t(rows, width, dtype=dtype), mask(rows, width), t(dtype=dtype))
            yield case("masked_scatter", torch.masked_scatter, t(rows, width, dtype=dtype), mask(rows, width), t(rows, width, dtype=dtype))
            yield case("masked_scatter", lambda x, m, v: x.masked_scatter(m.unsqueeze(-1), v), t(rows, width, dtype=dtype), mask(rows), t(rows, width, dtype=dtype),
                       note="row mask (image tokens)")  # fmt: skip
            yield case("put_", lambda x, i, v: x.put_(i, v), t(rows, width, dtype=dtype, grad=False), ints(rows * width, n), t(n, dtype=dtype, grad=False))
        yield case("x[list]", lambda x: x[[0, 5, 2]], t(100, 16, dtype=dtype))
        yield case("x[:, list]", lambda x: x[:, [0, 5, 2]], t(100, 16, dtype=dtype))
        yield case("x[[i], [j]]", lambda x: x[[0, 5], [1, 2]], t(100, 16, dtype=dtype))
        yield case("x[cpu idx]", lambda x, i: x[i], t(100, 16, dtype=dtype), ints(100, 20, device="cpu"))
        yield case("x[cpu mask]", lambda x, i: x[i], t(100, 16, dtype=dtype), mask(100, device="cpu"))
        yield case("x[..., None, 3:]", lambda x: x[..., None, 3:], t(100, 16, dtype=dtype))
        yield case("x[gpu scalar]", lambda x, i: x[i], t(100, 16, dtype=dtype), ints(100))
        yield case("x[idx, :, idx]", lambda x, i, j: x[i, :, j], t(30, 20, 10, dtype=dtype), ints(30, 7), ints(10, 7))
        yield case("x[idx 2-D]", lambda x, i: x[i], t(30, 20, dtype=dtype), ints(30, 7, 9))
        yield case("x[transposed idx]", lambda x, i: x[i], t(30, 20, 10, dtype=dtype, layout="transposed"), ints(30, 7))
    for n in (10, 100, 1000, 3072, 3073, 10_000, 1_000_000):
        for dtype in (F32, BF16):
            yield case("index_put_ accumulate", lambda x, i, v: x.index_put_((i,), v, accumulate=True), t(1000, 8, dtype=dtype, grad=False), ints(1000, n),
                       t(n, 8, dtype=dtype, grad=False))  # fmt: skip
            yield case("x[idx]", lambda x, i: x[i], t(5000, dtype=dtype), ints(5000, n))
            yield case("index_add_", lambda x, i, v: x.index_add_(0, i, v), t(1000, 8, dtype=dtype, grad=False), ints(1000, n), t(n, 8, dtype=dtype, grad=False))


def _assign(x: torch.Tensor, index: torch.Tensor, value: Any) -> torch.Tensor:
    x[index] = value
    return x


def _assign_tensor(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    x[index] = torch.zeros((), device=x.device, dtype=x.dtype)
    return x


def scattering() -> Iterator[Case]:
    for dtype in FLOATS:
        for rows, width, n in ((33, 65, 20), (1024, 1000, 128), (64, 50257, 1), (8192, 64, 64)):
            x, i, v = t(rows, width, dtype=dtype), ints(width, rows, n), t(rows, n, dtype=dtype)
            yield case("gather", torch.gather, x, 1, i)
            yield case("gather", torch.gather, x, 0, ints(rows, 5, min(width, 64)))
            yield case("scatter", torch.scatter, x, 1, i, v)
            yield case("scatter", torch.scatter, x, 1, i, 1.0, note="scalar")
            yield case("scatter_", lambda x, i: torch.zeros_like(x).scatter_(1, i, 1.0), t(rows, width, dtype=dtype, grad=False), i)
            yield case("scatter_add", torch.scatter_add, x, 1, i, v)
            yield case("scatter_add", torch.scatter_add, x, 0, ints(rows, rows, width), t(rows, width, dtype=dtype))
            for reduce in ("sum", "mean", "amax", "amin", "prod"):
                yield case("scatter_reduce", lambda x, i, v, r: x.scatter_reduce(1, i, v, r), x, i, v, reduce, backward=reduce != "prod")
            yield case("index_reduce", lambda x, i, v: x.index_reduce(0, i, v, "amax"), t(rows, width, dtype=dtype, grad=False), ints(rows, 30),
                       t(30, width, dtype=dtype, grad=False))  # fmt: skip
        for shape in ((33, 65), (1024, 1024), (8, 128, 768)):
            yield case("where", torch.where, mask(*shape), t(*shape, dtype=dtype), t(*shape, dtype=dtype))
            yield case("where", torch.where, mask(*shape), t(*shape, dtype=dtype), 0.0, note="scalar")
            yield case("where", torch.where, mask(shape[-1]), t(*shape, dtype=dtype), t(dtype=dtype), note="broadcast")
            yield case("where", torch.where, mask(*shape), t(*shape, dtype=dtype), t(*shape), note="with fp32")
    for n in (10, 1000, 100_000):
        yield case("one_hot", F.one_hot, ints(50, n))
        yield case("one_hot", F.one_hot, ints(50, n), num_classes=64)


def joining() -> Iterator[Case]:
    for dtype in FLOATS:
        for shape in ((33, 65), (8, 128, 768), (256, 4096), (3,)):
            for count in (2, 3, 9, 64, 200):
                if count * 4096 * 256 > 1 << 27 and shape[0] == 256:
                    continue
                for dim in (0, -1):
                    yield case("cat", torch.cat, [t(*shape, dtype=dtype)] * count, dim, note=f"{count} tensors")
                yield case("stack", torch.stack, [t(*shape, dtype=dtype)] * count, note=f"{count} tensors")
            if len(shape) > 1:
                for layout in ("transposed", "strided", "narrowed"):
                    yield case("cat", torch.cat, [t(*shape, dtype=dtype, layout=layout)] * 3, -1, note=layout)
            yield case("cat", torch.cat, [t(*shape, dtype=dtype), t(*shape)], 0, note="with fp32")
            yield case("chunk", lambda x: x.chunk(3, -1), t(*shape, dtype=dtype))
            yield case("split", lambda x: x.split(1, 0)[:2], t(*shape, dtype=dtype), note="two pieces used")
            yield case("unbind", lambda x: x.unbind(0)[:3], t(*shape, dtype=dtype))
            yield case("x[..., 1:]", lambda x: x[..., 1:], t(*shape, dtype=dtype))
            yield case("x[..., 1:] + x[..., :-1]", lambda x: x[..., 1:] + x[..., :-1], t(*shape, dtype=dtype))
            yield case("select", lambda x: x.select(0, 1), t(*shape, dtype=dtype))
            yield case("repeat", lambda x: x.repeat(2, *[1] * x.dim()), t(*shape, dtype=dtype))
            yield case("expand contiguous", lambda x: x[None].expand(4, *x.shape).contiguous(), t(*shape, dtype=dtype))
            yield case("tile", torch.tile, t(*shape, dtype=dtype), (2,))
            yield case("repeat_interleave", torch.repeat_interleave, t(*shape, dtype=dtype), 3, 0)
            yield case("repeat_interleave", torch.repeat_interleave, t(*shape, dtype=dtype), ints(4, shape[0]), 0, note="tensor")
            yield case("roll", torch.roll, t(*shape, dtype=dtype), 1, 0)
            yield case("roll", torch.roll, t(*shape, dtype=dtype), 3)
            yield case("flip", torch.flip, t(*shape, dtype=dtype), [0])
            yield case("flip", torch.flip, t(*shape, dtype=dtype), list(range(len(shape))))
            yield case("cat 4-D", torch.cat, [t(2, 8, 16, 16, dtype=dtype, layout="channels_last"), t(2, 4, 16, 16, dtype=dtype, layout="channels_last")], 1)
        yield case("rotate_half", lambda x: torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1), t(2, 8, 128, 64, dtype=dtype))
        yield case("rope", _rope, t(2, 8, 128, 64, dtype=dtype), t(1, 1, 128, 64, dtype=dtype, grad=False), t(1, 1, 128, 64, dtype=dtype, grad=False))
        yield case("roll 2-D", torch.roll, t(4, 56, 56, 96, dtype=dtype), (-3, -3), (1, 2), note="swin")
        yield case("hstack", lambda x, y: torch.hstack([x, y]), t(33, 65, dtype=dtype), t(33, 5, dtype=dtype))
        yield case("block_diag", torch.block_diag, t(33, 65, dtype=dtype), t(3, 5, dtype=dtype))
        yield case("meshgrid", lambda x, y: [g.contiguous() for g in torch.meshgrid(x, y, indexing="ij")], t(30, dtype=dtype), t(40, dtype=dtype))
        yield case("pad_sequence", lambda *x: nn.utils.rnn.pad_sequence(x, batch_first=True), t(30, 8, dtype=dtype), t(40, 8, dtype=dtype), t(10, 8, dtype=dtype))


def _rope(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = q.shape[-1] // 2
    return q * cos + torch.cat((-q[..., half:], q[..., :half]), -1) * sin


def shaping() -> Iterator[Case]:
    for dtype in FLOATS:
        for shape in ((33, 65), (1024, 1024), (4, 8, 100, 100)):
            yield case("tril", torch.tril, t(*shape, dtype=dtype))
            yield case("triu", torch.triu, t(*shape, dtype=dtype), 1)
            yield case("diagonal", lambda x: torch.diagonal(x, 0, -2, -1).contiguous(), t(*shape, dtype=dtype))
            yield case("transpose contiguous", lambda x: x.transpose(-1, -2).contiguous(), t(*shape, dtype=dtype))
            yield case("reshape", lambda x: x.transpose(-1, -2).reshape(-1), t(*shape, dtype=dtype))
            yield case("contiguous", lambda x: x.contiguous(), t(*shape, dtype=dtype, layout="strided"))
            yield case("unfold", lambda x: x.unfold(-1, 8, 4), t(*shape, dtype=dtype))
            yield case("trace", torch.trace, t(33, 65, dtype=dtype))
        for pad in ((1, 2), (1, 1, 2, 2), (0, 3), (-1, 2)):
            for mode in ("constant", "reflect", "replicate", "circular"):
                if mode != "constant" and min(pad) < 0:
                    continue
                shape = (2, 8, 100) if len(pad) == 2 else (2, 8, 32, 40)
                yield case("pad", F.pad, t(*shape, dtype=dtype), pad, mode, note=mode)
        for mode in ("constant", "reflect", "replicate", "circular"):
            yield case("pad", F.pad, t(1, 2, 8, 9, 10, dtype=dtype), (1, 1, 1, 1, 1, 1), mode, note=mode)
            yield case("pad", F.pad, t(2, 8, 32, 40, dtype=dtype, layout="channels_last"), (1, 1, 2, 2), mode, note=f"{mode} channels_last")
        yield case("tril_indices", lambda x: torch.tril_indices(30, 40, device=x.device), t(1, grad=False))
        yield case("vander", torch.vander, t(30, dtype=dtype), 5)
        yield case("cross", torch.linalg.cross, t(30, 3, dtype=dtype), t(30, 3, dtype=dtype))
        yield case("renorm", torch.renorm, t(30, 3, dtype=dtype), 2, 0, 1.0)
        yield case("Embedding module", apply, module(lambda: nn.Embedding(100, 16, padding_idx=0), dtype), ints(100, 4, 9))
