"""Measure the kernels of serving on this card, beside PyTorch's attention on contiguous tensors in the same run.

    python benchmarks/serve_kernels.py [--out kernels.json] [--sweep]

| kernel   | at                                                                    | figure                           |
|----------|-----------------------------------------------------------------------|----------------------------------|
| decode   | 256 to 4 sequences of 1024 tokens, or of 64 to 1984 mixed, BF16, FP8  | TB/s of keys and values read     |
| chunks   | 8 prompts of 1024, and one chunk of 512 after 7680 tokens             | TFLOP/s, the causal half counted |
| others   | 256 rows as in a decoding step, and 8192 as in a step of prompts      | µs                               |

Each is captured in a CUDA graph of several calls, on different layers so that nothing stays in the card's cache; medians by
CUDA events. `--sweep` tries other tiles, warps and stages of the attention kernels. Needs a CUDA card and Triton.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tonnage.serve import kernels
from tonnage.serve.batch import LayerCache
from tonnage.serve.kernels.chunks import attend_chunks_triton
from tonnage.serve.kernels.decode import Tuning, attend_decode_triton

LAYERS, RUNS, BLOCK, HEAD_DIM = 4, 9, 16, 128
MODELS = {"llama 32/8": (32, 8), "qwen3-0.6b 16/8": (16, 8), "qwen3-14b 40/8": (40, 8)}
DECODES = ((256, 1024), (128, 1024), (64, 1024), (16, 1024), (4, 1024))
SWEPT = "qwen3-0.6b 16/8"
# Keys in a tile, warps, stages; of chunks the rows of a program before them.
DECODE_SWEEP = (
    (64, 4, 3),
    (64, 4, 5),
    (32, 4, 3),
    (32, 4, 5),
    (64, 2, 3),
    (64, 2, 5),
    (128, 4, 3),
    (128, 8, 3),
    (128, 8, 5),
)
CHUNKS_SWEEP = ((128, 64, 8, 3), (128, 64, 8, 5), (64, 64, 4, 3), (64, 64, 4, 5), (128, 128, 8, 3), (64, 32, 4, 5))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--sweep", action="store_true", help="try other shapes of the attention kernels too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("serve_kernels: this torch sees no CUDA card.")
    torch.manual_seed(0)
    figures: dict[str, dict[str, float]] = {}
    for measure in (measure_decode, measure_chunks, measure_rows):
        for name, row in measure(options.sweep):
            figures[name] = row
            print(f"{name:54s} " + "  ".join(f"{unit} {number:9.2f}" for unit, number in row.items()), flush=True)
    if options.out:
        card = torch.cuda.get_device_name()
        options.out.write_text(
            json.dumps({"gpu": card, "torch": torch.__version__, "kernels": figures}, indent=1) + "\n"
        )


def microseconds(calls: list[Callable[[], object]]) -> float:
    """Of one call, from a graph of all of them."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    found = []
    for _ in range(RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e3 / len(calls))
    return median(found)


def make_layers(rows: int, context: int, kv_heads: int, *, fp8: bool) -> tuple[list[LayerCache], Tensor, Tensor]:
    """Caches full of random numbers, with tables in no order, and lengths."""
    most = context // BLOCK
    shape = (rows * most + 1, BLOCK, kv_heads, HEAD_DIM)
    layers = []
    for _ in range(LAYERS):
        pages = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
        scales = [torch.ones(shape[:3], device="cuda", dtype=torch.bfloat16) for _ in "kv"]
        layers.append(
            LayerCache(*(page.to(torch.float8_e4m3fn) for page in pages), *scales) if fp8 else LayerCache(*pages)
        )
    tables = (torch.randperm(rows * most, device="cuda") + 1).int().view(rows, most)
    return layers, tables, torch.full((rows,), context, device="cuda", dtype=torch.int32)


