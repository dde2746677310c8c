"""The real modules of diffusion pipelines, from their published configurations, with random weights and inputs of any size.

Needs `diffusers` and `transformers`. Sizes are those of latents: (batch, frames, height, width). An image has one frame; the
width of a text is its tokens.
"""

from typing import Any

import torch

CLIP_L: dict[str, Any] = {
    "vocab_size": 49408, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "max_position_embeddings": 77, "hidden_act": "quick_gelu", "projection_dim": 768,
}  # fmt: skip
CLIP_G = CLIP_L | {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20, "hidden_act": "gelu",
    "projection_dim": 1280,
}  # fmt: skip
T5_XXL: dict[str, Any] = {
    "vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
}  # fmt: skip
KL: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4, "latent_channels": 4, "sample_size": 512,
}  # fmt: skip
KL_16 = KL | {"latent_channels": 16, "sample_size": 1024, "use_quant_conv": False, "use_post_quant_conv": False}
FLUX = {"guidance_embeds": True}
SDXL = {
    "block_out_channels": (320, 640, 1280), "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20), "cross_attention_dim": 2048, "use_linear_projection": True,
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
    "sample_size": 128,
}  # fmt: skip
SD3_MEDIUM = {
    "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 192,
}  # fmt: skip
SD35_LARGE = {
    "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192, "qk_norm": "rms_norm",
}  # fmt: skip
WAN_SMALL = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
PIXART = {
    "sample_size": 128, "cross_attention_dim": 1152, "caption_channels": 4096, "interpolation_scale": 2,
    "use_additional_conditions": False,
}  # fmt: skip

# The part of a preset, the class that it is of, and how that is configured.
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "sd-1.5": ("UNet2DConditionModel", {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}),
    "sdxl": ("UNet2DConditionModel", SDXL),
    "sd3-medium": ("SD3Transformer2DModel", SD3_MEDIUM),
    "sd3.5-large": ("SD3Transformer2DModel", SD35_LARGE),
    "flux-dev": ("FluxTransformer2DModel", FLUX),
    "flux-schnell": ("FluxTransformer2DModel", {}),
    "wan-2.1-1.3b": ("WanTransformer3DModel", WAN_SMALL),
    "wan-2.1-14b": ("WanTransformer3DModel", {}),
    "pixart-sigma": ("PixArtTransformer2DModel", PIXART),
    "qwen-image": ("QwenImageTransformer2DModel", {}),
    "hunyuan-video": ("HunyuanVideoTransformer3DModel", {}),
    "clip-l": ("CLIPTextModel", CLIP_L),
    "clip-l-projected": ("CLIPTextModelWithProjection", CLIP_L),
    "clip-g": ("CLIPTextModelWithProjection", CLIP_G),
    "t5-xxl": ("T5EncoderModel", T5_XXL),
    "umt5-xxl": ("UMT5EncoderModel", T5_XXL | {"vocab_size": 256384}),
    "vae-4": ("AutoencoderKL", KL),
    "vae-16": ("AutoencoderKL", KL_16),
    "vae-wan": ("AutoencoderKLWan", {}),
}
_SD3_TEXT, _T5_TEXT, _QWEN_TEXT, _HUNYUAN_TEXT, _PIXART_TEXT = 77 + 256, 512, 512, 256, 300


def build(name: str, dtype: torch.dtype, device: str = "cuda") -> torch.nn.Module:
    """The part on the card."""
    import diffusers
    import transformers

    kind, config = PARTS[name]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            if hasattr(diffusers, kind):
                module = getattr(diffusers, kind)(**config)
            else:
                of = {"T5EncoderModel": "T5Config", "UMT5EncoderModel": "UMT5Config"}.get(kind, "CLIPTextConfig")
                module = getattr(transformers, kind)(getattr(transformers, of)(**config))
    finally:
        torch.set_default_dtype(before)
    return module.to(device, dtype)


