"""Language models of transformers, with the losses they are trained with."""

from typing import Any

import torch
from torch import Tensor, nn

from fit.zoo.building import (
    LENGTH,
    ROWS,
    SCALE,
    VOCABULARY,
    Case,
    Loss,
    ids,
    kind,
    next_token,
    own_loss,
    randn,
    seen,
    several,
    text,
)
from fit.zoo.building import case as plain_case

# isort: split
import transformers as hf

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16 * SCALE,
    "intermediate_size": 24 * SCALE,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16 * SCALE,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HALVES = {**SIZES, "head_dim": 8 * SCALE, **SPECIAL}


def case(model: nn.Module, loss: Loss, batches: list[Any]) -> Case:
    return seen(plain_case(model, loss, batches))


def llama_model(**more: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**(SIZES | more), **SPECIAL))


@kind
def llama() -> Case:
    return case(llama_model(), own_loss, several(text))


@kind
def mistral_with_a_window() -> Case:
    return case(hf.MistralForCausalLM(hf.MistralConfig(**HALVES, sliding_window=4)), own_loss, several(text))


@kind
def qwen3() -> Case:
    return case(hf.Qwen3ForCausalLM(hf.Qwen3Config(**HALVES)), own_loss, several(text))


@kind
def phi() -> Case:
    config = hf.PhiConfig(**SIZES, **SPECIAL, resid_pdrop=0.0, embd_pdrop=0.0)
    return case(hf.PhiForCausalLM(config), own_loss, several(text))


@kind
def gemma_2() -> Case:
    config = hf.Gemma2Config(**HALVES, sliding_window=4, query_pre_attn_scalar=8, attn_implementation="eager")
    return case(hf.Gemma2ForCausalLM(config), own_loss, several(text))


@kind
def gemma_3() -> Case:
    config = hf.Gemma3TextConfig(**HALVES, sliding_window=4, query_pre_attn_scalar=8)
    return case(hf.Gemma3ForCausalLM(config), own_loss, several(text))


@kind
def cohere_2() -> Case:
    return case(hf.Cohere2ForCausalLM(hf.Cohere2Config(**HALVES, sliding_window=4)), own_loss, several(text))


@kind
def mixtral_with_its_auxiliary_loss() -> Case:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    config = hf.MixtralConfig(**HALVES, **experts, experts_implementation="eager")
    return case(hf.MixtralForCausalLM(config), own_loss, several(text))


def gpt2_model(dropout: float) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16 * SCALE, "n_embd": 16 * SCALE, "n_layer": 2, "n_head": 2}
    drops = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), dropout)
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **drops, **SPECIAL))


@kind
def gpt2() -> Case:
    return case(gpt2_model(0.1), own_loss, several(text))


@kind
def gpt2_without_dropout() -> Case:
    return case(gpt2_model(0.0), own_loss, several(text))


@kind
def opt_with_functional_dropout() -> Case:
    """Its blocks call `nn.functional.dropout`: no module tells of it."""
    config = hf.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        word_embed_proj_dim=16,
        ffn_dim=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        dropout=0.1,
        **SPECIAL,
    )
    return case(hf.OPTForCausalLM(config), own_loss, several(text))


ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16 * SCALE,
    "intermediate_size": 24 * SCALE,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16 * SCALE,
}


def masked(rows: int) -> dict[str, Tensor]:
    """Two tokens of each row to be guessed, and a third in the first row."""
    batch = text(rows)
    labels = torch.full_like(batch["labels"], -100)
    labels[:, 1:3] = batch["input_ids"][:, 1:3]
    labels[0, 0] = batch["input_ids"][0, 0]
    return {**batch, "labels": labels}


def classified(rows: int) -> dict[str, Tensor]:
    return {**text(rows), "labels": torch.randint(0, 3, (rows,))}


@kind
def bert_for_masked_tokens() -> Case:
    return case(hf.BertForMaskedLM(hf.BertConfig(**ENCODER)), own_loss, several(masked))


@kind
def roberta_classifier_without_dropout() -> Case:
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = hf.RobertaConfig(**(ENCODER | {"max_position_embeddings": 20}), **drops, num_labels=3, **SPECIAL)
    return case(hf.RobertaForSequenceClassification(config), own_loss, several(classified))


@kind
def modernbert_for_masked_tokens() -> Case:
    config = hf.ModernBertConfig(**ENCODER, **SPECIAL, cls_token_id=1, sep_token_id=2, local_attention=4)
    return case(hf.ModernBertForMaskedLM(config), own_loss, several(masked))


# Two sides ------------------------------------------------------------------------------------------------------------


def translated(rows: int) -> dict[str, Tensor]:
    return {**text(rows), "labels": text(rows)["labels"][:, :6].contiguous()}


@kind
def t5() -> Case:
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        **SPECIAL,
    )
    return case(hf.T5ForConditionalGeneration(config), own_loss, several(translated))


SIDES = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "decoder_start_token_id": 2,
    **SPECIAL,
}


@kind
def bart_with_dropout() -> Case:
    config = hf.BartConfig(**SIDES, max_position_embeddings=16, forced_eos_token_id=2)
    return case(hf.BartForConditionalGeneration(config), own_loss, several(translated))


@kind
def whisper() -> Case:
    config = hf.WhisperConfig(
        **SIDES, num_mel_bins=8, max_source_positions=8, max_target_positions=16, suppress_tokens=None
    )

    def heard(rows: int) -> dict[str, Tensor]:
        return {"input_features": randn(rows, 8, 16), "labels": translated(rows)["labels"]}

    return case(hf.WhisperForConditionalGeneration(config), own_loss, several(heard))