def measure_decode(sweep: bool) -> Any:
    """Ours by model, batch and cache; PyTorch's on contiguous keys and values."""
    for (model, (heads, kv_heads)), (rows, context) in ((m, d) for m in MODELS.items() for d in DECODES):
        query = torch.randn(rows, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        elements = 2 * rows * context * kv_heads * HEAD_DIM
        yield (
            f"sdpa contiguous, {model}, {rows} × {context}",
            _reading(contiguous(query, kv_heads, context), 2 * elements),
        )
        for fp8 in (False, True):
            layers, tables, lengths = make_layers(rows, 2 * context, kv_heads, fp8=fp8)
            bytes_read = elements * (1 if fp8 else 2) + (elements // HEAD_DIM * 2 if fp8 else 0)
            for mixed in (False, True):
                lengths.copy_(_mixed(rows, context) if mixed else torch.full((rows,), context))
                name = f"decode {'fp8' if fp8 else 'bf16'}, {model}, {rows} × {context}{' mixed' * mixed}"
                for words, tuning, splits in _ways(rows) if sweep and model == SWEPT else [("", None, 0)]:
                    calls = [_decode(query, layer, tables, lengths, tuning, splits) for layer in layers]
                    yield name + words, _reading(microseconds(calls), bytes_read)
                if mixed:
                    order = lengths.argsort(descending=True)
                    calls = [_decode(query, layer, tables, lengths, order=order) for layer in layers]
                    yield name + ", longest first", _reading(microseconds(calls), bytes_read)


def _mixed(rows: int, mean: int) -> Tensor:
    """Lengths of that mean, in no order."""
    return (torch.linspace(64 - mean, mean - 64, rows) + mean).round().int()[torch.randperm(rows)]


def _ways(rows: int) -> list[tuple[str, Tuning | None, int]]:
    """What a sweep tries: other tiles where sequences are many, other numbers of parts where they are few."""
    if rows == 256:
        return [("", None, 0), *((f" {each}", Tuning(*each), 0) for each in DECODE_SWEEP), (" 2 parts", None, 2)]
    return [("", None, 0), *((f" {splits} parts", None, splits) for splits in (1, 2, 4, 8, 16, 32))]


def _decode(
    query: Tensor,
    layer: LayerCache,
    tables: Tensor,
    lengths: Tensor,
    tuning: Tuning | None = None,
    splits: int = 0,
    order: Tensor | None = None,
) -> Callable[[], Tensor]:
    options: dict[str, Any] = {"scale": HEAD_DIM**-0.5, "tuning": tuning, "splits": splits, "order": order}
    return lambda: attend_decode_triton(query, layer, tables, lengths, **options)


def _reading(time_us: float, bytes_read: int) -> dict[str, float]:
    return {"µs": time_us, "TB/s": bytes_read / time_us / 1e6}


def contiguous(query: Tensor, kv_heads: int, context: int) -> float:
    """Microseconds of PyTorch's attention with the query heads of a group as rows, which is its fastest way."""
    grouped = query.view(len(query), kv_heads, -1, HEAD_DIM)
    shape = (len(query), kv_heads, context, HEAD_DIM)
    pairs = [[torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "kv"] for _ in range(LAYERS)]
    return microseconds([lambda pair=pair: functional.scaled_dot_product_attention(grouped, *pair) for pair in pairs])


def measure_chunks(sweep: bool) -> Any:
    """Whole prompts, and a chunk far into one."""
    for (model, (heads, kv_heads)), (rows, context, chunk), fp8 in (
        (m, c, f) for m in MODELS.items() for c in ((8, 1024, 1024), (1, 8192, 512)) for f in (False, True)
    ):
        layers, tables, lengths = make_layers(rows, context, kv_heads, fp8=fp8)
        query = torch.randn(rows * chunk, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        starts = torch.arange(0, (rows + 1) * chunk, chunk, device="cuda", dtype=torch.int32)
        pairs = rows * chunk * (context - chunk + (chunk + 1) / 2)
        for tuning in [None, *((each[0], Tuning(*each[1:])) for each in CHUNKS_SWEEP if sweep and model == SWEPT)]:
            calls = [_chunks(query, layer, tables, lengths, starts, chunk, tuning) for layer in layers]
            time_us = microseconds(calls)
            name = f"chunks {'fp8' if fp8 else 'bf16'}, {model}, {rows} × {chunk} of {context}"
            yield (
                name + (f" {tuning}" if tuning else ""),
                {
                    "µs": time_us,
                    "TFLOP/s": 4 * pairs * heads * HEAD_DIM / time_us / 1e6,
                },
            )


def _chunks(
    query: Tensor, layer: LayerCache, tables: Tensor, lengths: Tensor, starts: Tensor, longest: int, tuning: Any
) -> Callable[[], Tensor]:
    scale = HEAD_DIM**-0.5
    return lambda: attend_chunks_triton(query, layer, tables, lengths, starts, longest, scale=scale, tuning=tuning)


def measure_rows(_sweep: bool) -> Any:
    """What is bound by memory or by its launch; Qwen3-0.6B's and 14B's widths."""
    for rows in (256, 8192):
        for width in (1024, 5120):
            hidden = [torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(2 * LAYERS)]
            weight = torch.ones(width, device="cuda", dtype=torch.bfloat16)
            calls = [_add_norm(*pair, weight) for pair in zip(hidden[::2], hidden[1::2], strict=True)]
            yield f"add_norm {rows} × {width}", {"µs": microseconds(calls)}
        gates = [torch.randn(rows, 2 * 3072, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
        yield (
            f"silu_mul {rows} × 3072",
            {"µs": microseconds([lambda gate=gate: kernels.silu_mul(gate) for gate in gates])},
        )
        for fp8 in (False, True):
            yield f"store {'fp8' if fp8 else 'bf16'} 16/8, {rows} tokens", {"µs": _store_us(rows, fp8=fp8)}
    for dtype in (torch.float32, torch.bfloat16):
        yield f"draw 256 × 151936 {str(dtype).removeprefix('torch.')}", {"µs": _draw_us(dtype)}
    for rows in (4, 64):
        yield f"top-p {rows} × 151936", _top_p(rows)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        for rows in (1, 16, 64, 256):
            yield f"matmul8 {rows} × 5120 × 17408 {str(dtype).removeprefix('torch.')}", _matmul8(rows, dtype)


def _add_norm(hidden: Tensor, residual: Tensor, weight: Tensor) -> Callable[[], object]:
    return lambda: kernels.add_norm(hidden, residual, weight, 1e-6)


def _store_us(rows: int, *, fp8: bool) -> float:
    layers, _, _ = make_layers(rows // BLOCK, BLOCK, 8, fp8=fp8)
    merged = torch.randn(rows, 32 * HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    query, key, value = (
        part.unflatten(1, (-1, HEAD_DIM)) for part in merged.split([n * HEAD_DIM for n in (16, 8, 8)], 1)
    )
    angles = torch.rand(4096, HEAD_DIM // 2, device="cuda")
    norm = torch.ones(HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    positions, slots = torch.randint(4096, (rows,), device="cuda"), torch.randperm(rows, device="cuda") + BLOCK
    options: dict[str, Any] = {"cos": angles, "sin": angles, "query_norm": norm, "key_norm": norm, "eps": 1e-6}
    return microseconds(
        [lambda layer=layer: kernels.store(query, key, value, positions, slots, layer, **options) for layer in layers]
    )


def _draw_us(dtype: torch.dtype) -> float:
    logits = [torch.randn(256, 151936, device="cuda", dtype=dtype) for _ in range(2)]
    temperatures = torch.full((256,), 0.6, device="cuda")
    seeds, positions = torch.arange(256, device="cuda"), torch.arange(256, device="cuda")
    return microseconds([lambda row=row: kernels.sample(row, temperatures, seeds, positions) for row in logits])


def _top_p(rows: int) -> dict[str, float]:
    logits = [torch.randn(rows, 151936, device="cuda") * 3 for _ in range(2)]
    heat, top_k, top_p, min_p = (torch.full((rows,), each, device="cuda") for each in (0.6, 2.0**31, 0.95, 0.0))
    ways = {"µs": kernels.logit_threshold, "sorting µs": kernels.logit_threshold_reference}
    return {
        name: microseconds([lambda row=row, way=way: way(row, heat, top_k, top_p, min_p) for row in logits])
        for name, way in ways.items()
    }


def _matmul8(rows: int, dtype: torch.dtype) -> dict[str, float]:
    x = torch.randn(rows, 5120, device="cuda", dtype=torch.bfloat16)
    weights = [(torch.randn(17408, 5120, device="cuda") * 30).to(dtype) for _ in range(LAYERS)]
    scales = torch.ones(17408, device="cuda")
    time_us = microseconds([lambda weight=weight: kernels.matmul8(x, weight, scales) for weight in weights])
    wide = [weight.to(torch.bfloat16) for weight in weights]
    return {
        "µs": time_us,
        "bf16 µs": microseconds([lambda weight=weight: functional.linear(x, weight) for weight in wide]),
    }


if __name__ == "__main__":
    main()
