"""Instructions for a change in the terms of the script's framework, and what the script trains, as far as is known.

A recording keeps which trainer drove its steps (`script.training`); the texts are data (`techniques`). Without that
evidence, as in a snapshot, or without a text for the framework, those of plain PyTorch are used.
"""

import re
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from tonnage.errors import UnknownGpu
from tonnage.hardware import find_gpu
from tonnage.ledger import Category
from tonnage.recording import Allocation, Recording
from tonnage.techniques import techniques

_BATCH_FLAG = re.compile(r"--?[\w-]*(batch|bs|bsz)[\w-]*", re.IGNORECASE)
_CHECKPOINT_FLAG = re.compile(r"""["'](--grad(?:ient)?[-_]checkpoint(?:ing)?)["'][^)]*store_true""")
_MOST_SCRIPT_BYTES = 2**20
_SDPA = "transformers/integrations/sdpa_attention.py"


def words_for(recording: Recording, technique: str, variant: str = "how", **values: object) -> str:
    """Return how to make a change in the words of the script's framework; `values` fill them in."""
    words = techniques()[technique][variant]
    pattern: str = words.get(_framework(recording)) or words["torch"]
    arguments = recording.header.training.get("arguments", "TrainingArguments")
    return pattern.format(arguments=arguments, **values)


def has_words(recording: Recording, technique: str, variant: str = "how") -> bool:
    """Say whether the framework itself, not PyTorch, has words for a change."""
    return _framework(recording) in techniques()[technique][variant].keys() - {"torch"}


def _framework(recording: Recording) -> str:
    trainer = recording.header.training.get("trainer", "")
    return "transformers" if trainer == "trl" else trainer


def trains(recording: Recording) -> bool:
    """Say whether it computes gradients or was about to: it made an optimizer, or ran backward."""
    return "optimizers" in recording.header.training or any(mark.name == "backward" for mark in recording.marks)


def batch_of(recording: Recording) -> int | None:
    """Return samples per forward, from its trainer or the inputs' first dimension; None if they differ."""
    told = recording.header.training.get("batch", "")
    if told.isdigit() and trains(recording):
        return int(told)
    inputs = (a for a in recording.allocations if a.category is Category.INPUTS and a.phase != "setup")
    return max((a.shape[0] for a in inputs if a.shape), default=None)


def half_type(recording: Recording) -> str:
    """Return the 16-bit dtype that the GPU computes in."""
    try:
        return "bfloat16" if find_gpu(recording.header.gpu).has_bf16 else "float16"
    except UnknownGpu:
        return "bfloat16"


def optimizers_of(recording: Recording) -> list[str]:
    """Return the full class names of the optimizers; empty if unknown."""
    return recording.header.training.get("optimizers", "").split()


def batch_flag(recording: Recording) -> str | None:
    """Return the script's own batch flag with half its value, as typed."""
    arguments = recording.header.arguments
    written = [(flag, " ", value) for flag, value in pairwise(arguments)] + [word.partition("=") for word in arguments]
    for flag, between, value in written:
        if _BATCH_FLAG.fullmatch(flag) and value.isdigit() and int(value) > 1:
            return f"{flag}{between}{int(value) // 2}"
    return None


def batch_words(recording: Recording, batch: int | None) -> str:
    """Say how to halve the batch of each forward without changing what a step learns from."""
    if not trains(recording):
        return words_for(recording, "micro-batches", "calls")
    facts = recording.header.training
    accumulation = facts.get("accumulation", "1")
    steps = 2 * int(accumulation) if accumulation.isdigit() else 2
    if int(facts.get("stepping", "1")) > 1:
        return words_for(recording, "micro-batches", "of_two", half=batch // 2 if batch else "half the size")
    if batch is None:
        return words_for(recording, "micro-batches", "unknown", steps=steps)
    return words_for(recording, "micro-batches", half=batch // 2, steps=steps)


def checkpoint_words(recording: Recording, blocks: str) -> str:
    """Say how to recompute blocks: the script's flag, the model's or trainer's switch, or PyTorch's function."""
    # A switch for it that the script has but was not given.
    path, flag = Path(recording.header.script), None
    with suppress(OSError):
        if path.is_file() and path.stat().st_size <= _MOST_SCRIPT_BYTES:
            flag = _CHECKPOINT_FLAG.search(path.read_text("utf-8", "replace"))
    if flag and flag[1] not in recording.header.arguments:
        return flag[1]
    if method := recording.header.training.get("checkpointing"):
        return words_for(recording, "recompute", "by_model", method=method)
    return words_for(recording, "recompute", blocks=blocks)


def eight_bit_words(recording: Recording) -> str | None:
    """Say how to keep states in 8 bits; None if nothing supports the optimizer."""
    table, names = techniques()["eight-bit-states"]["optimizers"], optimizers_of(recording)
    if not names:
        # States of Adam come in pairs of a size; momentum comes alone.
        counts = Counter(a.requested_bytes for a in recording.allocations if a.category is Category.OPTIMIZER_STATES)
        return "torchao.optim.AdamW8bit" if counts and counts[max(counts)] % 2 == 0 else None
    found = {table.get(name) for name in names}
    if None in found:
        return None
    return words_for(recording, "eight-bit-states", eight_bit=" and ".join(sorted(found)))


def is_of_sdpa(a: Allocation) -> bool:
    """Say whether transformers made it on the way through `scaled_dot_product_attention`."""
    return any(frame.startswith(_SDPA) for frame in a.stack)
