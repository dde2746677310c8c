"""Resampling and the rearranging of images."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F

from .spec import BF16, F32, FLOATS, Case, case, t


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for shape in ((2, 8, 32, 32), (1, 3, 224, 224), (4, 64, 14, 14), (2, 5, 17, 19)):
            for layout in ("", "channels_last"):
                x = t(*shape, dtype=dtype, layout=layout)
                for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area"):
                    yield case("interpolate", F.interpolate, x, scale_factor=2, mode=mode, note=layout)
                    yield case("interpolate", F.interpolate, x, size=(24, 40), mode=mode, note=layout)
                for mode in ("bilinear", "bicubic"):
                    yield case("interpolate", F.interpolate, x, size=(20, 21), mode=mode, antialias=True, note=layout)
                    yield case("interpolate", F.interpolate, x, size=(20, 21), mode=mode, align_corners=True, note=layout)
                yield case("unfold", F.unfold, x, 3, padding=1, note=layout)
                yield case("unfold", F.unfold, x, 4, stride=4, note=layout)
                yield case("pixel_shuffle", lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2), x, note=layout)
                yield case("patches", _patches, t(shape[0], shape[1], 32, 32, dtype=dtype, layout=layout), note=layout)
        for mode in ("bilinear", "nearest", "bicubic"):
            for padding in ("zeros", "border", "reflection"):
                yield case("grid_sample", F.grid_sample, t(2, 8, 32, 32, dtype=dtype), t(2, 20, 24, 2, dtype=dtype), mode=mode, padding_mode=padding, align_corners=False)
        yield case("grid_sample", F.grid_sample, t(2, 8, 10, 11, 12, dtype=dtype), t(2, 5, 6, 7, 3, dtype=dtype), align_corners=False, note="3-D")
        yield case("affine_grid", F.affine_grid, t(2, 2, 3, dtype=dtype), (2, 3, 20, 24), align_corners=False)
        yield case("fold", F.fold, t(2, 8 * 9, 30 * 30, dtype=dtype), (32, 32), 3)
        yield case("pixel_unshuffle", F.pixel_unshuffle, t(2, 8, 32, 32, dtype=dtype), 2)
        yield case("channel_shuffle", F.channel_shuffle, t(2, 8, 32, 32, dtype=dtype), 2)
        for shape, mode in (((2, 8, 100), "linear"), ((2, 8, 100), "nearest"), ((2, 4, 8, 9, 10), "trilinear"), ((2, 4, 8, 9, 10), "nearest")):
            yield case("interpolate", F.interpolate, t(*shape, dtype=dtype), scale_factor=2, mode=mode)
    try:
        import torchvision
    except (ImportError, RuntimeError):  # absent, or built for another torch
        return
    for dtype in (F32, BF16):
        boxes = t(50, 4, fill="unit", grad=False)
        yield case("torchvision.nms", lambda b, s: torchvision.ops.nms(b, s, 0.5), boxes, t(50, grad=False))
        rois = t(20, 5, dtype=dtype, fill="full:0", grad=False)
        yield case("torchvision.roi_align", lambda x, r: torchvision.ops.roi_align(x, r, (7, 7)), t(2, 16, 32, 32, dtype=dtype), rois)
        yield case("torchvision.deform_conv2d", torchvision.ops.deform_conv2d, t(2, 16, 20, 20, dtype=dtype), t(2, 18, 18, 18, dtype=dtype), t(32, 16, 3, 3, dtype=dtype))


def _patches(x):  # type: ignore[no-untyped-def]
    n, c, h, w = x.shape
    return x.reshape(n, c, h // 8, 8, w // 8, 8).permute(0, 2, 4, 3, 5, 1).reshape(n, -1, 64 * c)
