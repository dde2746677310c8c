"""Published training runs as configurations of ours: what each row of `published-training.jsonl` says, and no more.

A row is predictable where it states the model, the GPUs, the batch, a sequence length that was reached, recomputation and
the optimizer, and where nothing in it is beyond the planner's words. What a row lacks is the reason it is left out; the
error is never a reason.
"""

import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tonnage.budget.adapters import Base, parse_targets
from tonnage.budget.configuration import Configuration
from tonnage.hardware import find_cluster
from tonnage.hardware.cluster import Cluster
from tonnage.models import Attention, FeedForward, Layer, ModelShape, Stack, find_model, from_config

Row = dict[str, Any]
Figure = Literal["allocated", "reserved", "process"]


_P5, _P5_GPUS = "p5.48xlarge", 8  # H100s, 8 in a host, with EFA


@dataclass(frozen=True)
class Case:
    """One run as the planner sees it, and which of its figures the source reports."""

    shape: ModelShape
    configuration: Configuration
    gpu: str
    figure: Figure
    stage: Literal["worst", "first", "last"] = "worst"
    # Of the card, where the row states another one than is sold.
    changes: dict[str, float] = field(default_factory=dict)

    def cluster(self) -> Cluster:
        """The cards of the run."""
        gpus = int(self.configuration.gpus)
        sold = find_cluster(f"{gpus // _P5_GPUS}x{_P5}" if self.gpu == _P5 else f"{gpus}x{self.gpu}")
        return replace(sold, gpu=replace(sold.gpu, **self.changes)) if self.changes else sold


class NotSaid(Exception):
    """The row does not say enough, or says what the planner has no word for."""


def case_of(row: Row) -> Case:
    """The run of a row; `NotSaid` gives the reason where there is none."""
    reader = _READERS.get(row["family"])
    if reader is None:
        raise NotSaid("the family of runs has no reader")
    case: Case = reader(row)
    return case


def _need(row: Row, *names: str) -> list[Any]:
    missing = [name for name in names if row.get(name) is None]
    if missing:
        raise NotSaid(f"not stated: {', '.join(missing)}")
    return [row[name] for name in names]


def _refuse(condition: object, reason: str) -> None:
    if condition:
        raise NotSaid(reason)


# -- nanotron: the sweep of the Ultra-Scale Playbook


def _nanotron(row: Row) -> Case:
    layers, hidden, heads, kv_heads, ffn, vocab = _need(row, "layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    dp, tp, pp, batch, seq, zero = _need(row, "dp", "tp", "pp", "micro_batch", "seq_len", "zero_stage")
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": not row["notes"].startswith("untied"),
    }
    parallel = {"tp": tp, "pp": pp, "data": dp, "shard": dp, "zero": zero, "accumulate": row.get("grad_accum", 2)}
    configuration = Configuration(
        framework="nanotron", optimizer_kernel="fused", attention="flash-2", seq=seq, micro_batch=batch, **parallel
    )
    # The rows leave open which figure and name the stage that logs the loss; nanotron's source says more on both. The
    # table of the benchmark is written by global rank 0 (`log_throughput` in helpers.py, in every version of it), which
    # is in the first stage (ranks are laid out pipeline first in parallel/context.py). The peaks are reset right before
    # the optimizer's part of the step that is logged (`log_memory` in trainer.py), so a figure that grows with the
    # micro-batch, as theirs does, can only be what is reserved.
    return Case(
        from_config(config, row["model"]), configuration, _P5 if "EFA" in row["gpu"] else "h100", "reserved", "first"
    )


# -- torchtitan and torchao


