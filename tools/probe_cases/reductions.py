"""Reductions, scans, softmax, sorts and the operators that choose or count elements."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .spec import F32, FLOATS, Case, Made, case, ints, mask, t

SHAPES = ((7,), (1000,), (33, 65), (1024, 1024), (8, 128, 768), (64, 50257), (3, 1_000_003), (4, 3, 224, 224), (16_777_216,), (100_000, 3), (3, 100_000))


def cases() -> Iterator[Case]:
    yield from reductions()
    yield from scans()
    yield from softmaxes()
    yield from sorts()
    yield from choosing()


def dims_of(shape: tuple[int, ...]) -> list[int | tuple[int, ...] | None]:
    if len(shape) == 1:
        return [None, 0]
    return [None, 0, -1] + ([1, (0, 2)] if len(shape) == 3 else []) + ([(0, 2, 3), (2, 3)] if len(shape) == 4 else [])


def reductions() -> Iterator[Case]:
    operators = {
        "sum": torch.sum, "mean": torch.mean, "amax": torch.amax, "var": torch.var, "std": torch.std, "norm": torch.linalg.vector_norm,
        "logsumexp": torch.logsumexp, "var_mean": torch.var_mean, "count_nonzero": torch.count_nonzero,
    }  # fmt: skip
    one_dim = {"argmax": torch.argmax, "prod": torch.prod, "any": torch.any, "all": torch.all, "max": torch.max, "min": torch.min, "nansum": torch.nansum,
               "argmin": torch.argmin, "aminmax": torch.aminmax}  # fmt: skip
    for dtype in FLOATS:
        for shape in SHAPES:
            for name, call in operators.items():
                for dim in dims_of(shape):
                    if dim is None and name in ("amax", "logsumexp"):
                        dim = tuple(range(len(shape)))
                    options = {} if dim is None else {"dim": dim}
                    yield case(name, call, t(*shape, dtype=dtype), **options)
            for name, call in one_dim.items():
                for dim in (None, 0, -1)[: 1 + len(shape)]:
                    if dim is None:
                        yield case(name, call, t(*shape, dtype=dtype), backward=name != "prod")
                    else:
                        yield case(name, call, t(*shape, dtype=dtype), dim=dim, backward=name != "prod")
        for layout in ("transposed", "strided", "expanded"):
            yield case("sum", torch.sum, t(512, 1000, dtype=dtype, layout=layout), note=layout)
            yield case("sum", torch.sum, t(512, 1000, dtype=dtype, layout=layout), dim=0, note=layout)
            yield case("sum", torch.sum, t(512, 1000, dtype=dtype, layout=layout), dim=1, note=layout)
            yield case("amax", torch.amax, t(512, 1000, dtype=dtype, layout=layout), dim=(0, 1), note=layout)
        for shape in ((33, 65), (1024, 1024), (8, 128, 768), (16_777_216,), (100_000, 3)):
            yield case("sum", torch.sum, t(*shape, dtype=dtype), dim=0, dtype=F32, note="dtype=float32")
            yield case("sum", torch.sum, t(*shape, dtype=dtype), dim=-1, keepdim=True)
            yield case("sum", torch.sum, t(*shape, dtype=dtype), dtype=F32, note="all, dtype=float32")
            yield case("mean", torch.mean, t(*shape, dtype=dtype), dim=-1, keepdim=True, dtype=F32)
            for p in (1, 2, 3, float("inf"), 0):
                yield case("norm", torch.linalg.vector_norm, t(*shape, dtype=dtype), p)
                yield case("norm", torch.linalg.vector_norm, t(*shape, dtype=dtype), p, dim=-1)
            yield case("norm", torch.linalg.vector_norm, t(*shape, dtype=dtype), 2, dtype=F32, note="to float32")
            yield case("torch.norm", lambda x: x.norm(), t(*shape, dtype=dtype))
            yield case("torch.norm", lambda x: x.norm(dim=-1, keepdim=True), t(*shape, dtype=dtype))
            yield case("var", lambda x: x.var(-1, unbiased=False, keepdim=True), t(*shape, dtype=dtype))
            yield case("nanmean", torch.nanmean, t(*shape, dtype=dtype))
            yield case("normalize", torch.nn.functional.normalize, t(*shape, dtype=dtype), dim=-1)
        for rows in (1, 10, 100, 1000, 3000, 10_000, 100_000, 1_000_000):
            for columns in (1, 4, 64, 100, 768, 1024, 4096):
                if rows * columns <= 1 << 28:
                    yield case("sum", torch.sum, t(rows, columns, dtype=dtype, grad=False), dim=0, note="bias gradient")
                    yield case("sum", torch.sum, t(rows, columns, dtype=dtype, grad=False), dim=1, note="rows")
                    yield case("mean", torch.mean, t(rows, columns, dtype=dtype, grad=False))
    for dtype in (torch.int64, torch.int32, torch.bool, torch.uint8):
        for shape in ((7,), (33, 65), (1024, 1024), (16_777_216,)):
            for name in ("sum", "any", "all", "prod", "max", "argmax", "count_nonzero"):
                if dtype is torch.bool and name in ("argmax", "max"):
                    continue
                yield case(name, getattr(torch, name), t(*shape, dtype=dtype))
                yield case(name, getattr(torch, name), t(*shape, dtype=dtype), dim=0)
            yield case("(x == y).sum", lambda x, y: (x == y).sum(), t(*shape, dtype=dtype), t(*shape, dtype=dtype))
            yield case("(x == y).float().mean", lambda x, y: (x == y).float().mean(), t(*shape, dtype=dtype), t(*shape, dtype=dtype))


def scans() -> Iterator[Case]:
    for dtype in FLOATS:
        for shape in ((7,), (1000,), (33, 65), (1024, 1024), (8, 128, 768), (1_000_003,), (64, 50257)):
            for dim in (0, -1)[: len(shape)]:
                for name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"):
                    yield case(name, getattr(torch, name), t(*shape, dtype=dtype), dim=dim, backward=name != "cumprod")
        yield case("cumsum", torch.cumsum, t(100, 1000, dtype=dtype, layout="transposed"), dim=-1, note="transposed")
        yield case("cumprod", torch.cumprod, t(8, 30, dtype=dtype, fill="unit"), dim=-1)
        yield case("diff", torch.diff, t(33, 65, dtype=dtype))
        yield case("trapezoid", torch.trapezoid, t(33, 65, dtype=dtype))
    for dtype in (torch.int64, torch.int32, torch.bool):
        for shape in ((1000,), (8, 1024), (1_000_003,)):
            yield case("cumsum", torch.cumsum, t(*shape, dtype=dtype), dim=-1)
            yield case("cumsum", torch.cumsum, t(*shape, dtype=dtype), dim=0)


def softmaxes() -> Iterator[Case]:
    for dtype in FLOATS:
        for shape in ((7,), (33, 65), (64, 50257), (8, 128, 768), (2, 12, 512, 512), (2, 19, 128, 128), (4096, 1024), (1024, 32000)):
            for dim in (-1, 1, 0):
                if dim == 1 and len(shape) < 3:
                    continue
                for name in ("softmax", "log_softmax"):
                    yield case(name, getattr(torch, name), t(*shape, dtype=dtype), dim=dim)
                    yield case(name, getattr(torch, name), t(*shape, dtype=dtype), dim=dim, dtype=F32, note="dtype=float32")
        yield case("softmax", torch.softmax, t(512, 1000, dtype=dtype, layout="transposed"), dim=-1, note="transposed")
        yield case("softmax", torch.softmax, t(512, 1000, dtype=dtype, layout="narrowed"), dim=-1, note="narrowed")
        yield case("softmax to", lambda x: torch.softmax(x, -1, dtype=F32).to(x.dtype), t(512, 1000, dtype=dtype))
        yield case("softmin", torch.nn.functional.softmin, t(33, 65, dtype=dtype), dim=-1)
        yield case("gumbel_softmax", torch.nn.functional.gumbel_softmax, t(33, 65, dtype=dtype), dim=-1)
        yield case("gumbel_softmax", torch.nn.functional.gumbel_softmax, t(33, 65, dtype=dtype), hard=True, dim=-1)
        yield case("_masked_softmax", lambda x, m: torch._masked_softmax(x, m, -1, 0), t(2, 8, 64, 64, dtype=dtype), mask(64, 64), backward=False)


def sorts() -> Iterator[Case]:
    shapes = ((7,), (1000,), (5000,), (33, 65), (64, 1024), (64, 4097), (8, 50257), (1_000_003,), (1024, 100), (100_000, 10), (4, 8, 128), (16, 128256))
    for dtype in (*FLOATS, torch.int64, torch.int32):
        floating = dtype.is_floating_point
        for shape in shapes:
            for dim in (-1, 0)[: len(shape)]:
                for name in ("sort", "argsort"):
                    yield case(name, getattr(torch, name), t(*shape, dtype=dtype), dim=dim)
                yield case("sort", torch.sort, t(*shape, dtype=dtype), dim=dim, stable=True, descending=True, backward=False)
                for k in (1, 5, 50, 500, 2000):
                    if k <= shape[dim]:
                        yield case("topk", torch.topk, t(*shape, dtype=dtype), k, dim=dim, backward=k == 5)
            yield case("topk", torch.topk, t(*shape, dtype=dtype), 5, sorted=False, backward=False) if shape[-1] >= 5 else case("sort", torch.sort, t(3))
            yield case("kthvalue", torch.kthvalue, t(*shape, dtype=dtype), 3)
            yield case("median", torch.median, t(*shape, dtype=dtype))
            yield case("median", torch.median, t(*shape, dtype=dtype), dim=-1)
            yield case("msort", torch.msort, t(*shape, dtype=dtype), backward=False)
            if shape[0] <= 5000:
                yield case("mode", torch.mode, t(*shape, dtype=dtype), dim=-1)
            if floating:
                yield case("nanmedian", torch.nanmedian, t(*shape, dtype=dtype))
            yield case("unique", torch.unique, ints(50, *shape, dtype=dtype) if not floating else t(*shape, dtype=dtype, grad=False))
            yield case("unique", torch.unique, t(*shape, dtype=dtype, grad=False), return_inverse=True, return_counts=True)
            yield case("unique", torch.unique, t(*shape, dtype=dtype, grad=False), sorted=False, return_counts=True)
            yield case("unique_consecutive", torch.unique_consecutive, t(*shape, dtype=dtype, grad=False), return_inverse=True, return_counts=True)
            if len(shape) == 2 and shape[0] < 2000:
                yield case("unique dim", torch.unique, t(*shape, dtype=dtype, grad=False), dim=0)
        yield case("sort", torch.sort, t(100, 1000, dtype=dtype, layout="transposed"), dim=-1, note="transposed")
        yield case("topk", torch.topk, t(100, 1000, dtype=dtype, layout="transposed"), 7, note="transposed")
    for shape in ((7,), (1000,), (33, 65), (1_000_003,)):
        yield case("quantile", torch.quantile, t(*shape), 0.3, dim=-1)
        yield case("quantile", torch.quantile, t(*shape), Made(lambda d: torch.tensor([0.1, 0.9], device=d)), dim=-1)
        yield case("nanquantile", torch.nanquantile, t(*shape), 0.3, dim=-1)


def choosing() -> Iterator[Case]:
    for n in (7, 1000, 5000, 100_000, 1_000_003, 16_777_216):
        yield case("bincount", torch.bincount, ints(100, n))
        yield case("bincount", torch.bincount, ints(100, n), minlength=1000)
        yield case("bincount", torch.bincount, ints(100, n), weights=t(n, grad=False))
        yield case("bincount", torch.bincount, ints(100_000, n), note="many bins")
        yield case("histc", torch.histc, t(n, grad=False), bins=100)
        yield case("histc", torch.histc, t(n, grad=False), bins=100, min=-3, max=3)
        yield case("nonzero", torch.nonzero, mask(n))
        yield case("nonzero", torch.nonzero, mask(n), as_tuple=True)
        yield case("nonzero", torch.nonzero, mask(n, fill="bool:0.01"), note="sparse")
        yield case("argwhere", torch.argwhere, t(n, grad=False))
        yield case("masked_select", torch.masked_select, t(n), mask(n))
        yield case("masked_select", torch.masked_select, t(n), mask(n, fill="bool:0.01"), note="sparse")
        yield case("x[mask]", lambda x, m: x[m], t(n), mask(n))
        yield case("isin", torch.isin, ints(100, n), ints(100, 10))
        yield case("isin", torch.isin, ints(100, n), ints(1000, 500))
        for m in (10, 1000):
            yield case("searchsorted", torch.searchsorted, Made(lambda d, m=m: torch.linspace(-2, 2, m, device=d)), t(n, grad=False))
            yield case("bucketize", torch.bucketize, t(n, grad=False), Made(lambda d, m=m: torch.linspace(-2, 2, m, device=d)))
        yield case("randperm", lambda n, x: torch.randperm(n, device=x.device), n, t(1, grad=False))
    for shape in ((33, 65), (4, 8, 128), (1024, 1024)):
        yield case("nonzero", torch.nonzero, mask(*shape))
        yield case("nonzero", torch.nonzero, mask(*shape), as_tuple=True)
        yield case("x[mask]", lambda x, m: x[m], t(*shape, 16), mask(*shape), note="rows by mask")
        yield case("x[mask]", lambda x, m: x[m], t(*shape), mask(shape[0]), note="leading mask")
    for dtype in FLOATS:
        for shape in ((1000,), (8, 50257), (64, 100), (1, 128256)):
            for k in (1, 5):
                for replacement in (True, False):
                    yield case("multinomial", torch.multinomial, t(*shape, dtype=dtype, fill="unit", grad=False), k, replacement=replacement)
    yield case("randperm", lambda n, x: torch.randperm(n, device=x.device, dtype=torch.int32), 5000, t(1, grad=False), note="int32")
    yield case("combinations", torch.combinations, t(50))
    yield case("cartesian_prod", torch.cartesian_prod, t(50), t(30))
    yield case("histogramdd", torch.histogramdd, t(100, 2, grad=False), [5, 5])
