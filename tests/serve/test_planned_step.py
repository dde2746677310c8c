"""The planned peak of a pass is that of the real decoder's own tensors: counted on tensors without memory.

Kernels are stood in for by what their Triton versions allocate.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from serving_shapes import own_options
from tonnage.budget.serving import own_engine
from tonnage.serve.batch import Batch
from tonnage.serve.models import decoder as decoding
from tonnage.serve.models import weights as products
from tonnage.serve.models.architecture import read_architecture
from tonnage.serve.models.decoder import Decoder
from tonnage.serve.models.weights import Builder
from tonnage.serve.startup import widths_of

META = torch.device("meta")


class Live(TorchDispatchMode):
    """The most bytes that tensors made within held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if torch.is_tensor(leaf) and (storage := leaf.untyped_storage())._cdata not in before:
                self._held[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._held.values()))
        return out


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def halved(gate_up: torch.Tensor) -> torch.Tensor:
        return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)

    def turned(query: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return torch.empty(query.shape, dtype=query.dtype, device=META)

    def product(x: torch.Tensor, weight8: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return linear(x, weight8.to(x.dtype)).mul_(scales) if x.shape[0] > 256 else x.new_empty(len(x), len(weight8))

    def grouped(rows: torch.Tensor, weight: torch.Tensor, _: object) -> torch.Tensor:
        return [weight.to(rows.dtype), rows.new_empty(rows.shape[0], weight.shape[1])][1]

    def normed(hidden: torch.Tensor, residual: torch.Tensor | None, *_: object, **__: object) -> tuple[Any, Any]:
        return torch.empty_like(hidden), hidden if residual is None else residual

    for name in ("store", "attend_decode", "attend_chunks"):
        monkeypatch.setattr(decoding, name, turned)
    monkeypatch.setattr(decoding, "add_norm", normed)
    monkeypatch.setattr(decoding, "ACTIVATIONS", {"silu": halved, "gelu_tanh": halved})
    monkeypatch.setattr(products, "matmul8", product)
    monkeypatch.setattr(products, "_in_turn", grouped)
    yield


def measured_bytes(name: str, weights: str, decodes: int, chunk: int) -> int:
    """Of one pass with one chunk; every decode and the chunk draw."""
    architecture = read_architecture(name)
    architecture = replace(architecture, layers=architecture.layers[:3])
    decoder = Decoder(architecture, Builder(META, torch.bfloat16, weights if weights != "bf16" else None), 8192)
    tokens, rows = decodes + chunk, decodes + (chunk > 0)
    batch = Batch(
        token_ids=torch.zeros(tokens, dtype=torch.int64, device=META),
        positions=torch.zeros(tokens, dtype=torch.int64, device=META),
        slots=torch.zeros(tokens, dtype=torch.int64, device=META),
        decodes=decodes,
        tables=torch.zeros(rows, 4, dtype=torch.int32, device=META),
        lengths=torch.zeros(rows, dtype=torch.int32, device=META),
        chunk_starts=torch.zeros(1 + (chunk > 0), dtype=torch.int32, device=META),
        longest_chunk=chunk,
        samples=torch.zeros(rows, dtype=torch.int64, device=META),
    )
    live = Live()
    with live, torch.inference_mode():
        decoder.forward(batch, [None] * 3)  # type: ignore[list-item]
    return live.peak_bytes


@pytest.mark.parametrize(
    "name", ["qwen3-0.6b", "llama-3.1-8b", "gemma-2-9b", "qwen3-14b", "qwen3-30b-a3b", "mixtral-8x7b"]
)
@pytest.mark.parametrize("weights", ["bf16", "int8"])
@pytest.mark.parametrize(("decodes", "chunk"), [(255, 7937), (256, 0), (63, 1000)])
def test_a_pass_holds_what_is_planned(name: str, weights: str, decodes: int, chunk: int) -> None:
    rows, tokens = decodes + (chunk > 0), decodes + chunk
    limits = own_options(context=8192, weights=weights, max_seqs=rows, batched_tokens=tokens)
    widths = widths_of(read_architecture(name))
    forward = own_engine._forward_bytes(widths, limits, tokens) - own_engine._SPLITS_BYTES
    planned = max(forward, own_engine._head_bytes(widths, limits, tokens))
    assert 0.9 * planned <= measured_bytes(name, weights, decodes, chunk) <= planned
