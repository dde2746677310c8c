"""Losses of preference and distillation with the projection in front of them, whole as TRL has them or in Liger's chunks."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def build(case: dict[str, Any]) -> tuple[Callable, Callable]:
    """What one round calls, forward and backward."""
    kernel = case["kernel"]
    if kernel.startswith("distill"):
        forward = distilled(case)
    elif kernel == "kto_loss":
        forward = unpaired(case)
    elif "grpo" in kernel:
        forward = grouped(case)
    else:
        forward = paired(case)
    return forward, lambda loss: loss.backward()


def linear(size: int, vocabulary: int, dtype: torch.dtype, bias: bool = False) -> nn.Linear:
    return nn.Linear(size, vocabulary, bias=bias, dtype=dtype)


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def label_logs(logits: Tensor, labels: Tensor, ignored: int = -100) -> Tensor:
    """The mean log-probability of each sequence's labels."""
    mask = labels != ignored
    labels = torch.where(labels == ignored, 0, labels)
    logs = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (logs * mask).sum(-1) / mask.sum(-1)


def paired(case: dict[str, Any]) -> Callable[[], Tensor]:
    config, batch, dtype = case["config"], case["x"], case["config"]["dtype"]
    # Both heads are made for either.
    head, other = (linear(config["H"], config["V"], dtype) for _ in range(2))
    hidden = torch.randn(batch, config["T"], config["H"], dtype=dtype, requires_grad=True)
    target = torch.randint(config["V"], (batch, config["T"]))
    if case["provider"] == "liger":
        from liger_kernel.chunked_loss.cpo_loss import LigerFusedLinearCPOFunction
        from liger_kernel.chunked_loss.orpo_loss import LigerFusedLinearORPOFunction
        from liger_kernel.chunked_loss.simpo_loss import LigerFusedLinearSimPOFunction

        fused = {
            "fused_linear_orpo_loss": LigerFusedLinearORPOFunction, "fused_linear_cpo_loss": LigerFusedLinearCPOFunction,
            "fused_linear_simpo_loss": LigerFusedLinearSimPOFunction,
        }[case["kernel"]]  # fmt: skip
        return lambda: (first(fused.apply(hidden, head.weight, target)), other)[0]
    kernel = case["kernel"]

    def of_batch() -> tuple[Tensor, ...]:
        half = batch // 2
        logits = (hidden @ head.weight.t()).float()
        chosen = logits[:half].view(-1, logits.shape[-1])
        likelihood = functional.cross_entropy(chosen, target[:half].view(-1))
        logs = label_logs(logits, target)
        return logs[:half], logs[half:], logits[:half], logits[half:], likelihood

    def forward() -> Tensor:
        chosen, rejected, _chosen_logits, _rejected_logits, likelihood = of_batch()
        if kernel == "fused_linear_orpo_loss":
            odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
            losses = 0.1 * functional.logsigmoid(odds)
        else:
            difference = chosen - rejected
            losses = functional.logsigmoid(0.1 * difference) + functional.logsigmoid(-0.1 * difference) * 0.0
        return likelihood * 1.0 - losses.mean()

    return lambda: (forward(), other)[0]


def unpaired(case: dict[str, Any]) -> Callable[[], Tensor]:
    config, batch, dtype, bias = case["config"], case["x"], case["config"]["dtype"], case["config"]["bias"]
    heads = [linear(config["H"], config["V"], dtype, bias) for _ in range(4)]
    head, reference = (heads[2], heads[3]) if case["provider"] == "liger" else (heads[0], heads[1])
    hidden = torch.randn(batch, config["T"], config["H"], dtype=dtype)
    target = torch.randint(config["V"], (batch, config["T"]))
    wanted = torch.randint(2, (batch,), dtype=torch.bool)
    kl = torch.randn(1, dtype=dtype)
    reference_hidden = torch.randn(batch, config["T"], config["H"], dtype=dtype)
    if case["provider"] == "liger":
        from liger_kernel.chunked_loss import LigerFusedLinearKTOLoss

        fused = LigerFusedLinearKTOLoss(ignore_index=config["ignore_index"], beta=config["beta"], use_ref_model=True)
        return lambda: (
            first(
                fused(
                    _input=hidden, lin_weight=head.weight, target=target, preference_labels=wanted, bias=head.bias,
                    ref_input=reference_hidden, ref_weight=reference.weight, ref_bias=reference.bias, kl=kl,
                )
            ),
            heads,
        )[0]  # fmt: skip
    ignored = config["ignore_index"]

    def of_batch() -> tuple[Tensor, ...]:
        outputs = hidden @ head.weight.t()
        outputs = outputs + head.bias
        logits = outputs.float()
        logs = label_logs(logits, target, ignored)
        return logs[wanted], logs[~wanted], logits[wanted], logits[~wanted]

    def of_reference() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            logits = reference_hidden @ reference.weight.t()
            logits = logits + reference.bias
            logs = label_logs(logits, target, ignored)
            return logs[wanted], logs[~wanted]

    def forward() -> Tensor:
        chosen, rejected, chosen_logits, rejected_logits = of_batch()
        reference_chosen, reference_rejected = of_reference()
        chosen_losses = 1 - torch.sigmoid(config["beta"] * ((chosen - reference_chosen) - kl))
        rejected_losses = 1 - torch.sigmoid(config["beta"] * (kl - (rejected - reference_rejected)))
        loss = torch.cat((chosen_losses, rejected_losses), 0).mean()
        _told = (
            chosen.detach().sum(),
            rejected.detach().sum(),
            chosen_logits.detach().sum(),
            rejected_logits.detach().sum(),
        )
        return loss

    return lambda: (forward(), heads)[0]


