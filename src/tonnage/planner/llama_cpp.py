"""Where llama.cpp puts a model's layers, and how fast it can decode there: each is read where it lies, one after the other."""

from tonnage.budget.llama_cpp import LlamaBudget, llama_budget
from tonnage.budget.serving import ServingConfiguration
from tonnage.hardware import Cluster
from tonnage.models.shape import ModelShape


def placed(shape: ModelShape, cluster: Cluster, asked: ServingConfiguration) -> LlamaBudget:
    """The budget on the cards of one host and the memory that comes with them."""
    return llama_budget(shape, asked, cluster.gpu, gpus=cluster.gpus_per_host, host_bytes=cluster.host_memory_bytes)


def decode_step_s(shape: ModelShape, budget: LlamaBudget, cluster: Cluster) -> float:
    """One token for every slot at the full context: cards in turn, then the host at the speed of its own memory.

    Of a mixture, the share of the experts that at least one slot picks is read.
    """
    users = budget.configuration.users
    experts, idle = _experts(shape, budget, users)
    cards = sum(card.weights + card.cache for card in budget.cards)
    on_cards = cards - idle * (experts - budget.host_expert_bytes)
    # Of the embedding, a row a token is read.
    case = budget.case
    host = budget.host.weights + budget.host.cache - case.recipe.embedding_bytes
    if budget.gpu_layers == 0 and shape.tied:
        host += case.recipe.output_bytes
    on_host = max(host - idle * budget.host_expert_bytes, 0)
    speed = cluster.host_memory_bytes_per_s or cluster.gpu.bandwidth_bytes_per_s
    return max(on_cards, 0) / cluster.gpu.bandwidth_bytes_per_s + on_host / speed


def _experts(shape: ModelShape, budget: LlamaBudget, users: int) -> tuple[int, float]:
    """Bytes of all experts, and the share of them that no slot picks in a step."""
    total = sum(layer.experts for layer in budget.case.layers)
    if not total:
        return 0, 0.0
    picked = [layer.feed_forward for layer in shape.decoder.layers if layer.feed_forward and layer.feed_forward.experts]
    return total, sum((1 - mlp.experts_per_token / mlp.experts) ** users for mlp in picked) / len(picked)
