"""The structure of each layer of a configured model: its heads, windows, experts. No parameters are counted here.

Most families use different names for the same things, which `fields` knows; this module has the rules by which a family
decides which layers have a window and what a state holds.
"""

from tonnage.errors import BadModel
from tonnage.models.fields import Fields
from tonnage.models.shape import AttentionKind, AttentionShape, FeedForward

# Every n-th layer has full attention and the others a window, unless the configuration lists `layer_types`.
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2, "olmo3": 4, "exaone4": 4}
# Their window applies only if a switch is on; elsewhere a stated window is used.
_WINDOW_SWITCH = dict.fromkeys(("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"), "use_sliding_window")
_SLIDING = {"sliding_attention", "chunked_attention", "sliding", "local", "local_attention"}
_PARALLEL_FLAGS = ("use_parallel_residual", "parallel_attn", "parallel_residual")
_ALWAYS_PARALLEL = {"gptj", "codegen", "phi", "cohere", "cohere2"}


def attention(fields: Fields, model_type: str, index: int, *, causal: bool, side: str = "") -> AttentionShape | None:
    """Return a layer's attention; None if the configuration does not give the number of heads."""
    if fields.get("kv_lora_rank") is not None and fields.get("qk_rope_head_dim") is not None:
        return _latent(fields)
    name = f"{side}_attention_heads"
    if side and fields.get(name) is not None:
        heads = fields.whole(name, least=1)
    elif fields.find("heads") is None:
        return None
    else:
        heads = fields.need("heads")
    head_dim = fields.find("head_dim") or fields.need("hidden") // heads
    window = fields.find("window") or 0 if _slides(fields, model_type, index) else 0
    shares_one = fields.flag("multi_query") and not fields.flag("new_decoder_architecture")
    kv_heads = 1 if shares_one else fields.find("kv_heads") or heads
    if heads % kv_heads:
        raise BadModel(
            f"{heads} attention heads cannot share {kv_heads} key and value heads.",
            hint="The number of heads must be a multiple of the key and value heads.",
        )
    return AttentionShape(
        kind=AttentionKind.SLIDING if window else AttentionKind.FULL,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=head_dim,
        window=window,
        causal=causal,
    )


def recurrent(fields: Fields) -> AttentionShape:
    """Return a mixer that keeps a state per sequence, and the inputs that its causal convolution needs."""

    def number(*names: str) -> int:
        found = next((name for name in names if fields.get(name) is not None), None)
        return fields.whole(found) if found is not None else 0

    if fields.get("linear_num_value_heads") is not None:
        keys = number("linear_num_key_heads") * number("linear_key_head_dim")
        values = number("linear_num_value_heads") * number("linear_value_head_dim")
        kept = values * number("linear_key_head_dim") + (2 * keys + values) * number("linear_conv_kernel_dim")
    else:
        hidden, expand = fields.need("hidden"), fields.get("mamba_expand", fields.get("expand", 2))
        inner = number("mamba_d_ssm", "lru_width") or int(
            hidden * expand if isinstance(expand, (int, float)) else 2 * hidden
        )
        state = number("mamba_d_state", "state_size", "ssm_state_size")
        convolution = number("mamba_d_conv", "conv_kernel", "conv1d_width", "conv_L_cache")
        groups = number("mamba_n_groups", "n_groups")
        kept = inner * max(state, 1) + (inner + 2 * groups * state) * convolution
    kind = AttentionKind.RECURRENT
    return AttentionShape(kind=kind, heads=0, kv_heads=0, head_dim=0, value_head_dim=0, state_elements=kept)


def feed_forward(fields: Fields, *, widest: int, gated: bool, sparse: bool, side: str = "") -> FeedForward:
    """Return the MLP of a layer; `widest` is its width if the configuration does not give one."""
    if not sparse:
        stated = fields.get(f"{side}_ffn_dim") if side else None
        intermediate = fields.whole(f"{side}_ffn_dim", least=1) if stated else fields.find("intermediate")
        return FeedForward(intermediate=intermediate or widest, gated=gated)
    width = fields.find("expert_intermediate") or widest
    experts = fields.need("experts")
    shared = fields.find("shared_intermediate")
    if shared is None and fields.get("n_shared_experts") is not None:
        shared = fields.whole("n_shared_experts") * width
    return FeedForward(
        intermediate=width,
        gated=gated,
        experts=experts,
        experts_per_token=min(experts, fields.find("experts_per_token") or 1),
        shared_intermediate=shared or 0,
    )


def is_parallel(fields: Fields, model_type: str) -> bool:
    """Say whether attention and MLP read the same input."""
    return model_type in _ALWAYS_PARALLEL or any(fields.flag(name) for name in _PARALLEL_FLAGS)


def _slides(fields: Fields, model_type: str, index: int) -> bool:
    for name in ("layer_types", "attention_layers"):
        listed = fields.get(name)
        if isinstance(listed, (list, tuple)) and listed:
            return listed[index % len(listed)] in _SLIDING
    every = fields.get("sliding_window_pattern", _FULL_EVERY.get(model_type))
    if isinstance(every, int) and every > 0:
        return (index + 1) % every != 0
    switch = _WINDOW_SWITCH.get(model_type)
    if switch is None:
        return True
    return fields.flag(switch) and index >= (fields.find("window_start") or 0)


def _latent(fields: Fields) -> AttentionShape:
    heads = fields.need("heads")
    rope, nope = fields.whole("qk_rope_head_dim", least=1), fields.whole("qk_nope_head_dim")
    return AttentionShape(
        kind=AttentionKind.LATENT,
        heads=heads,
        kv_heads=heads,
        head_dim=rope + nope,
        value_head_dim=fields.whole("v_head_dim", least=1),
        latent_rank=fields.whole("kv_lora_rank", least=1),
        query_rank=fields.whole("q_lora_rank") if fields.get("q_lora_rank") is not None else 0,
        rope_dim=rope,
    )