def _torchtitan(row: Row) -> Case:
    model, fsdp, seq, recompute = _need(row, "model", "fsdp", "seq_len", "ac")
    pp = row.get("pp") or 1
    # Unless told otherwise it cut a local batch into as many micro-batches as there are ranks then, kept what it had gathered,
    # and gave a rank two stages to interleave: `build_pipeline_schedule`, `apply_fsdp`, `generate_split_points` at that revision.
    batch = row["local_batch"] // pp if pp > 1 else _need(row, "micro_batch")[0]
    _refuse("shapes cut" in model, "a cut model, whose shape is not stated")
    tp, cp = row.get("tp") or 1, row.get("cp") or 1
    configuration = Configuration(
        framework="fsdp2",
        zero=3 if pp == 1 else 2,
        precision="fp8" if re.search("float8|fp8|rowwise", row["precision"]) else "bf16-mixed",
        checkpoint=_recomputation(recompute),
        attention="flash-2",
        compile=bool(row.get("compile")),
        compile_loss=not any(date in row["source_rev"] for date in _BEFORE_COMPILED_LOSS),
        seq=seq,
        micro_batch=batch,
        pp_chunks=2 if "Interleaved" in row.get("notes", "") else 1,
        accumulate=pp,
        tp=tp,
        pp=pp,
        cp=cp,
        data=fsdp,
        shard=fsdp,
    )
    card = _card(row.get("gpu", ""))
    changes = _GRAND_TETON if card == "h100" and _is_grand_teton(row) else {}
    return Case(find_model(_preset(model)), configuration, card, "reserved", changes=changes)


# The H100s of torchtitan's own benchmarks (its docs/performance.md): 96 GB of HBM2e, at 500 W.
_GRAND_TETON = {"power_w": 500, "bandwidth_bytes_per_s": 2.4e12}


def _is_grand_teton(row: Row) -> bool:
    """The row says so, or by the share of memory it has the 95 GiB of these cards."""
    return "Grand Teton" in row["gpu"] or "95 GiB" in row["gpu"] + row.get("notes", "")


# torchtitan compiles its loss since April 2025 (its change 1033); these revisions are from before.
_BEFORE_COMPILED_LOSS = ("2024-12", "2025-01", "torch 2.7.0a0")


def _recomputation(words: str) -> str:
    if words.startswith("none"):
        return "none"
    if words.startswith(("full", "gradient checkpointing")):
        return "full"
    _refuse("[" in words, "a selective policy of its own")
    return "selective"


def _preset(model: str) -> str:
    return model.lower().replace(" ", "-").replace("-instruct", "")


def _card(words: str) -> str:
    for name in ("h200", "h100", "b200", "mi300x", "a100", "rtx 3090", "rtx 4090", "a10g"):
        if name in words.lower():
            return name
    return "h100"


# -- torchtune, DeepSpeed, Arctic's long sequences, ms-swift


def _torchtune(row: Row) -> Case:
    if row["method"] != "full finetune":
        return _torchtune_adapters(row)
    seq, batch, recompute, loss = _need(row, "seq_len", "micro_batch", "ac", "loss_chunking")
    configuration = Configuration(
        precision="bf16",
        attention="flash-2",
        checkpoint=_recomputation(recompute),
        loss="full" if loss == "none" else "chunked",
        step_in_backward="fused into backward" in row["optimizer"],
        compile=bool(row["compile"]),
        seq=seq,
        micro_batch=batch,
    )
    return Case(find_model(_preset(row["model"])), configuration, _card(row["gpu"]), "reserved")


# Rank and targets of torchtune's recipes (`recipes/configs`), which recompute all, take the loss in chunks and train in BF16.
_TORCHTUNE_RECIPES = {
    ("Llama 3.1 8B", "LoRA"): (8, "q_proj,v_proj,o_proj,mlp"),
    ("Llama 3.1 8B", "QLoRA"): (8, "all-linear"),
    ("Llama 3.2 3B", "QLoRA"): (64, "q_proj,v_proj,o_proj,mlp"),
}


