"""Where llama.cpp puts a model's layers, and its decoding speed: each layer is read where it is, one after another."""

from dataclasses import replace

from tonnage.budget.serving.llama_cpp import MARGIN_BYTES, LlamaBudget, llama_budget
from tonnage.budget.serving.memory import ServingConfiguration
from tonnage.hardware import Cluster
from tonnage.models.shape import ModelShape


def placed(shape: ModelShape, cluster: Cluster, asked: ServingConfiguration) -> LlamaBudget:
    """Return the budget on the GPUs of one host and its memory."""
    return llama_budget(shape, asked, cluster.gpu, gpus=cluster.gpus_per_host, host_bytes=cluster.host_memory_bytes)


def fewest_experts(shape: ModelShape, cluster: Cluster, asked: ServingConfiguration) -> int:
    """Return the fewest layers with experts on the host that let all else fit on the GPUs; 0 if none do."""
    layers = len(shape.decoder.layers)
    low, high = 1, layers + 1
    while low < high:
        middle = (low + high) // 2
        found = placed(shape, cluster, replace(asked, gpu_layers=layers + 1, cpu_experts=middle))
        fits = found.fits and found.total_bytes <= found.room_bytes - MARGIN_BYTES
        low, high = (low, middle) if fits else (middle + 1, high)
    return low if low <= layers else 0


def decode_step_s(shape: ModelShape, budget: LlamaBudget, cluster: Cluster) -> float:
    """Return one decode step of all slots at full context: GPUs in turn, then the host at its memory's speed.

    Of a mixture, only the experts that at least one slot picks are read.
    """
    users = budget.configuration.users
    experts, idle = _experts(shape, budget, users)
    cards = sum(card.weights + card.cache for card in budget.cards)
    on_cards = cards - idle * (experts - budget.host_expert_bytes)
    # Only one row of the embedding is read per token.
    case = budget.case
    host = budget.host.weights + budget.host.cache - case.recipe.embedding_bytes
    if budget.gpu_layers == 0 and shape.tied:
        host += case.recipe.output_bytes
    on_host = max(host - idle * budget.host_expert_bytes, 0)
    speed = cluster.host_memory_bytes_per_s or cluster.gpu.bandwidth_bytes_per_s
    return max(on_cards, 0) / cluster.gpu.bandwidth_bytes_per_s + on_host / speed


def _experts(shape: ModelShape, budget: LlamaBudget, users: int) -> tuple[int, float]:
    """Return the bytes of all experts, and the share of them that no slot picks in a step."""
    total = sum(layer.experts for layer in budget.case.layers)
    if not total:
        return 0, 0.0
    picked = [layer.feed_forward for layer in shape.decoder.layers if layer.feed_forward and layer.feed_forward.experts]
    return total, sum((1 - mlp.experts_per_token / mlp.experts) ** users for mlp in picked) / len(picked)
