"""Two steps of distillation, of contrastive training or of a classifier, written out in PyTorch, on random tokens.

    tonnage run --gpu h200 --json out.json benchmarks/objectives/plain_step.py contrastive bert.json --batch 64 --seq 256

Distillation reads a whole teacher under `no_grad` and takes the divergence of all its scores in FP32. Contrastive training pools
the last states of a query and of its passage, and has the other passages of the batch as negatives.
"""

import argparse
import contextlib
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

STEPS = 2
TEMPERATURE = 0.05


def main() -> None:
    """Train for two steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("objective", choices=("distill", "contrastive", "classify"))
    parser.add_argument("config", type=Path)
    parser.add_argument("--teacher", type=Path)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--precision", choices=("fp32", "bf16-mixed", "bf16"), default="bf16-mixed")
    parser.add_argument("--checkpoint", choices=("none", "full"), default="none")
    parser.add_argument("--lora", type=int, default=0)
    parser.add_argument("--negatives", type=int, default=0)
    parser.add_argument(
        "--grad-cache", type=int, default=0, metavar="N", help="sequences of a text that go through at once"
    )
    train(parser.parse_args())


def train(options: argparse.Namespace) -> None:
    """Build the model, and run its steps."""
    torch.manual_seed(0)
    halves = options.precision == "bf16" or (options.lora and options.precision != "fp32")
    model = build(options, options.config, torch.bfloat16 if halves else torch.float32)
    vocabulary = model.config.vocab_size
    if options.checkpoint == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if options.lora:
        model.enable_input_require_grads() if options.checkpoint == "full" else None
        model = get_peft_model(model, LoraConfig(r=options.lora, target_modules="all-linear"))
    model = model.cuda().train()
    teacher = None
    if options.teacher:
        kept = torch.float32 if options.precision == "fp32" else torch.bfloat16
        teacher = build(options, options.teacher, kept).cuda().eval().requires_grad_(False)
    optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), fused=True)
    mixed = options.precision == "bf16-mixed"
    texts = 2 + options.negatives if options.objective == "contrastive" else 1
    for _ in range(STEPS):
        ids = [torch.randint(vocabulary, (options.batch, options.seq), device="cuda") for _ in range(texts)]
        amp = lambda: torch.autocast("cuda", torch.bfloat16) if mixed else contextlib.nullcontext()  # noqa: E731
        step(options, model, teacher, ids, amp)
        optimizer.step()
        optimizer.zero_grad()


def build(options: argparse.Namespace, path: Path, dtype: torch.dtype) -> torch.nn.Module:
    """A model with the end that the objective takes."""
    words = json.loads(path.read_text())
    config = AutoConfig.for_model(words.pop("model_type"), **words)
    config.use_cache = False
    kinds = {"distill": AutoModelForCausalLM, "contrastive": AutoModel, "classify": AutoModelForSequenceClassification}
    config.pad_token_id = 0
    return kinds[options.objective].from_config(config, dtype=dtype)


def step(options: argparse.Namespace, model: torch.nn.Module, teacher: torch.nn.Module | None, ids: list, amp) -> None:
    """One forward and backward pass."""
    if options.objective == "contrastive" and options.grad_cache:
        cached(model, ids, options.grad_cache, amp)
        return
    with amp():
        loss = {"distill": distilled, "contrastive": contrasted, "classify": classified}[options.objective](
            model, teacher, ids
        )
    loss.backward()


def distilled(model: torch.nn.Module, teacher: torch.nn.Module, ids: list) -> torch.Tensor:
    """The divergence from the teacher's distribution, over the whole vocabulary."""
    student = model(ids[0]).logits
    with torch.no_grad():
        taught = teacher(ids[0]).logits
    mine = F.log_softmax(student.float(), dim=-1)
    theirs = F.log_softmax(taught.float(), dim=-1)
    return F.kl_div(mine, theirs, reduction="batchmean", log_target=True)


def classified(model: torch.nn.Module, _: None, ids: list) -> torch.Tensor:
    """A label for each sequence."""
    labels = torch.zeros(len(ids[0]), dtype=torch.long, device="cuda")
    return model(ids[0], attention_mask=torch.ones_like(ids[0]), labels=labels).loss


def embedded(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The mean of the last states, of length one."""
    mask = torch.ones_like(ids)
    states = model(ids, attention_mask=mask).last_hidden_state
    weights = mask.unsqueeze(-1).expand(states.size()).float()
    return F.normalize((states * weights).sum(1) / weights.sum(1).clamp(min=1e-9), dim=1)


def similar(vectors: list) -> torch.Tensor:
    """Cross-entropy of every query among all passages."""
    scores = vectors[0] @ torch.cat(vectors[1:]).T / TEMPERATURE
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def contrasted(model: torch.nn.Module, _: None, ids: list) -> torch.Tensor:
    """All texts of the batch with gradients at once."""
    return similar([embedded(model, part) for part in ids])


def cached(model: torch.nn.Module, ids: list, size: int, amp) -> None:
    """GradCache: vectors first, without gradients; the loss and their gradients; then each part again, with what it is due."""
    with torch.no_grad(), amp():
        vectors = [torch.cat([embedded(model, some) for some in part.split(size)]) for part in ids]
    vectors = [one.detach().requires_grad_() for one in vectors]
    with amp():
        similar(vectors).backward()
    for part, one in zip(ids, vectors, strict=True):
        for some, due in zip(part.split(size), one.grad.split(size), strict=True):
            with amp():
                surrogate = (embedded(model, some).float() * due).sum()
            surrogate.backward()


if __name__ == "__main__":
    main()
