"""How long an engine takes to generate the completions of one step.

Sequences run in waves of as many as the KV cache holds, each of the full length: a decode step reads or computes with
the weights, whichever takes longer, and reads the cache at half its growth; prompts are prefilled once per group. The
attained shares of the GPU's peaks are measured (`budget/data/rollout.toml`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tonnage.budget import table
from tonnage.budget.serving.memory import ServingBudget
from tonnage.budget.time.roofline import peak_rate
from tonnage.hardware import Cluster
from tonnage.ledger import Category
from tonnage.models.shape import ModelShape
from tonnage.planner.serving.search import all_reduces_s, share_read

if TYPE_CHECKING:
    from tonnage.planner.rl.search import RlRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The rollout of one engine among `copies` concurrent ones: `batch` sequences decode together, in `waves` waves."""

    copies: int
    samples: int
    batch: int
    waves: int
    prefill_s: float
    decode_s: float
    step_s: float

    @property
    def seconds(self) -> float:
        """Seconds of prefill and decode."""
        return self.prefill_s + self.decode_s

    @staticmethod
    def blocks(engine: ServingBudget, request: "RlRequest") -> float:
        """Return cache blocks per finished sequence, with its share of the group's common prompt."""
        layout = engine.kv.layout
        shared = layout.shared_blocks(request.prompt)
        own = layout.sequence_blocks(request.seq, engine.kv.batched_tokens) - shared
        return own + shared / request.group


def rollout(
    shape: ModelShape, cluster: Cluster, engine: ServingBudget, request: "RlRequest", apart: int
) -> Rollout | None:
    """Predict the rollout; None if not even one sequence fits."""
    asked, kv = engine.configuration, engine.kv
    copies = (apart or cluster.gpus) // asked.tp
    samples = -(-request.samples // copies)
    batch = min(samples, asked.max_seqs, int(kv.usable_blocks / Rollout.blocks(engine, request)))
    if batch < 1 or not kv.holds(1, request.seq):
        return None
    full, rest = divmod(samples, batch)
    step_s, last_s = (_step_s(shape, cluster, engine, request, each) if each else 0.0 for each in (batch, rest))
    prompts = -(-request.prompts // copies) * request.prompt
    rate = peak_rate(cluster.gpu, "bf16") * table("rollout")["products_share"] * table("rollout")["step_share"]
    return Rollout(
        copies=copies, samples=samples, batch=batch, waves=full + bool(rest),
        prefill_s=2 * shape.active_parameters * prompts / asked.tp / rate, step_s=step_s,
        decode_s=request.completion * (full * step_s) + request.completion * last_s,
    )  # fmt: skip


def _step_s(shape: ModelShape, cluster: Cluster, engine: ServingBudget, request: "RlRequest", batch: int) -> float:
    """Return one decode step of `batch` sequences, at half their growth."""
    asked, layout, gpu = engine.configuration, engine.kv.layout, cluster.gpu
    shares: dict[str, float] = table("rollout")
    bandwidth = gpu.bandwidth_bytes_per_s * shares["bandwidth_share"]
    weights_s = engine.ledger[Category.PARAMETERS] * share_read(shape, batch) / bandwidth
    rate = peak_rate(gpu, "bf16") * shares["products_share"]
    products_s = 2 * shape.active_parameters * batch / asked.tp / rate
    length = request.prompt + request.completion // 2
    tokens = sum(min(length, group.window or length) for group in layout.groups)
    cache_s = batch * tokens * layout.bytes_per_block / layout.block / bandwidth
    busy_s = max(weights_s, products_s) + cache_s
    return busy_s / shares["step_share"] + all_reduces_s(shape, asked, cluster, batch)