def distilled(case: dict[str, Any]) -> Callable[[], Tensor]:
    config, rows, dtype = case["config"], case["x"], case["config"]["dtype"]
    size, vocabulary = config["H"], config["V"]
    heads = [linear(width, vocabulary, dtype) for _ in range(2) for width in (size // 2, size)]
    student, teacher = heads[:2] if case["provider"] == "torch" else heads[2:]
    common = torch.rand(rows, size // 2, dtype=dtype)
    given, other = (common.detach().clone().requires_grad_(True) for _ in range(2))
    wanted = torch.rand(rows, size, dtype=dtype)
    target = torch.randint(0, vocabulary, (rows,))
    kept = SimpleNamespace(heads=heads, common=common, other=other)
    if case["provider"] == "liger":
        from liger_kernel.chunked_loss.cosine_similarity_loss import LigerFusedLinearCosineSimilarityFunction
        from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDFunction

        fused = LigerFusedLinearJSDFunction if "jsd" in case["kernel"] else LigerFusedLinearCosineSimilarityFunction
        return lambda: (first(fused.apply(given, student.weight, wanted, teacher.weight, target, None, None)), kept)[0]
    distance = jensen_shannon if "jsd" in case["kernel"] else cosine

    def of_batch() -> tuple[Tensor, Tensor, Tensor]:
        outputs = given @ student.weight.t()
        with torch.no_grad():
            teacher_outputs = wanted @ teacher.weight.t()
        logits, teacher_logits = outputs.float(), teacher_outputs.float()
        return logits, teacher_logits, functional.cross_entropy(logits, target)

    def forward() -> Tensor:
        logits, teacher_logits, hard = of_batch()
        logits /= 1.0
        teacher_logits /= 1.0
        return config["weight_hard_loss"] * hard + config["weight_soft_loss"] * distance(logits, teacher_logits)

    return lambda: (forward(), kept)[0]


def jensen_shannon(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    student, teacher = functional.log_softmax(logits, dim=-1), functional.log_softmax(teacher_logits, dim=-1)
    mean = 0.5 * student.exp() + 0.5 * teacher.exp()
    logs = mean.log()
    of_student = functional.kl_div(logs, student, reduction="batchmean", log_target=True)
    of_teacher = functional.kl_div(logs, teacher, reduction="batchmean", log_target=True)
    return 0.5 * of_teacher + 0.5 * of_student


def cosine(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    student, teacher = functional.normalize(logits, p=2, dim=-1), functional.normalize(teacher_logits, p=2, dim=-1)
    return (1.0 * (1 - functional.cosine_similarity(student, teacher, dim=-1))).mean()


def grouped(case: dict[str, Any]) -> Callable[[], Tensor]:
    config, batch, dtype, late = case["config"], case["x"], case["config"]["dtype"], case["late"]
    size, vocabulary = (config["hidden_size"], config["vocab_size"]) if late else (config["H"], config["V"])
    heads = [linear(size, vocabulary, dtype) for _ in range(2 if late else 4)]
    head, reference = heads[:2]
    hidden = torch.randn(batch, config["T"], size, dtype=dtype, requires_grad=True)
    tokens = torch.randint(0, vocabulary, (batch, config["T"]))
    mask = torch.ones(batch, config["T"])
    advantages = torch.randn(batch, dtype=dtype)
    reference_hidden = torch.randn(batch, config["T"], size, dtype=dtype)
    level = config["importance_sampling_level"]
    if case["provider"] == "liger":
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        fused = LigerFusedLinearGRPOLoss(
            beta=0.1, epsilon_low=0.2, epsilon_high=0.2, temperature=1.0, use_ref_model=True, compiled=True, loss_type="bnpo",
            max_completion_length=None, importance_sampling_level=level,
        )  # fmt: skip
        return lambda: (
            fused(
                hidden, head.weight, tokens, mask, advantages, None, None, None, reference_hidden, reference.weight, None
            )[0],
            heads,
        )[0]  # fmt: skip

    def forward() -> Tensor:
        logits = hidden @ head.weight.t()
        logs = functional.log_softmax(logits.float(), dim=-1)
        token_logs = logs.gather(dim=-1, index=tokens.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            reference_logits = reference_hidden @ reference.weight.t()
            reference_logs = functional.log_softmax(reference_logits.float(), dim=-1)
            reference_token_logs = reference_logs.gather(dim=-1, index=tokens.unsqueeze(-1)).squeeze(-1)
        ratio = token_logs - token_logs.detach()
        if level == "sequence":
            ratio = ((ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
        free = torch.exp(ratio)
        clipped = torch.clamp(free, 0.8, 1.2)
        losses = -torch.min(free * advantages.unsqueeze(1), clipped * advantages.unsqueeze(1))
        distance = torch.exp(reference_token_logs - token_logs) - (reference_token_logs - token_logs) - 1.0
        losses = losses + 0.1 * distance
        return (losses * mask).sum() / torch.clamp(mask.sum(), min=1.0)

    return lambda: (forward(), heads)[0]
