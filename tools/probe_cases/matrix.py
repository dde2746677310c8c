"""Products of matrices: cuBLAS and cuBLASLt, the copies that transposed operands force, and mixed precisions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from .spec import BF16, F16, F32, FLOATS, HALVES, Case, Made, apply, case, module, t

SIZES = ((8, 16, 24), (1, 1, 1), (33, 65, 17), (127, 513, 255), (512, 768, 3072), (2048, 4096, 4096), (8192, 1024, 128256 // 8))


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


@contextlib.contextmanager
def on_side_stream() -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def autocast(dtype: torch.dtype) -> Any:
    def context() -> Any:
        return torch.autocast("cuda" if torch.cuda.is_available() else "cpu", dtype=dtype)

    return context


def cases() -> Iterator[Case]:
    yield from first_calls()
    yield from plain()
    yield from batched()
    yield from linear()
    yield from small_precisions()
    yield from under_autocast()


def first_calls() -> Iterator[Case]:
    """First in the process, so that first_call_events show the workspaces being made."""
    yield case("addmm", torch.addmm, t(64, grad=False), t(32, 48, grad=False), t(48, 64, grad=False), note="cuBLASLt first in the process")
    yield case("mm", torch.mm, t(64, 64), t(64, 64), note="cuBLAS first in the main thread, then in the backward thread")
    yield case("mm", torch.mm, t(64, 64, dtype=BF16), t(64, 64, dtype=BF16), note="bf16 after fp32")
    yield case("linear", F.linear, t(8, 64), t(64, 64), t(64), note="bias in the backward thread")
    yield case("mm", torch.mm, t(64, 64), t(64, 64), around=on_side_stream, note="side stream")
    yield case("addmm", torch.addmm, t(64), t(32, 48), t(48, 64), around=on_side_stream, note="side stream")


def plain() -> Iterator[Case]:
    for dtype in FLOATS:
        for m, k, n in SIZES:
            a, b = t(m, k, dtype=dtype), t(k, n, dtype=dtype)
            at, bt = t(m, k, dtype=dtype, layout="transposed"), t(k, n, dtype=dtype, layout="transposed")
            yield case("mm", torch.mm, a, b)
            yield case("mm", torch.mm, a, bt, note="b transposed")
            yield case("mm", torch.mm, at, b, note="a transposed")
            yield case("addmm", torch.addmm, t(n, dtype=dtype), a, b, note="bias 1-D")
            yield case("addmm", torch.addmm, t(m, n, dtype=dtype), a, b, note="bias 2-D")
            yield case("addmm", torch.addmm, t(n, dtype=dtype), a, bt, note="bias 1-D, b transposed", backward=False)
            yield case("addmm", torch.addmm, t(m, 1, dtype=dtype), a, b, note="bias column", backward=False)
            yield case("addmm", torch.addmm, t(n, dtype=dtype), a, b, beta=0.5, alpha=2.0, note="beta, alpha", backward=False)
        for layout in ("narrowed", "strided"):
            yield case("mm", torch.mm, t(96, 128, dtype=dtype, layout=layout), t(128, 64, dtype=dtype), note=layout)
            yield case("mm", torch.mm, t(96, 128, dtype=dtype), t(128, 64, dtype=dtype, layout=layout), note=f"b {layout}")
            yield case("addmm", torch.addmm, t(64, dtype=dtype), t(96, 128, dtype=dtype, layout=layout), t(128, 64, dtype=dtype), note=layout)
        yield case("mm", torch.mm, t(96, 128, dtype=dtype, layout="expanded"), t(128, 64, dtype=dtype), note="expanded")
        yield case("mm", torch.mm, t(0, 128, dtype=dtype), t(128, 64, dtype=dtype), note="empty")
        for name, size in (("relu", (256, 512, 1024)), ("gelu", (256, 512, 1024)), ("relu", (33, 65, 17)), ("gelu", (33, 65, 17))):
            m, k, n = size
            yield case("_addmm_activation", torch._addmm_activation, t(n, dtype=dtype), t(m, k, dtype=dtype), t(k, n, dtype=dtype),
                       use_gelu=name == "gelu", backward=False)  # fmt: skip
        yield case("mv", torch.mv, t(512, 768, dtype=dtype), t(768, dtype=dtype))
        yield case("mv", torch.mv, t(512, 768, dtype=dtype, layout="transposed"), t(768, dtype=dtype), note="transposed")
        yield case("mv", torch.mv, t(512, 768, dtype=dtype, layout="strided"), t(768, dtype=dtype), note="strided")
        yield case("addmv", torch.addmv, t(512, dtype=dtype), t(512, 768, dtype=dtype), t(768, dtype=dtype))
        for n in (5, 1000, 1_000_003):
            yield case("dot", torch.dot, t(n, dtype=dtype), t(n, dtype=dtype))
        yield case("vdot", torch.vdot, t(1000, dtype=dtype), t(1000, dtype=dtype))
        yield case("outer", torch.outer, t(100, dtype=dtype), t(77, dtype=dtype))
        yield case("addr", torch.addr, t(100, 77, dtype=dtype), t(100, dtype=dtype), t(77, dtype=dtype))
        yield case("chain_matmul", torch.linalg.multi_dot, [t(32, 64, dtype=dtype), t(64, 16, dtype=dtype), t(16, 128, dtype=dtype)])
    for m, k, n in SIZES[3:6]:
        yield case("mm", torch.mm, t(m, k), t(k, n), around=tf32, note="tf32")
        yield case("addmm", torch.addmm, t(n), t(m, k), t(k, n), around=tf32, note="tf32, bias 1-D")
    for dtype in (torch.float64, torch.complex64):
        yield case("mm", torch.mm, t(64, 96, dtype=dtype), t(96, 48, dtype=dtype))
        yield case("bmm", torch.bmm, t(3, 64, 96, dtype=dtype), t(3, 96, 48, dtype=dtype))


def batched() -> Iterator[Case]:
    for dtype in FLOATS:
        for b, m, k, n in ((4, 32, 48, 40), (3, 33, 17, 65), (96, 256, 64, 256), (64, 1024, 128, 1024), (1, 64, 64, 64)):
            x, y = t(b, m, k, dtype=dtype), t(b, k, n, dtype=dtype)
            yield case("bmm", torch.bmm, x, y)
            yield case("bmm", torch.bmm, x, t(b, k, n, dtype=dtype, layout="transposed"), note="b transposed")
            yield case("bmm", torch.bmm, t(b, m, k, dtype=dtype, layout="strided"), y, note="strided")
            yield case("bmm", torch.bmm, x, t(b, k, n, dtype=dtype, layout="expanded"), note="b expanded")
            yield case("baddbmm", torch.baddbmm, t(b, m, n, dtype=dtype), x, y)
            yield case("baddbmm", torch.baddbmm, t(m, n, dtype=dtype), x, y, beta=0.0, note="broadcast, beta 0", backward=False)
        heads = {"layout": "heads_inside"}
        for q, k in ((t(2, 8, 128, 64, dtype=dtype, **heads), t(2, 8, 64, 128, dtype=dtype)),
                     (t(2, 8, 128, 64, dtype=dtype), t(2, 8, 64, 128, dtype=dtype, layout="transposed")),
                     (t(2, 8, 128, 64, dtype=dtype), t(64, 128, dtype=dtype)),
                     (t(2, 8, 128, 64, dtype=dtype), t(8, 64, 128, dtype=dtype)),
                     (t(2, 8, 128, 64, dtype=dtype, **heads), t(64, 32, dtype=dtype)),
                     (t(2, 1, 128, 64, dtype=dtype), t(1, 8, 64, 32, dtype=dtype)),
                     (t(128, 64, dtype=dtype), t(8, 64, 32, dtype=dtype)),
                     (t(64, dtype=dtype), t(8, 64, 32, dtype=dtype)),
                     (t(8, 32, 64, dtype=dtype), t(64, dtype=dtype)),
                     (t(64, dtype=dtype), t(64, 32, dtype=dtype)),
                     (t(2, 5, 7, 3, dtype=dtype), t(3, 3, dtype=dtype))):  # fmt: skip
            yield case("matmul", torch.matmul, q, k)
        yield case("matmul", lambda q, k: torch.matmul(q, k.transpose(2, 3)), t(2, 8, 100, 64, dtype=dtype, **heads),
                   t(2, 8, 100, 64, dtype=dtype, **heads), note="q @ k.T of heads inside")  # fmt: skip
        for equation, shapes in (("bqhd,bkhd->bhqk", ((2, 64, 8, 32), (2, 64, 8, 32))), ("bhqk,bkhd->bqhd", ((2, 8, 64, 64), (2, 64, 8, 32))),
                                 ("bsd,dhe->bshe", ((2, 64, 128), (128, 8, 16))), ("bij,bjk->bik", ((3, 20, 30), (3, 30, 40))),
                                 ("i,j->ij", ((64,), (32,))), ("ij,ij->i", ((64, 32), (64, 32))), ("ii->i", ((64, 64),)),
                                 ("btd,btd->bt", ((2, 64, 128), (2, 64, 128))), ("becd,edf->becf", ((2, 4, 16, 32), (4, 32, 64))),
                                 ("bsec,bsm->ebcm", ((2, 64, 4, 16), (2, 64, 32))), ("ij->ji", ((64, 32),)), ("ij->", ((64, 32),))):  # fmt: skip
            yield case("einsum", torch.einsum, equation, *[t(*s, dtype=dtype) for s in shapes], note=equation)
        yield case("tensordot", torch.tensordot, t(3, 4, 5, dtype=dtype), t(4, 5, 6, dtype=dtype), dims=2)
        yield case("bilinear", F.bilinear, t(16, 20, dtype=dtype), t(16, 30, dtype=dtype), t(40, 20, 30, dtype=dtype), t(40, dtype=dtype))
        yield case("kron", torch.kron, t(8, 9, dtype=dtype), t(5, 6, dtype=dtype))


def linear() -> Iterator[Case]:
    for dtype in FLOATS:
        for lead in ((5,), (2, 128), (2, 7, 33), (8, 1024), (2, 3, 4, 5)):
            for d_in, d_out in ((64, 128), (768, 3072), (4096, 1024), (37, 3), (768, 1), (1, 64)):
                x, w = t(*lead, d_in, dtype=dtype), t(d_out, d_in, dtype=dtype)
                yield case("linear", F.linear, x, w, t(d_out, dtype=dtype), note="bias")
                yield case("linear", F.linear, x, w, note="no bias")
        yield case("linear", F.linear, t(64, dtype=dtype), t(32, 64, dtype=dtype), t(32, dtype=dtype), note="1-D input, bias")
        yield case("linear", F.linear, t(64, dtype=dtype), t(32, 64, dtype=dtype), note="1-D input")
        for layout in ("transposed", "narrowed", "strided", "expanded"):
            x = t(4, 96, 64, dtype=dtype, layout=layout)
            yield case("linear", F.linear, x, t(128, 64, dtype=dtype), t(128, dtype=dtype), note=f"bias, input {layout}")
            yield case("linear", F.linear, x, t(128, 64, dtype=dtype), note=f"no bias, input {layout}")
        frozen = t(256, 128, dtype=dtype, grad=False)
        yield case("linear", F.linear, t(4, 32, 128, dtype=dtype), frozen, t(256, dtype=dtype, grad=False), note="frozen weight and bias")
        yield case("linear", F.linear, t(4, 32, 128, dtype=dtype, grad=False), t(256, 128, dtype=dtype), t(256, dtype=dtype), note="input without grad")
    yield case("linear", F.linear, t(16384, 4096, dtype=BF16), t(14336, 4096, dtype=BF16), note="Llama MLP")
    yield case("linear", F.linear, t(4096, 4096, dtype=BF16), t(128256, 4096, dtype=BF16), note="Llama head")
    yield case("linear", F.linear, t(8192, 768), t(50257, 768), note="GPT-2 head fp32")
    yield case("linear", F.linear, t(8192, 768, dtype=BF16), t(50257, 768, dtype=BF16), note="GPT-2 head bf16")


def small_precisions() -> Iterator[Case]:
    f8 = torch.float8_e4m3fn

    def f8_tensor(*shape: int) -> Made:
        return Made(lambda device: torch.randn(shape, device=device).to(f8))

    def scaled(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, **options: Any) -> torch.Tensor:
        return torch._scaled_mm(a, b.t(), sa, sb, **options)

    for m, k, n in ((64, 128, 256), (2048, 4096, 4096), (16, 32, 48)):
        one = t(1, fill="full:1", grad=False)
        rows = (t(m, 1, fill="full:1", grad=False), t(1, n, fill="full:1", grad=False))
        yield case("_scaled_mm", scaled, f8_tensor(m, k), f8_tensor(n, k), Made(_one), Made(_one), out_dtype=BF16, note="tensorwise")
        yield case("_scaled_mm", scaled, f8_tensor(m, k), f8_tensor(n, k), Made(_one), Made(_one), out_dtype=BF16, use_fast_accum=True, note="fast accumulation")
        yield case("_scaled_mm", scaled, f8_tensor(m, k), f8_tensor(n, k), *rows, out_dtype=BF16, note="rowwise")
        yield case("_scaled_mm", scaled, f8_tensor(m, k), f8_tensor(n, k), one, one, out_dtype=F32, note="to fp32, scales 1-D")
        eight = {"dtype": torch.int8}
        yield case("_int_mm", torch._int_mm, t(m, k, **eight), t(k, n, **eight))
        yield case("_int_mm", torch._int_mm, t(m, k, **eight), t(k, n, layout="transposed", **eight), note="b transposed")
    for dtype in HALVES:
        offsets = Made(lambda device: torch.tensor([64, 128, 192, 256], dtype=torch.int32, device=device))
        for d_in, d_out in ((128, 256), (2048, 1024)):
            yield case("_grouped_mm", torch._grouped_mm, t(256, d_in, dtype=dtype), t(4, d_in, d_out, dtype=dtype), offs=offsets, note="2-D by 3-D")
            yield case("_grouped_mm", torch._grouped_mm, t(256, d_in, dtype=dtype), t(4, d_in, d_out, dtype=dtype, layout="transposed"), offs=offsets,
                       note="2-D by 3-D transposed")  # fmt: skip
        yield case("_grouped_mm", torch._grouped_mm, t(4, 64, 128, dtype=dtype), t(4, 128, 256, dtype=dtype), note="3-D by 3-D")


def _one(device: str) -> torch.Tensor:
    return torch.ones((), device=device)


def under_autocast() -> Iterator[Case]:
    for dtype in (BF16, F16):
        around = autocast(dtype)
        yield case("autocast linear", F.linear, t(4, 32, 128), t(256, 128), t(256), around=around)
        yield case("autocast linear", F.linear, t(4, 32, 128, dtype=dtype), t(256, 128), t(256), around=around, note="half input")
        yield case("autocast mlp", apply, module(lambda: torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))),
                   t(8, 64), around=around)  # fmt: skip
        yield case("autocast matmul", torch.matmul, t(2, 4, 32, 64), t(2, 4, 64, 32), around=around)
        yield case("autocast softmax", torch.softmax, t(32, 100, dtype=dtype), -1, around=around)
        yield case("autocast layer_norm", F.layer_norm, t(32, 128, dtype=dtype), (128,), t(128), t(128), around=around)
        yield case("autocast cat", lambda a, b: torch.cat([a, b]), t(32, 100, dtype=dtype), t(32, 100), around=around)
        yield case("autocast conv2d", F.conv2d, t(2, 16, 32, 32), t(32, 16, 3, 3), t(32), padding=1, around=around)
        yield case("autocast batch_norm", apply, module(lambda: torch.nn.BatchNorm2d(16)), t(2, 16, 32, 32, dtype=dtype), around=around)
        yield case("autocast cross_entropy", F.cross_entropy, t(32, 100, dtype=dtype), Made(lambda d: torch.randint(0, 100, (32,), device=d)), around=around)
        yield case("autocast mse_loss", F.mse_loss, t(32, 100, dtype=dtype), t(32, 100), around=around)
        yield case("autocast sum", torch.sum, t(32, 100, dtype=dtype), around=around)
        yield case("autocast pow", torch.pow, t(32, 100, dtype=dtype), 2, around=around)
        yield case("autocast norm", torch.norm, t(32, 100, dtype=dtype), around=around)
        yield case("autocast lstm", lambda m, x: m(x)[0], module(lambda: torch.nn.LSTM(64, 128)), t(20, 4, 64), around=around)
