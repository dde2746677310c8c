"""Two models, or a model and something else, on one card: what each neighbour takes, and the share left for the model.

A neighbour is a size (a desktop, another process) or a model with its own flags, which gets the smallest share that
holds its users; the requested model gets the rest. Every process has its own CUDA context. Neighbours start first, one
after another: vLLM wants its whole share free when it starts, SGLang and TensorRT-LLM take a share of what is free
then.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from tonnage.budget.serving import vllm
from tonnage.budget.serving.forward import ForwardPass, forward_bytes
from tonnage.budget.serving.memory import ServingConfiguration
from tonnage.budget.serving.own_engine import context_term
from tonnage.budget.serving.weights import WEIGHT_FORMATS, stages, weight_terms
from tonnage.errors import RequestError
from tonnage.hardware import Cluster, Gpu
from tonnage.models.shape import ModelShape
from tonnage.planner.serving.search import ServingPlan, plan_serving
from tonnage.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """What else is on the card. `plan` is None unless it is an engine; `share` is the engine's, 0 without one."""

    words: str
    claimed_bytes: int
    share: float = 0.0
    plan: ServingPlan | None = None


def of_size(words: str, size_bytes: int, cluster: Cluster) -> Neighbour:
    """Return a neighbour that takes `size_bytes` of every card."""
    if size_bytes >= cluster.gpu.memory_bytes:
        whole, hint = format_bytes(cluster.gpu.memory_bytes), "Give a smaller size, or another card."
        raise RequestError(f"--beside {words} leaves nothing of {cluster.gpu.name}, which has {whole}.", hint=hint)
    return Neighbour(words=words, claimed_bytes=size_bytes)


def of_model(
    words: str,
    shape: ModelShape,
    asked: ServingConfiguration,
    cluster: Cluster,
    *,
    model: str,
    before: Sequence[Neighbour],
) -> Neighbour:
    """Return a model on one card, with the smallest share that holds its users beside those started `before`."""
    one = replace(cluster, gpus_per_host=1, hosts=1)
    taken = sum(each.claimed_bytes for each in before)
    if not shape.decoder.causal:
        return _encoder(words, shape, asked, one.gpu)
    # An embedding model samples no tokens; the logits of its users overestimate it by a negligible amount.
    served = shape if shape.logits else replace(shape, logits=True)
    trial = replace(asked, reserved_bytes=taken, max_seqs=asked.max_seqs or max(asked.users, 1))
    plan = plan_serving(served, one, trial, model=model)
    if not plan.fits:
        needed, room = (format_bytes(size) for size in (plan.best.budget.needed_bytes, plan.best.budget.room_bytes))
        problem = f"--beside {words!r} does not fit on {one.gpu.name}: it needs {needed}, and {room} are left for it."
        raise RequestError(problem, hint="Give it fewer users, a shorter context or smaller weights.")
    if not asked.utilization and asked.engine != "llama.cpp":
        plan = _least(served, one, trial, plan)
    claimed, share = plan.best.budget.total_bytes, plan.best.configuration.utilization
    return Neighbour(words=words, claimed_bytes=claimed, share=share, plan=plan)


def _least(shape: ModelShape, cluster: Cluster, asked: ServingConfiguration, plan: ServingPlan) -> ServingPlan:
    """Return the plan with the smallest share, in hundredths, that still holds all users."""

    @cache
    def with_share(hundredths: int) -> ServingPlan:
        return plan_serving(shape, cluster, replace(asked, utilization=hundredths / 100), model=plan.model)

    most = round(plan.best.configuration.utilization * 100)
    least = bisect_left(range(most), True, lo=1, key=lambda hundredths: with_share(hundredths).fits)
    return with_share(least) if least < most else plan


def _encoder(words: str, shape: ModelShape, asked: ServingConfiguration, gpu: Gpu) -> Neighbour:
    """Return a model without a KV cache: weights, a batch of its users, and the overhead of a vLLM process."""
    half = WEIGHT_FORMATS[asked.weights or ("bf16" if gpu.has_bf16 else "fp16")]
    (stage,) = stages(shape, 1)
    weights = sum(int(term.size_bytes) for term in weight_terms(shape, stage, 1, half))
    release = vllm.find_release(vllm.latest_version())
    tokens = min(asked.users * asked.context, vllm.default_batched_tokens(release, gpu, asked.context, 256))
    step = forward_bytes(shape, stage, ForwardPass(tokens, 0, 1, 2), held=4)
    inside = weights + step + int(vllm.non_torch_term(1, gpu).size_bytes)
    share = -(-inside * 100 // gpu.memory_bytes) / 100
    claimed = int(share * gpu.memory_bytes) + int(context_term(gpu).size_bytes)
    if claimed > gpu.memory_bytes:
        problem = f"--beside {words!r} does not fit on {gpu.name}."
        raise RequestError(problem, hint="Give it fewer users or a shorter context.")
    return Neighbour(words=words, claimed_bytes=claimed, share=share)


def reserved(asked: ServingConfiguration, neighbours: Sequence[Neighbour]) -> ServingConfiguration:
    """Return the configuration with the memory that neighbours leave."""
    return replace(asked, reserved_bytes=sum(each.claimed_bytes for each in neighbours))