@kind
def clip_contrasts_the_rows_of_a_batch() -> Case:
    sizes = {key: value for key, value in ENCODER.items() if key not in ("vocab_size", "max_position_embeddings")}
    texts = {**sizes, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, **SPECIAL}
    config = hf.CLIPConfig(
        text_config=texts, vision_config={**sizes, "image_size": 8, "patch_size": 4}, projection_dim=8
    )

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch, return_loss=True).loss

    def captioned(rows: int) -> dict[str, Tensor]:
        return {"input_ids": text(rows)["input_ids"], "pixel_values": randn(rows, 3, 8, 8)}

    return case(hf.CLIPModel(config), loss, several(captioned))


# Trained in part ------------------------------------------------------------------------------------------------------


@kind
def lora_through_peft() -> Case:
    import peft

    adapters = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return case(peft.get_peft_model(llama_model(), adapters), own_loss, several(text))


@kind
def lora_with_dropout() -> Case:
    import peft

    adapters = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return case(peft.get_peft_model(llama_model(), adapters), own_loss, several(text))


@kind
def one_trained_block() -> Case:
    model = llama_model()
    model.requires_grad_(False)
    model.model.layers[1].requires_grad_(True)
    return case(model, own_loss, several(text))


@kind
def frozen_body_and_a_trained_head() -> Case:
    model = llama_model()
    model.model.requires_grad_(False)
    return case(model, own_loss, several(text))


# As its Trainer and its docs train them -------------------------------------------------------------------------------


@kind
def trainer_with_num_items_in_batch() -> Case:
    """The sum over labels, divided by a count that came with the batch."""

    def counted(rows: int) -> dict[str, Any]:
        batch = text(rows)
        return {**batch, "num_items_in_batch": int((batch["labels"][:, 1:] != -100).sum())}

    return case(llama_model(), own_loss, several(counted))


@kind
def class_weighted_loss_of_the_hugging_face_docs() -> Case:
    """`CustomTrainer.compute_loss` of the Trainer's page."""
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = hf.BertForSequenceClassification(hf.BertConfig(**ENCODER, **drops, num_labels=3))

    def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        labels = inputs["labels"]
        logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
        weights = torch.tensor([1.0, 2.0, 3.0], dtype=logits.dtype, device=logits.device)
        return nn.functional.cross_entropy(logits.view(-1, 3), labels.view(-1), weight=weights)

    def uneven(rows: int) -> dict[str, Tensor]:
        return {**text(rows), "labels": torch.arange(rows) % 3}

    return case(model, loss, several(uneven))


@kind
def gradient_checkpointing_by_transformers() -> Case:
    model = llama_model()
    model.gradient_checkpointing_enable()
    return case(model, own_loss, several(text))


@kind
def several_documents_packed_into_a_row() -> Case:
    """Positions that begin again tell the mask where a document begins."""

    def packed(rows: int) -> dict[str, Tensor]:
        positions = torch.cat([torch.arange(3), torch.arange(LENGTH - 3)])
        labels = tokens = ids(rows)
        labels = labels.clone()
        labels[:, [0, 3]] = -100
        return {"input_ids": tokens, "position_ids": positions.expand(rows, -1), "labels": labels}

    return case(llama_model(), own_loss, several(packed))


@kind
def one_packed_row_without_padding() -> Case:
    """As a collator that flattens gives it: one row, however many documents."""

    def flattened(lengths: list[int]) -> dict[str, Tensor]:
        tokens = ids(1, sum(lengths))
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        return {"input_ids": tokens, "position_ids": positions, "labels": tokens.masked_fill(positions == 0, -100)}

    return case(llama_model(), own_loss, [flattened([4, 3, 5]), flattened([6, 6]), flattened([2, 3, 4])])


@kind
def tied_embeddings() -> Case:
    return case(llama_model(tie_word_embeddings=True), own_loss, several(text))


@kind
def preferences_against_a_reference_model() -> Case:
    """DPO: the pair's log-probabilities under the model and under a frozen one."""
    model, reference = llama_model(), llama_model().double().requires_grad_(False)

    def likelihood(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(input_ids=tokens).logits[:, :-1]
        return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).sum((1, 2))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        margins = []
        for one in (model, reference):
            both = likelihood(one, torch.cat([batch["chosen"], batch["rejected"]]))
            chosen, rejected = both.chunk(2)
            margins.append(chosen - rejected)
        return -nn.functional.logsigmoid(0.1 * (margins[0] - margins[1])).mean()

    return case(model, loss, several(lambda rows: {"chosen": ids(rows), "rejected": ids(rows)}))


@kind
def hidden_states_in_the_loss() -> Case:
    """All hidden states asked for, and a penalty on each."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        output = model(**batch, output_hidden_states=True)
        return output.loss + 1e-2 * torch.stack([hidden.square().mean() for hidden in output.hidden_states]).mean()

    def even(rows: int) -> dict[str, Tensor]:
        tokens = ids(rows)
        return {"input_ids": tokens, "labels": tokens}

    return case(llama_model(), loss, several(even))


@kind
def a_batch_without_ragged_rows() -> Case:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return next_token(model(input_ids=batch).logits, batch)

    return case(llama_model(), loss, [ids(ROWS), ids(ROWS, 6), ids(ROWS - 1)])
