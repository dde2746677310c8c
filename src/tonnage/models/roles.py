"""What a tensor is for, by its name in transformers: attention, MLP, norm, embedding or head."""

import re

# Whether it is part of what mixes tokens; of a mixer that keeps a state; of a decoder's attention to its encoder.
is_attention = re.compile(
    r"att|mixer|mamba|ssm|conv|recurrent|temporal_block|token_mix|time_mix|retention|rotary|kda", re.IGNORECASE
).search
is_recurrent = re.compile(
    r"linear_attn|mamba|ssm|A_log|recurrent|rg_lru|short_?conv|\bconv\b|kda|time_mix|time_decay|delta_?net|receptance"
).search
is_cross = re.compile(
    r"EncDecAttention|encoder_attn|cross_?att|crossattention|encoder_decoder_att", re.IGNORECASE
).search
# Whether it is the gate matrix of an MLP; a token beside the patches of an image; a part of the output head.
is_gate = re.compile(
    r"gate_proj|gate_up|gate_and_up|wi_1|\bw3\b|linear_v|w1_w3|gated|fc1_g|gate_linear|Wi\b|c_fc_1|input_linear"
).search
is_extra_token = re.compile(r"(cls_token|class_token|class_embedding|distillation_token|register_tokens)$").search
is_head = re.compile(
    r"^(language_model\.)?(lm_head|cls|classifier|score|qa_outputs|embed_out|output_projection|generator|head|ctc|"
    r"decoder\.(bias|weight)$|"
    r"predictions|final_logits|logit|vocab_|lm_|pred_layer|proj_out|distillation_classifier|cls_classifier|fc\d?\.)"
).search

_NORM = re.compile(r"norm|(^|\.)ln_?\w*\.|layrnorm", re.IGNORECASE)
_INNER_NORM = re.compile(
    r"(q|k|v|query|key|qk|kv|q_a|kv_a|b|c|dt|mamba|linear_attn|mixer|ssm)[._](layer_?)?norm|(attn|attention)\.(norm|sub_norm)",
    re.IGNORECASE,
)
_EXPERTS = re.compile(r"experts?(\.|_|$)")
_SHARED = re.compile(r"shared|router|gate\.|gate$|gate\.weight|residual|dense")
_EMBEDDING = re.compile(r"embed|wte|wpe|shared\.|patch|position|token_type|cls_token|class_token|mask_token|register")
_PROJECTOR = re.compile(r"projector|connector|merger|embed_vision|resampler")
_TOWERS = {
    "vision": re.compile(r"vision|visual|image|vit\b"),
    "audio": re.compile(r"audio|speech"),
    "encoder": re.compile(r"(^|\.)encoder\b"),
}


def part(name: str) -> str:
    """Return the part that a tensor or module list belongs to: projector, vision, audio, encoder, else language."""
    if _PROJECTOR.search(name):
        return "projector"
    return next((tower for tower, form in _TOWERS.items() if form.search(name) and "text" not in name), "language")


def is_norm(name: str, dimensions: int) -> bool:
    """Say whether it is a norm of the layer; those of queries and keys belong to attention."""
    return dimensions <= 1 and bool(_NORM.search(name)) and not _INNER_NORM.search(name)


def is_routed_expert(name: str) -> bool:
    """Say whether it belongs to routed experts."""
    return bool(_EXPERTS.search(name)) and not _SHARED.search(name)


def is_embedding(name: str) -> bool:
    """Say whether it embeds tokens, positions or patches."""
    return bool(_EMBEDDING.search(name)) and not is_head(name)
