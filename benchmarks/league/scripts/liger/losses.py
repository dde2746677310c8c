"""Losses on given logits or log-probabilities, and with the projection in front of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# Vocabularies of the models that a sweep over models goes through.
VOCABULARIES = {
    "llama_2_7b": 32000, "llama_3_8b": 128256, "qwen2.5_7b": 152064, "qwen2.5_14b": 152064, "qwen2.5_72b": 152064,
    "deepseek_v2_lite": 102400, "deepseek_v3": 129280,
}  # fmt: skip


def build(case: dict[str, Any]) -> tuple[Callable, Callable]:
    """What one round calls, forward and backward."""
    builders = {
        "cross_entropy": cross_entropy, "fused_linear_cross_entropy": projected_cross_entropy, "fused_linear_jsd": projected_jsd,
        "megatron_cross_entropy": vocabulary_parallel,
    }  # fmt: skip
    return builders.get(case["kernel"], divergence)(case)


def rows_and_vocabulary(case: dict[str, Any]) -> tuple[int, int]:
    x, config = case["x"], case["config"]
    if isinstance(x, str):
        return config["bsz"] * config["seq_len"], VOCABULARIES[x]
    if case["late"]:
        return x, config["vocab_size"]
    return config["B"] * config["T"], x


def alone(loss: Tensor) -> None:
    loss.backward()


def cross_entropy(case: dict[str, Any]) -> tuple[Callable, Callable]:
    rows, vocabulary = rows_and_vocabulary(case)
    logits = torch.randn(rows, vocabulary, requires_grad=True)
    target = torch.randint(vocabulary, (rows,))
    loss = nn.CrossEntropyLoss()
    if case["provider"] == "liger":
        from liger_kernel.transformers import LigerCrossEntropyLoss

        loss = LigerCrossEntropyLoss()
    return lambda: loss(logits, target), alone


def divergence(case: dict[str, Any]) -> tuple[Callable, Callable]:
    """Distances of two distributions: the first is a function of a leaf, so that its gradient is kept, too."""
    rows, vocabulary = rows_and_vocabulary(case)
    kernel = case["kernel"]
    of_input = partial(torch.softmax if kernel == "tvd" else torch.log_softmax, dim=-1)
    of_target = partial(torch.log_softmax if kernel == "jsd" else torch.softmax, dim=-1)
    given = of_input(torch.randn(rows, vocabulary, requires_grad=True))
    target = of_target(torch.randn(rows, vocabulary))
    if case["provider"] == "liger":
        from liger_kernel.transformers import LigerJSD, LigerKLDIVLoss, LigerTVDLoss

        makers = {"kl_div": partial(LigerKLDIVLoss, reduction="batchmean"), "jsd": LigerJSD, "tvd": LigerTVDLoss}
        loss = makers[kernel]()
    else:
        by_row = jensen_shannon_by_row if case["late"] else jensen_shannon
        loss = {"kl_div": nn.KLDivLoss(reduction="batchmean"), "jsd": by_row, "tvd": total_variation}[kernel]
    return lambda: loss(given, target), lambda result: result.backward(retain_graph=True)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    distance = torch.abs(p - q) / 2.0
    return torch.sum(distance) / p.size(0)


def jensen_shannon(log_q: Tensor, log_p: Tensor, dtype: torch.dtype = torch.float) -> Tensor:
    log_p, log_q = log_p.to(torch.float), log_q.to(torch.float)
    kl = nn.KLDivLoss(reduction="batchmean", log_target=True)
    mixed = torch.lerp(torch.exp(log_p), torch.exp(log_q), 0.5)
    loss = 0.5 * kl(torch.log(mixed), log_p) + 0.5 * kl(torch.log(mixed), log_q)
    return loss.to(dtype)


def jensen_shannon_by_row(log_q: Tensor, log_p: Tensor, dtype: torch.dtype = torch.float) -> Tensor:
    log_p, log_q = log_p.to(torch.float), log_q.to(torch.float)
    kl = nn.KLDivLoss(reduction="none", log_target=True)
    mixed = torch.lerp(torch.exp(log_q), torch.exp(log_p), 0.5)
    loss = 0.5 * kl(torch.log(mixed), log_p).sum(dim=-1) + 0.5 * kl(torch.log(mixed), log_q).sum(dim=-1)
    return (loss / log_q.shape[0]).sum().to(dtype)


def projected_cross_entropy(case: dict[str, Any]) -> tuple[Callable, Callable]:
    config, rows = case["config"], case["x"]
    head, _other = (nn.Linear(config["H"], config["V"], bias=False, dtype=config["dtype"]) for _ in range(2))
    hidden = torch.randn(rows, config["H"], dtype=config["dtype"], requires_grad=True)
    target = torch.randint(config["V"], (rows,))
    loss = nn.CrossEntropyLoss()
    if case["provider"] == "liger":
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        fused = LigerFusedLinearCrossEntropyLoss()
        return lambda: fused(head.weight, hidden, target), keeping(alone, _other)
    return lambda: loss(head(hidden), target), keeping(alone, _other)


def keeping(function: Callable, *_kept: Any) -> Callable:
    """The function, which keeps what its benchmark made and did not use."""
    return lambda *given: (function(*given), _kept)[0]


def projected_jsd(case: dict[str, Any]) -> tuple[Callable, Callable]:
    config, rows, dtype = case["config"], case["x"], case["config"]["dtype"]
    hidden_size, vocabulary = (
        (config["hidden_size"], config["vocab_size"]) if case["late"] else (config["H"], config["V"])
    )
    student, teacher = (
        nn.Parameter(torch.rand(vocabulary, hidden_size, dtype=dtype), requires_grad=True) for _ in range(2)
    )
    given = torch.rand(rows, hidden_size, dtype=dtype, requires_grad=True)
    wanted = torch.rand(rows, hidden_size, dtype=dtype)
    if case["provider"] == "liger":
        from liger_kernel.transformers import LigerFusedLinearJSD

        fused = LigerFusedLinearJSD()
        return lambda: fused(given, student, wanted, teacher, None), alone
    distance = jensen_shannon_by_row if case["late"] else jensen_shannon

    def forward() -> Tensor:
        student_logits = nn.functional.linear(given, student)
        teacher_logits = nn.functional.linear(wanted, teacher)
        student_logs = torch.log_softmax(student_logits / 1.0, dim=-1)
        teacher_logs = torch.log_softmax(teacher_logits / 1.0, dim=-1)
        return distance(student_logs, teacher_logs, dtype)

    return forward, alone


def vocabulary_parallel(case: dict[str, Any]) -> tuple[Callable, Callable]:
    from liger_kernel.megatron.cross_entropy import LigerMegatronCrossEntropy

    config, vocabulary = case["config"], case["x"]
    logits = torch.randn(config["S"], config["B"], vocabulary, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, vocabulary, (config["S"], config["B"]))
    loss = LigerMegatronCrossEntropy()

    def forward() -> Tensor:
        logits.grad = None
        return loss(logits, target, tp_group=None)

    return forward, lambda losses: losses.sum().backward()
