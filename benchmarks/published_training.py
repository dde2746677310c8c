"""Published training runs in the words of `tonnage plan train`: what each row of `published-training.jsonl` says, and no more.

A row has words where it, or the source that it names, states the model, the cards, the batch, a sequence length that was
reached, recomputation and the optimizer. What a row lacks is the reason it is left out; the error is never a reason.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from tonnage.commands.plan_train import planned
from tonnage.planner.training.search import PlanSearch
from tonnage.report.plans.training import one_figures

Row = dict[str, Any]
Figure = Literal["allocated", "reserved", "process"]
TRUTH = Path(__file__).parent / "truth"
_KEYS = {"allocated": "peak_allocated_bytes", "reserved": "peak_reserved_bytes", "process": "total_bytes"}


@dataclass(frozen=True)
class Run:
    """What to type after `tonnage plan train`, and which of the plan's figures the source reports, of which stage."""

    words: list[str]
    figure: Figure
    stage: Literal["", "first stage", "last stage"] = ""

    @property
    def adapters(self) -> bool:
        """Whether adapters are trained."""
        return "--lora" in self.words

    def plan(self) -> PlanSearch:
        """As the command makes it."""
        return planned(self.words)


class NotSaid(Exception):
    """The row does not say enough, or says what the command has no word for."""


def rows_of(path: Path) -> Iterator[Row]:
    """The rows of a file of JSON lines."""
    return (json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip())


def predicted_bytes(run: Run, findings: PlanSearch) -> float:
    """The figure that the source reports, as the plan's JSON has it."""
    figures = one_figures(findings.closest)
    return float((figures["stages"].get(run.stage) or figures)[_KEYS[run.figure]])


def run_of(row: Row) -> Run:
    """The run of a row; `NotSaid` gives the reason where there is none."""
    return _READERS[row["family"]](row)


def _need(row: Row, *names: str) -> list[Any]:
    missing = [name for name in names if row.get(name) is None]
    if missing:
        raise NotSaid(f"not stated: {', '.join(missing)}")
    return [row[name] for name in names]


def _refuse(condition: object, reason: str) -> None:
    if condition:
        raise NotSaid(reason)


def _words(model: str, gpus: str, *switches: str, **flags: object) -> list[str]:
    """Flags by name; those that are None are left out."""
    given = [(f"--{name.replace('_', '-')}", str(value)) for name, value in flags.items() if value is not None]
    return [model, "--gpus", gpus, "--offload", "none", *[word for pair in given for word in pair], *switches]


def _offloading(words: list[str], what: str) -> list[str]:
    """The words with something offloaded."""
    place = words.index("--offload") + 1
    return [*words[:place], what, *words[place + 1 :]]


@cache
def _folder() -> TemporaryDirectory[str]:
    """Of configurations of models that have no preset."""
    return TemporaryDirectory()


def _config(name: str, **fields: object) -> str:
    """A folder with that model's `config.json`."""
    folder = Path(_folder().name) / re.sub(r"\W+", "-", name.lower())
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields), "utf-8")
    return str(folder)


def _preset(model: str) -> str:
    return model.lower().replace(" ", "-").replace("-instruct", "")


def _card(words: str) -> str:
    for name in ("h200", "gb200", "h100", "b200", "mi300x", "a100", "rtx 3090", "rtx 4090", "a10g", "l40s"):
        if name in words.lower():
            return {"a100": "a100-80"}.get(name, name).replace(" ", "-")
    return "h100"


def _recomputation(words: str) -> str:
    if words.startswith("none"):
        return "none"
    if words.startswith(("full", "gradient checkpointing")):
        return "full"
    _refuse("[" in words, "a selective policy of its own")
    return "selective"


# -- nanotron: the sweep of the Ultra-Scale Playbook


