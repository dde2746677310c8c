"""Loss functions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from .spec import F32, FLOATS, Case, Made, case, ints, t

LOGITS = ((5, 3), (64, 10), (128, 1000), (2048, 50257), (512, 32000), (100, 128256))


def cases() -> Iterator[Case]:
    yield from cross_entropies()
    yield from elementwise()
    yield from others()


def cross_entropies() -> Iterator[Case]:
    for dtype in FLOATS:
        for rows, classes in LOGITS:
            x, y = t(rows, classes, dtype=dtype), ints(classes, rows)
            yield case("cross_entropy", F.cross_entropy, x, y)
            yield case("cross_entropy", F.cross_entropy, x, y, reduction="none")
            yield case("cross_entropy", F.cross_entropy, x, y, reduction="sum", ignore_index=1)
            yield case("cross_entropy", F.cross_entropy, x, y, label_smoothing=0.1)
            yield case("cross_entropy", F.cross_entropy, x, y, weight=t(classes, dtype=dtype, grad=False, fill="unit"))
            yield case("cross_entropy", F.cross_entropy, x, y, weight=t(classes, dtype=dtype, grad=False, fill="unit"), label_smoothing=0.1)
            yield case("cross_entropy", F.cross_entropy, x, t(rows, classes, dtype=dtype, grad=False, fill="unit"), note="class probabilities")
            yield case("cross_entropy", F.cross_entropy, x, t(rows, classes, dtype=dtype, grad=False, fill="unit"), label_smoothing=0.1, note="class probabilities")
            yield case("cross_entropy float", lambda x, y: F.cross_entropy(x.float(), y), x, y)
            yield case("cross_entropy shifted", lambda x, y: F.cross_entropy(x[:-1].float(), y[1:]), x, y)
            yield case("nll_loss", F.nll_loss, x, y)
            yield case("nll_loss", F.nll_loss, x, y, reduction="none")
        for shape in ((2, 19, 64, 64), (4, 21, 33, 33), (8, 1000, 4)):
            x, y = t(*shape, dtype=dtype), ints(shape[1], shape[0], *shape[2:])
            for options in ({}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"ignore_index": 1}, {"reduction": "sum"}):
                yield case("cross_entropy", F.cross_entropy, x, y, note="images", **options)
            yield case("cross_entropy", F.cross_entropy, x, y, weight=t(shape[1], dtype=dtype, grad=False, fill="unit"), note="images weighted")
            yield case("cross_entropy", F.cross_entropy, x, t(*shape, dtype=dtype, grad=False, fill="unit"), note="images, probabilities")
        yield case("cross_entropy", F.cross_entropy, t(2, 19, 64, 64, dtype=dtype, layout="channels_last"), ints(19, 2, 64, 64), note="channels_last")
        yield case("cross_entropy", F.cross_entropy, t(1000, dtype=dtype), ints(1000), note="one sample")
        yield case("cross_entropy", F.cross_entropy, t(64, 100, dtype=dtype, layout="transposed"), ints(100, 64), note="transposed")


def elementwise() -> Iterator[Case]:
    plain = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy_with_logits", "poisson_nll_loss")
    for dtype in FLOATS:
        for shape in ((33, 65), (1024, 1024), (8, 128, 768), (7,)):
            for reduction in ("mean", "sum", "none"):
                for name in plain:
                    yield case(name, getattr(F, name), t(*shape, dtype=dtype), t(*shape, dtype=dtype, grad=False, fill="unit"), reduction=reduction)
                yield case("binary_cross_entropy", F.binary_cross_entropy, t(*shape, dtype=dtype, fill="unit"), t(*shape, dtype=dtype, fill="unit", grad=False),
                           reduction=reduction)  # fmt: skip
                yield case("kl_div", F.kl_div, t(*shape, dtype=dtype), t(*shape, dtype=dtype, fill="unit", grad=False), reduction=reduction)
                yield case("kl_div", F.kl_div, t(*shape, dtype=dtype), t(*shape, dtype=dtype, fill="unit", grad=False), reduction=reduction, log_target=True)
                yield case("gaussian_nll_loss", F.gaussian_nll_loss, t(*shape, dtype=dtype), t(*shape, dtype=dtype, grad=False), t(*shape, dtype=dtype, fill="unit"),
                           reduction=reduction)  # fmt: skip
            yield case("mse_loss", F.mse_loss, t(*shape, dtype=dtype), t(*shape, dtype=dtype), note="both with grad")
            yield case("mse_loss", F.mse_loss, t(*shape, dtype=dtype), t(*shape, grad=False), note="fp32 target")
            yield case("mse_loss", F.mse_loss, t(*shape, dtype=dtype), t(*shape, grad=False), weight=t(*shape, grad=False), note="weighted")
            yield case("bce_with_logits", F.binary_cross_entropy_with_logits, t(*shape, dtype=dtype), t(*shape, dtype=dtype, grad=False, fill="unit"),
                       weight=t(*shape, dtype=dtype, grad=False), pos_weight=t(shape[-1], dtype=dtype, grad=False))  # fmt: skip


def others() -> Iterator[Case]:
    for dtype in FLOATS:
        for n, d in ((16, 33), (256, 512)):
            a, b, c = (t(n, d, dtype=dtype) for _ in range(3))
            sign = Made(lambda dev, n=n, dt=dtype: torch.where(torch.rand(n, device=dev) < 0.5, -1.0, 1.0).to(dt))
            yield case("cosine_embedding_loss", F.cosine_embedding_loss, a, b, sign)
            yield case("triplet_margin_loss", F.triplet_margin_loss, a, b, c)
            yield case("triplet_margin_loss", F.triplet_margin_loss, a, b, c, swap=True)
            yield case("margin_ranking_loss", F.margin_ranking_loss, t(n, dtype=dtype), t(n, dtype=dtype), sign)
            yield case("hinge_embedding_loss", F.hinge_embedding_loss, t(n, dtype=dtype), sign)
            yield case("multi_margin_loss", F.multi_margin_loss, a, ints(d, n))
            yield case("multilabel_margin_loss", F.multilabel_margin_loss, a, ints(d, n, d))
            yield case("multilabel_soft_margin_loss", F.multilabel_soft_margin_loss, a, t(n, d, dtype=dtype, grad=False, fill="unit"))
            yield case("cosine_similarity", F.cosine_similarity, a, b)
            yield case("cosine_similarity", lambda a, b: F.cosine_similarity(a[:, None], b[None], dim=-1), a, b, note="pairs")
            yield case("pairwise_distance", F.pairwise_distance, a, b)
            if dtype is F32:
                for p in (1.0, 2.0, 3.0):
                    yield case("cdist", torch.cdist, a, b, p)
                yield case("cdist", torch.cdist, a, b, 2.0, compute_mode="donot_use_mm_for_euclid_dist")
                yield case("pdist", F.pdist, a)
            yield case("contrastive", lambda a, b: F.cross_entropy(F.normalize(a) @ F.normalize(b).T * 10, torch.arange(a.shape[0], device=a.device)), a, b, note="CLIP")
    for time, batch, classes in ((50, 16, 20), (200, 4, 32)):
        for targets in (10, 30):
            lengths = Made(lambda d, b=batch, n=time: torch.full((b,), n, dtype=torch.long, device=d))
            wanted = Made(lambda d, b=batch, n=targets: torch.full((b,), n, dtype=torch.long, device=d))
            cpu = Made(lambda d, b=batch, n=time: torch.full((b,), n, dtype=torch.int32))
            cpu_wanted = Made(lambda d, b=batch, n=targets: torch.full((b,), n, dtype=torch.int32))
            x = t(time, batch, classes)
            labels = Made(lambda d, b=batch, n=targets, c=classes: torch.randint(1, c, (b, n), device=d))
            yield case("ctc_loss", lambda x, *a: F.ctc_loss(x.log_softmax(-1), *a), x, labels, lengths, wanted)
            yield case("ctc_loss", lambda x, *a: F.ctc_loss(x.log_softmax(-1), *a, reduction="none", zero_infinity=True), x, labels, lengths, wanted)
            packed = Made(lambda d, b=batch, n=targets, c=classes: torch.randint(1, c, (b * n,), dtype=torch.int32))
            yield case("ctc_loss", lambda x, *a: F.ctc_loss(x.log_softmax(-1), *a), x, packed, cpu, cpu_wanted, note="cuDNN form")