def _torchtune_adapters(row: Row) -> Case:
    seq, batch = _need(row, "seq_len", "micro_batch")
    rank, targets = _TORCHTUNE_RECIPES[row["model"], row["method"]]
    configuration = Configuration(
        precision="bf16",
        optimizer_kernel="fused",
        attention="flash-2",
        checkpoint="full",
        loss="chunked",
        lora_rank=rank,
        lora_targets=parse_targets(targets),
        base="nf4" if row["method"] == "QLoRA" else "16-bit",
        activation_place="host" if row.get("offload") else "gpu",
        compile=bool(row["compile"]),
        seq=seq,
        micro_batch=batch,
    )
    figure: Figure = "allocated" if "active peak" in row["mem_kind"] else "reserved"
    return Case(find_model(_preset(row["model"])), configuration, _card(row["gpu"]), figure)


def _deepspeed(row: Row) -> Case:
    layers, hidden, heads, vocab, batch = _need(row, "layers", "hidden", "heads", "vocab", "micro_batch")
    seq, dp, recompute, zero = _need(row, "seq_len", "dp", "ac", "zero_stage")
    config = {"model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": vocab}
    configuration = Configuration(
        framework="deepspeed",
        zero=zero,
        checkpoint=_recomputation(recompute),
        seq=seq,
        micro_batch=batch,
        data=dp,
        shard=dp,
    )
    return Case(from_config(config, row["model"]), configuration, _card(row["gpu"]), "allocated")


def _alst(row: Row) -> Case:
    _refuse("tiled MLP" in row["notes"], "a tiled MLP is no choice of the planner")
    configuration = Configuration(
        framework="deepspeed",
        zero=3,
        checkpoint="full",
        loss="chunked",
        optimizer_place="host",
        parameter_place="host" if "params->CPU" in row["offload"] else "gpu",
        seq=row["seq_len"],
        micro_batch=row["micro_batch"],
        cp=row["cp"],
        data=row["dp"],
    )
    return Case(find_model(_preset(row["model"])), configuration, _card(row["gpu"]), "process")


_QWEN = {
    "qwen-1_8b-chat": {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 5504,
    },
    "qwen-7b-chat": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
    },
}


def _ms_swift(row: Row) -> Case:
    """Sequences are cut at `seq_len`, and the data has some that are longer: the peak is at that length."""
    _refuse(row["method"] != "full", "the adapter's targets are not stated")
    (batch,) = _need(row, "micro_batch")
    sizes = _QWEN[row["model"]]
    config = {"model_type": "llama", "vocab_size": 151936, "num_key_value_heads": sizes["num_attention_heads"], **sizes}
    configuration = Configuration(
        precision="bf16", checkpoint=_recomputation(row["ac"]), seq=row["seq_len"], micro_batch=batch, accumulate=2
    )
    return Case(from_config(config, row["model"]), configuration, "a100-80", "reserved")


# -- Megatron's continuous integration


def _megatron(row: Row) -> Case:
    layers, hidden, heads, vocab = _need(row, "layers", "hidden", "heads", "vocab")
    dp, batch, seq = _need(row, "dp", "micro_batch", "seq_len")
    virtual = row.get("vpp")
    chunks = layers // row["pp"] // int(virtual.removeprefix("layers/vstage=")) if virtual else 1
    _refuse(row.get("ep"), "a mixture of experts whose widths are not all stated")
    configuration = Configuration(
        framework="megatron",
        optimizer_kernel="fused",
        checkpoint=_recomputation(row["ac"]),
        attention="eager" if row.get("attention") == "unfused" else "flash",
        sequence_parallel=bool(row.get("sp")),
        zero=row["zero_stage"],
        pp_chunks=chunks,
        seq=seq,
        micro_batch=batch,
        accumulate=row["global_batch"] // (batch * dp),
        tp=row["tp"],
        pp=row["pp"],
        cp=row["cp"],
        data=dp,
        shard=dp,
    )
    ffn, kv_heads = row.get("ffn") or 4 * hidden, row.get("kv_heads") or heads
    shape = _gpt(layers, hidden, heads, kv_heads, ffn, vocab, seq)
    return Case(shape, configuration, _card(row["gpu"]), "allocated", "last")