def inputs(name: str, size: tuple[int, int, int, int], dtype: torch.dtype) -> dict[str, Any]:
    """What a pass of a denoiser or a text encoder is given."""
    kind, config = PARTS[name]
    batch, frames, height, width = size

    def noise(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    times = torch.ones(batch, device="cuda", dtype=torch.long)
    if kind.startswith(("CLIP", "T5", "UMT5")):
        return {"input_ids": torch.zeros(batch, width, device="cuda", dtype=torch.long)}
    if kind == "UNet2DConditionModel":
        given = {"sample": noise(batch, 4, height, width), "timestep": times}
        given["encoder_hidden_states"] = noise(batch, 77, config["cross_attention_dim"])
        if "addition_embed_type" in config:
            given["added_cond_kwargs"] = {"text_embeds": noise(batch, 1280), "time_ids": noise(batch, 6)}
        return given
    if kind == "SD3Transformer2DModel":
        text = {"encoder_hidden_states": noise(batch, _SD3_TEXT, 4096), "pooled_projections": noise(batch, 2048)}
        return {"hidden_states": noise(batch, 16, height, width), "timestep": times, **text}
    if kind == "FluxTransformer2DModel":
        tokens = height * width // 4
        text = {"encoder_hidden_states": noise(batch, _T5_TEXT, 4096), "pooled_projections": noise(batch, 768)}
        places = {"img_ids": noise(tokens, 3), "txt_ids": noise(_T5_TEXT, 3)}
        scale = {"guidance": noise(batch)} if config.get("guidance_embeds") else {}
        return {"hidden_states": noise(batch, tokens, 64), "timestep": noise(batch), **text, **places, **scale}
    if kind == "WanTransformer3DModel":
        text = noise(batch, _T5_TEXT, 4096)
        return {
            "hidden_states": noise(batch, 16, frames, height, width),
            "timestep": times,
            "encoder_hidden_states": text,
        }
    if kind == "PixArtTransformer2DModel":
        mask = torch.ones(batch, _PIXART_TEXT, device="cuda", dtype=dtype)
        text = {"encoder_hidden_states": noise(batch, _PIXART_TEXT, 4096), "encoder_attention_mask": mask}
        sizes: dict[str, Any] = {"resolution": None, "aspect_ratio": None}
        return {"hidden_states": noise(batch, 4, height, width), "timestep": times, **text, "added_cond_kwargs": sizes}
    if kind == "QwenImageTransformer2DModel":
        mask = torch.ones(batch, _QWEN_TEXT, device="cuda", dtype=torch.bool)
        text = {"encoder_hidden_states": noise(batch, _QWEN_TEXT, 3584), "encoder_hidden_states_mask": mask}
        shapes = [[(1, height // 2, width // 2)]] * batch
        return {
            "hidden_states": noise(batch, height * width // 4, 64),
            "timestep": noise(batch),
            "img_shapes": shapes,
            **text,
        }
    mask = torch.ones(batch, _HUNYUAN_TEXT, device="cuda", dtype=torch.bool)
    text = {"encoder_hidden_states": noise(batch, _HUNYUAN_TEXT, 4096), "encoder_attention_mask": mask}
    given = {"hidden_states": noise(batch, 16, frames, height, width), "timestep": times, "guidance": noise(batch)}
    return given | text | {"pooled_projections": noise(batch, 768)}


def target(name: str, size: tuple[int, int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """What a denoiser's output is compared with."""
    kind, _ = PARTS[name]
    batch, frames, height, width = size
    if kind in ("FluxTransformer2DModel", "QwenImageTransformer2DModel"):
        return torch.randn(batch, height * width // 4, 64, device="cuda", dtype=dtype)
    channels = {"UNet2DConditionModel": 4, "PixArtTransformer2DModel": 8}.get(kind, 16)
    video = kind in ("WanTransformer3DModel", "HunyuanVideoTransformer3DModel")
    return torch.randn(batch, channels, *((frames,) if video else ()), height, width, device="cuda", dtype=dtype)
