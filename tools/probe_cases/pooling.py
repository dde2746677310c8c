"""Pooling in one, two and three dimensions."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F

from .spec import FLOATS, Case, case, t


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for shape in ((8, 64, 112, 112), (4, 16, 17, 19), (32, 512, 7, 7), (2, 3, 32, 32), (1, 8, 8, 8)):
            for layout in ("", "channels_last"):
                x = t(*shape, dtype=dtype, layout=layout)
                yield case("max_pool2d", F.max_pool2d, x, 3, 2, 1, note=layout)
                yield case("max_pool2d", F.max_pool2d, x, 2, note=layout)
                yield case("max_pool2d", F.max_pool2d, x, 2, return_indices=True, note=layout)
                yield case("avg_pool2d", F.avg_pool2d, x, 2, note=layout)
                yield case("avg_pool2d", F.avg_pool2d, x, 3, 2, 1, ceil_mode=True, count_include_pad=False, note=layout)
                for size in (1, 7, (3, 5)):
                    yield case("adaptive_avg_pool2d", F.adaptive_avg_pool2d, x, size, note=layout)
                    yield case("adaptive_max_pool2d", F.adaptive_max_pool2d, x, size, note=layout)
                yield case("lp_pool2d", F.lp_pool2d, x, 2.0, 2, note=layout)
                yield case("fractional_max_pool2d", F.fractional_max_pool2d, x, 2, output_ratio=(0.5, 0.5), note=layout)
                yield case("mean((2, 3))", lambda x: x.mean((2, 3)), x, note=layout)
                yield case("flatten mean", lambda x: x.flatten(2).mean(-1), x, note=layout)
        for shape in ((8, 64, 100), (4, 16, 1001), (2, 3, 33)):
            x = t(*shape, dtype=dtype)
            yield case("max_pool1d", F.max_pool1d, x, 3, 2, 1)
            yield case("max_pool1d", F.max_pool1d, t(*shape, dtype=dtype, grad=False), 3, 2, 1, note="no grad")
            yield case("avg_pool1d", F.avg_pool1d, x, 3, 2, 1)
            yield case("adaptive_avg_pool1d", F.adaptive_avg_pool1d, x, 1)
            yield case("adaptive_avg_pool1d", F.adaptive_avg_pool1d, x, 5)
            yield case("adaptive_max_pool1d", F.adaptive_max_pool1d, x, 5)
        for layout in ("", "channels_last"):
            x = t(2, 8, 16, 17, 18, dtype=dtype, layout=layout)
            yield case("max_pool3d", F.max_pool3d, x, 2, note=layout)
            yield case("avg_pool3d", F.avg_pool3d, x, 3, 2, 1, note=layout)
            yield case("adaptive_avg_pool3d", F.adaptive_avg_pool3d, x, (1, 2, 3), note=layout)
            yield case("adaptive_avg_pool3d", F.adaptive_avg_pool3d, x, 1, note=layout)
            yield case("adaptive_max_pool3d", F.adaptive_max_pool3d, x, (1, 2, 3), note=layout)
            yield case("fractional_max_pool3d", F.fractional_max_pool3d, x, 2, output_ratio=(0.5, 0.5, 0.5), note=layout)
        yield case("max_unpool2d", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), t(2, 8, 16, 16, dtype=dtype))