def _gpt(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, positions: int) -> ModelShape:
    """A GPT of Megatron's: LayerNorm, GELU, biases, positions that are learned, and a head of its own."""
    head_dim = hidden // heads
    projected = hidden + 2 * kv_heads * head_dim
    layer = Layer(
        attention=Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_head_dim=head_dim),
        feed_forward=FeedForward(intermediate=ffn, gated=False),
        attention_parameters=projected * (hidden + 1) + hidden * (hidden + 1),
        feed_forward_parameters=2 * hidden * ffn + hidden + ffn,
        norm_parameters=4 * hidden,
    )
    return ModelShape(
        name="gpt",
        architecture="gpt2",
        stacks=(Stack(layers=(layer,) * layers, hidden=hidden),),
        vocab=vocab,
        tied=False,
        embedding_parameters=(vocab + positions) * hidden,
        head_parameters=vocab * hidden,
        other_parameters=2 * hidden,
    )


# -- adapters of Answer.AI's script and of LitGPT's


def _fsdp_qlora(row: Row) -> Case:
    """The defaults of its `train.py`: rank 64 on all matrices but the attention's last, in BF16."""
    sharded, quantized = "fsdp" in row, row["method"] == "QLoRA"
    configuration = Configuration(
        framework="fsdp2" if sharded else "torch",
        zero=3 if sharded else 0,
        precision="bf16",
        checkpoint=_recomputation(row["ac"]),
        lora_rank=64,
        lora_targets=parse_targets("q_proj,k_proj,v_proj,mlp"),
        base="nf4" if quantized else "16-bit",
        wide_logits=True,  # with the transformers of March 2024
        parameter_place="host" if row.get("offload") else "gpu",
        seq=row["seq_len"],
        micro_batch=row["micro_batch"],
        data=2,
        shard=2 if sharded else 1,
    )
    return Case(find_model(_preset(row["model"])), configuration, _card(row["gpu"]), "reserved")


_LITGPT_BASES: dict[str, Base] = {"LoRA": "16-bit", "QLoRA bnb.nf4": "nf4-single", "QLoRA bnb.nf4-dq": "nf4"}
_LITGPT_STEP = 128  # sequences


def _litgpt(row: Row) -> Case:
    """The longest sample comes first. `finetune/lora.py` has rank 8 beside queries and values, and on one GPU recomputes none."""
    if "LoRA" not in row["method"] or "config_hub" in row["source"]:
        return _capped(row)
    _refuse(row["gpus"] > 1, "how the model was loaded and sharded is not stated")
    _refuse(row["model"].startswith("StableLM"), "a model that has no preset")
    configuration = Configuration(
        precision="bf16",
        lora_rank=8,
        lora_targets=parse_targets("q_proj,v_proj"),
        base=_LITGPT_BASES[row["method"]],
        seq=row["seq_len"],
        micro_batch=row["micro_batch"],
        accumulate=_LITGPT_STEP // row["micro_batch"],
    )
    return Case(find_model(_preset(row["model"])), configuration, "a100-40", "allocated")


def _capped(row: Row) -> Case:
    raise NotSaid("the sequence length is not stated, or a cap that the data may not have reached")


def _bridge(row: Row) -> Case:
    raise NotSaid("the batch or the widths of the mixture are not stated")


_READERS = {
    "nanotron_usp": _nanotron,
    "torchtitan": _torchtitan,
    "torchao_torchtitan": _torchtitan,
    "torchtune": _torchtune,
    "deepspeed": _deepspeed,
    "alst": _alst,
    "ms_swift": _ms_swift,
    "megatron_golden": _megatron,
    "megatron_golden_small": _megatron,
    "megatron_bridge": _bridge,
    "litgpt": _litgpt,
    "peft": _capped,
    "fsdp_qlora": _fsdp_qlora,
}