def _nanotron(row: Row) -> Run:
    layers, hidden, heads, kv_heads, ffn, vocab = _need(row, "layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    dp, tp, pp, batch, seq, zero = _need(row, "dp", "tp", "pp", "micro_batch", "seq_len", "zero_stage")
    model = _config(
        row["model"], model_type="llama", hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocab, max_position_embeddings=seq,
        tie_word_embeddings=not row["notes"].startswith("untied"),
    )  # fmt: skip
    gpus = f"{row['gpus'] // 8}xp5.48xlarge" if "EFA" in row["gpu"] else f"{row['gpus']}xh100"
    words = _words(
        model, gpus, framework="nanotron", attention="flash-2", seq=seq, micro_batch=batch, tp=tp, pp=pp, cp=1, zero=zero,
        global_batch=batch * dp * row.get("grad_accum", 2), checkpoint="none", loss="full",
    )  # fmt: skip
    # The rows leave open which figure and name the stage that logs the loss; nanotron's source says more on both. The
    # table of the benchmark is written by global rank 0 (`log_throughput` in helpers.py, in every version of it), which
    # is in the first stage (ranks are laid out pipeline first in parallel/context.py). The peaks are reset right before
    # the optimizer's part of the step that is logged (`log_memory` in trainer.py), so a figure that grows with the
    # micro-batch, as theirs does, can only be what is reserved.
    return Run(words, "reserved", "first stage")


# -- torchtitan and torchao

# Of before AdamW was fused by default (its change 881, February 2025) and the loss compiled (1033, April 2025).
_TORCHTITAN_BEFORE = ("2024-12", "2025-01", "torch 2.7.0a0")


def _torchtitan(row: Row) -> Run:
    if row["source"].endswith("nvfp4.md@b5bcd76"):
        return _torchtitan_blackwell(row)
    model, fsdp, seq, recompute = _need(row, "model", "fsdp", "seq_len", "ac")
    pp = row.get("pp") or 1
    # Unless told otherwise it cut a local batch into as many micro-batches as there are ranks then, kept what it had gathered,
    # and gave a rank two stages to interleave: `build_pipeline_schedule`, `apply_fsdp`, `generate_split_points` at that revision.
    local = row["local_batch"] if pp > 1 else _need(row, "micro_batch")[0]
    _refuse("shapes cut" in model, "a cut model, whose shape is not stated")
    before = any(date in row["source_rev"] for date in _TORCHTITAN_BEFORE)
    switches = ["--compile", *(["--eager-loss"] if before else [])] if row.get("compile") else []
    words = _words(
        _preset(model), f"{row['gpus']}x{_torchtitan_card(row)}", *switches, framework="fsdp2", zero=3 if pp == 1 else 2,
        precision="fp8" if re.search("float8|fp8|rowwise", row["precision"]) else "bf16-mixed",
        checkpoint=_recomputation(recompute), attention="flash-2", loss="full", seq=seq, micro_batch=local // pp,
        global_batch=local * fsdp, tp=row.get("tp") or 1, pp=pp, cp=row.get("cp") or 1, shard=fsdp,
        pp_chunks=2 if "Interleaved" in row.get("notes", "") else None, optimizer_kernel="foreach" if before else "fused",
    )  # fmt: skip
    return Run(words, "reserved")


def _torchtitan_blackwell(row: Row) -> Run:
    """Its `llama3_8b` at that revision recomputes selectively, takes the loss in chunks, and compiles the model alone."""
    _refuse("NVFP4" in row["precision"], "NVFP4 is no precision of the planner")
    words = _words(
        _preset(row["model"]), f"{row['gpus']}xgb200", "--compile", "--eager-loss", framework="fsdp2", zero=3,
        precision="fp8" if "FP8" in row["precision"] else "bf16-mixed", checkpoint="selective", attention="flash-2",
        loss="chunked", seq=row["seq_len"], micro_batch=row["local_batch"], global_batch=row["global_batch"], tp=1, pp=1,
        cp=1, shard=row["fsdp"], optimizer_kernel="fused",
    )  # fmt: skip
    return Run(words, "reserved")


def _torchtitan_card(row: Row) -> str:
    """Its authors' H100s have 96 GB, where the row says so or by the share of memory that it has."""
    card = _card(row.get("gpu", ""))
    own = card == "h100" and ("Grand Teton" in row["gpu"] or "95 GiB" in row["gpu"] + row.get("notes", ""))
    return "h100-96" if own else card


# -- torchtune

# Rank and targets of its recipes (`recipes/configs`), which recompute all, take the loss in chunks and train in BF16.
_TORCHTUNE_ADAPTERS = {
    ("Llama 3.1 8B", "LoRA"): ("8", "q_proj,v_proj,o_proj,mlp"),
    ("Llama 3.1 8B", "QLoRA"): ("8", "all-linear"),
    ("Llama 3.2 3B", "QLoRA"): ("64", "q_proj,v_proj,o_proj,mlp"),
}


def _torchtune(row: Row) -> Run:
    """The memory that its README has is what is active, by the head of its second table."""
    seq, batch = _need(row, "seq_len", "micro_batch")
    common = {"precision": "bf16", "attention": "flash-2", "seq": seq, "micro_batch": batch}
    place, compiled = (_preset(row["model"]), _card(row["gpu"])), ["--compile"] if row["compile"] else []
    if row["method"] != "full finetune":
        rank, targets = _TORCHTUNE_ADAPTERS[row["model"], row["method"]]
        base = "nf4" if row["method"] == "QLoRA" else "16-bit"
        chosen = {"checkpoint": "full", "loss": "chunked", "optimizer_kernel": "fused"}
        words = _words(*place, *compiled, lora=rank, lora_targets=targets, base=base, **chosen, **common)
        return Run(_offloading(words, "activations") if row.get("offload") else words, "allocated")
    if "Optimization flags" not in row["source"]:
        # `8B_full_single_device.yaml`, on the card that it is written for.
        _refuse(
            _card(row["gpu"]) != "rtx-4090", "which flags of the recipe were changed for the larger card is not stated"
        )
        chosen = {"optimizer": "paged-adamw-8bit", "checkpoint": "full", "loss": "chunked"}
        return Run(_words(*place, *compiled, "--step-in-backward", **chosen, **common), "allocated")
    at_once = ["--step-in-backward"] if "fused into backward" in row["optimizer"] else []
    # `compile_loss` returns a compiled loss, which the recipe drops; a chunked one is compiled in place.
    at_once += ["--eager-loss"] if row["compile"] and row["loss_chunking"] == "none" else []
    chosen = {"checkpoint": _recomputation(row["ac"]), "loss": "full" if row["loss_chunking"] == "none" else "chunked"}
    return Run(_words(*place, *compiled, *at_once, optimizer_kernel="fused", **chosen, **common), "allocated")


# -- DeepSpeed, Arctic's long sequences


def _deepspeed(row: Row) -> Run:
    layers, hidden, heads, vocab, batch = _need(row, "layers", "hidden", "heads", "vocab", "micro_batch")
    seq, dp, recompute, zero = _need(row, "seq_len", "dp", "ac", "zero_stage")
    model = _config(
        row["model"], model_type="gpt2", n_layer=layers, n_embd=hidden, n_head=heads, vocab_size=vocab,
        tie_word_embeddings=False,
    )  # fmt: skip
    words = _words(
        model, f"{dp}x{_card(row['gpu'])}", framework="deepspeed", zero=zero, checkpoint=_recomputation(recompute),
        loss="full", seq=seq, micro_batch=batch, tp=1, pp=1, cp=1, shard=dp,
    )  # fmt: skip
    return Run(words, "allocated")


def _alst(row: Row) -> Run:
    """Ulysses' sequence parallelism, ZeRO over all GPUs, Liger's kernels; expandable segments."""
    offload = ["optimizer"]
    offload += ["parameters"] if "params->CPU" in row["offload"] else []
    offload += ["activations"] if "CPU offload of checkpoints" in row["ac"] else []
    tiled = ["--tiled-mlp"] if "tiled MLP" in row["notes"] else []
    words = _words(
        _preset(row["model"]), f"{row['gpus']}x{_card(row['gpu'])}", "--liger", *tiled, framework="deepspeed", zero=3,
        checkpoint="full", seq=row["seq_len"], micro_batch=row["micro_batch"], tp=1, pp=1, cp=row["cp"],
    )  # fmt: skip
    return Run(_offloading(words, ",".join(offload)), "process")


# -- Megatron's continuous integration

# Tokens of `nemotron_2_256k.model`, of Llama 2 and Mixtral, and of GPT-2's `vocab.json`, by what the configurations name.
_TOKENIZERS = {"GPTSentencePieceTokenizer": 256000, "Llama2Tokenizer": 32000}
_GPT2_TOKENS = 50257


def _megatron(row: Row) -> Run:
    layers, hidden, heads = _need(row, "layers", "hidden", "heads")
    recompute = _recomputation(row["ac"])
    if row["model"].endswith("_memory_speed"):  # one node of eight, in `tests/test_utils/recipes`
        row = row | {"gpus": 8, "dp": 8 // (row["tp"] * row["pp"])}
    dp, batch, seq = _need(row, "dp", "micro_batch", "seq_len")
    _refuse(row.get("zero_stage", 0) > 1, "Megatron's own FSDP is no framework of the planner")
    _refuse("account_for_embedding" in row["model"], "embedding and head count as layers of the pipeline")
    switches = ["--no-sequence-parallel"] if row["tp"] > 1 and not row.get("sp") else []
    # Its default rate is 0.1.
    switches += ["--dropout"] if str(row["args"].get("--hidden-dropout", "0.1")) not in ("0", "0.0") else []
    words = _words(
        _megatron_model(row, layers, hidden, heads, seq), f"{row['gpus']}x{_card(row['gpu'])}", *switches,
        framework="megatron", checkpoint=recompute, loss="full", seq=seq, micro_batch=batch,
        precision="fp8" if "fp8" in row["precision"] else "bf16-mixed", zero=row["zero_stage"], shard=dp,
        attention="eager" if row.get("attention") == "unfused" else "flash", global_batch=row["global_batch"],
        tp=row["tp"], pp=row["pp"], cp=row["cp"], ep=row.get("ep"), pp_chunks=_megatron_chunks(row, layers),
    )  # fmt: skip
    return Run(words, "allocated", "last stage")


def _megatron_chunks(row: Row, layers: int) -> int | None:
    virtual = row.get("vpp")
    if virtual is None:
        return None
    each = re.fullmatch(r"layers/vstage=(\d+)", str(virtual))
    return layers // row["pp"] // int(each[1]) if each else int(virtual)


def _megatron_model(row: Row, layers: int, hidden: int, heads: int, seq: int) -> str:
    """A GPT of its own as the closest model that has a `config.json`: LayerNorm, GELU, biases; a vocabulary that is padded."""
    given = row.get("args", {})
    _refuse(given.get("--num-experts"), "a mixture of experts of its own, for which there is no `config.json`")
    unit = int(given.get("--make-vocab-size-divisible-by", 128)) * row["tp"]
    tokens = row.get("vocab") or _TOKENIZERS.get(given.get("--tokenizer-type"), _GPT2_TOKENS)
    vocab = -(-tokens // unit) * unit
    untied = bool(given.get("--untie-embeddings-and-output-weights"))
    common = {"vocab_size": vocab, "tie_word_embeddings": not untied}
    if row.get("kv_heads") or given.get("--position-embedding-type") == "rope" or "--disable-bias-linear" in given:
        return _config(
            row["id"], model_type="starcoder2", hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=row.get("kv_heads") or heads, intermediate_size=row.get("ffn") or 4 * hidden,
            max_position_embeddings=seq, use_bias="--disable-bias-linear" not in given, **common,
        )  # fmt: skip
    return _config(
        row["id"], model_type="gpt2", n_embd=hidden, n_layer=layers, n_head=heads, n_inner=row.get("ffn") or 4 * hidden,
        n_positions=seq, resid_pdrop=0.1, **common,
    )  # fmt: skip


# -- adapters of Answer.AI's script and of LitGPT's


def _fsdp_qlora(row: Row) -> Run:
    """The defaults of its `train.py`: rank 64 on all matrices but the attention's last, in BF16; transformers of March 2024."""
    sharded = "fsdp" in row
    words = _words(
        _preset(row["model"]), f"2x{_card(row['gpu'])}", "--fp32-logits", "--lora-dropout",
        framework="fsdp2" if sharded else "torch", zero=3 if sharded else 0, precision="bf16",
        checkpoint=_recomputation(row["ac"]), loss="full", lora=64,
        lora_targets="q_proj,k_proj,v_proj,mlp", base="nf4" if row["method"] == "QLoRA" else "16-bit",
        seq=row["seq_len"], micro_batch=row["micro_batch"], tp=1, pp=1, cp=1,
    )  # fmt: skip
    return Run(_offloading(words, "parameters") if row.get("offload") else words, "reserved")


_LITGPT_BASES = {"LoRA": "16-bit", "QLoRA bnb.nf4": "nf4-single", "QLoRA bnb.nf4-dq": "nf4"}
_LITGPT_STEP = 128  # sequences
_STABLELM_ALPHA_3B = {
    "model_type": "gpt_neox", "hidden_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 32, "intermediate_size": 16384,
    "vocab_size": 50688, "max_position_embeddings": 4096, "use_parallel_residual": True,
}  # fmt: skip


def _litgpt(row: Row) -> Run:
    """The longest sample comes first. `finetune/lora.py` has rank 8 beside queries and values, and on one GPU recomputes none."""
    if row["method"] == "pretrain":
        return _litgpt_pretraining(row)
    _refuse("config_hub" in row["source"], "the sequence length is a cap that the data may not have reached")
    _refuse(row["gpus"] > 1, "how the model was loaded and sharded is not stated")
    stablelm = row["model"].startswith("StableLM")
    model = _config(row["model"], **_STABLELM_ALPHA_3B) if stablelm else _preset(row["model"])
    words = _words(
        model, "a100-40", "--lora-dropout", precision="bf16", lora=8, lora_targets="q_proj,v_proj",
        base=_LITGPT_BASES[row["method"]], checkpoint="none", loss="full", seq=row["seq_len"],
        micro_batch=row["micro_batch"], global_batch=_LITGPT_STEP,
    )  # fmt: skip
    return Run(words, "allocated")


def _litgpt_pretraining(row: Row) -> Run:
    """`extensions/thunder/pretrain.py`: TinyLlama's whole context of 2048 tokens, no recomputation."""
    _refuse("thunder" in row["compile"], "Thunder's compiler is no choice of the planner")
    shards = row.get("fsdp")
    words = _words(
        "tinyllama-1.1b", f"{row['gpus']}xa100-40", framework="fsdp2" if shards else "torch", zero=3 if shards else 0,
        precision="bf16", checkpoint="none", loss="full", seq=2048, micro_batch=row["micro_batch"],
        global_batch=row["global_batch"], tp=1, pp=1, cp=1, shard=shards,
    )  # fmt: skip
    return Run(words, "allocated")


def _peft(row: Row) -> Run:
    raise NotSaid("the sequence length is a cap that the data may not have reached")


def _ms_swift(row: Row) -> Run:
    """Its `truncation_strategy` was "delete": samples above the cap are left out, not cut."""
    _need(row, "micro_batch")
    raise NotSaid(
        "samples of all lengths below a cap: what is reserved is the history of an allocator, not of one length"
    )


def _bridge(row: Row) -> Run:
    _refuse("selective" in row.get("ac", ""), "a selective policy of its own")
    raise NotSaid("the batch is not stated")


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
    "peft": _peft,
    "fsdp_qlora": _fsdp_qlora,
}
