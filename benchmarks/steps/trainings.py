"""Trainings whose step times are measured and predicted: language, vision, diffusion, recurrent, graph; from tiny to 8 B."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]
CUDA = torch.device("cuda")


@dataclass(frozen=True, kw_only=True)
class Training:
    """How to build a model and its batch, and how people would run it."""

    build: Callable[..., tuple[nn.Module, Batch]]
    settings: dict[str, Any] = field(default_factory=dict)
    precision: str = "bf16"  # "fp32", "tf32", "amp", "amp-fp16", "bf16"
    optimizer: str = "adamw-fused"
    compiled: bool = False
    checkpointed: bool = False
    accumulate: int = 1
    samples: int = 1  # of a batch
    tokens: int = 0  # of a batch, where it has tokens


def prepare(training: Training) -> Callable[..., Tensor]:
    """One step of it, on the current device. It calls `mark` at the end of each phase that the host is through with."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = training.precision == "tf32"
    torch.set_default_dtype(torch.bfloat16 if training.precision == "bf16" else torch.float32)
    with CUDA:
        model, batch = training.build(**training.settings)
    torch.set_default_dtype(torch.float32)
    model.train()
    if training.checkpointed:
        model.gradient_checkpointing_enable()
    optimizer = _optimizer(training.optimizer, [p for p in model.parameters() if p.requires_grad])
    run: Callable[..., Any] = torch.compile(model) if training.compiled else model
    narrow = {"amp": torch.bfloat16, "amp-fp16": torch.float16}.get(training.precision)
    scaler = torch.amp.GradScaler("cuda", enabled=training.precision == "amp-fp16")

    def step(mark: Callable[[str], None] = lambda phase: None) -> Tensor:
        for _ in range(training.accumulate):
            with torch.autocast("cuda", narrow) if narrow else nullcontext():
                output = run(**batch)
                loss = output if isinstance(output, Tensor) else output.loss
            mark("forward")
            scaler.scale(loss / training.accumulate).backward()
            mark("backward")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        mark("optimizer")
        return loss.detach()

    return step


def _optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)
    how = name.removeprefix("adamw-")
    return torch.optim.AdamW(parameters, lr=1e-5, fused=how == "fused", foreach=how == "foreach")


# Language models ------------------------------------------------------------------------------------------------------


def _tokens(batch: int, length: int, vocabulary: int) -> Batch:
    ids = torch.randint(2, vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids}


def gpt2(
    width: int = 768, layers: int = 12, heads: int = 12, batch: int = 8, length: int = 1024, **options: Any
) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=width, n_layer=layers, n_head=heads, use_cache=False, **options)
    return GPT2LMHeadModel(config), _tokens(batch, length, 50000)


LLAMAS = {
    "0.1b": (768, 2048, 12, 12, 4, 32000), "0.5b": (896, 4864, 24, 14, 2, 151936), "1b": (2048, 8192, 16, 32, 8, 128256),
    "3b": (3072, 8192, 28, 24, 8, 128256), "8b": (4096, 14336, 32, 32, 8, 128256),
}  # fmt: skip


def _llama_config(size: str, **options: Any) -> Any:
    from transformers import LlamaConfig

    hidden, intermediate, layers, heads, kv_heads, vocabulary = LLAMAS[size]
    return LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, use_cache=False, max_position_embeddings=65536, **options,
    )  # fmt: skip


def llama(size: str = "1b", batch: int = 4, length: int = 2048, attention: str = "sdpa", adapters: int = 0) -> Any:
    from transformers import LlamaForCausalLM

    config = _llama_config(size, attn_implementation=attention)
    model: nn.Module = LlamaForCausalLM(config)
    if adapters:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=adapters, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model, _tokens(batch, length, config.vocab_size)


def qwen3(batch: int = 4, length: int = 2048, layers: int = 28) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, use_cache=False, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config), _tokens(batch, length, 151936)


def mixtral(batch: int = 8, length: int = 1024) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=1024, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=4,
        num_local_experts=8, vocab_size=32000, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config), _tokens(batch, length, 32000)


def bert(width: int = 768, layers: int = 12, heads: int = 12, batch: int = 32, length: int = 512) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width
    )
    return BertForMaskedLM(config), _tokens(batch, length, 30000)


def t5(batch: int = 16, length: int = 512) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=768,
        d_kv=64,
        d_ff=3072,
        num_layers=12,
        num_heads=12,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config), _tokens(batch, length, 32000) | {
        "labels": torch.randint(2, 32000, (batch, 128))
    }


SIZES = {
    "OPT": {"hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
            "word_embed_proj_dim": 1024},
    "GPTNeoX": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    "Qwen2": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
              "num_key_value_heads": 2, "tie_word_embeddings": True},
    "Gemma2": {"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 18, "num_attention_heads": 4,
               "num_key_value_heads": 1, "head_dim": 256},
    "Mistral": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 12, "num_attention_heads": 32,
                "num_key_value_heads": 8, "sliding_window": None},
    "Olmoe": {"hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 16,
              "num_key_value_heads": 16, "num_experts": 16, "num_experts_per_tok": 4, "vocab_size": 50304},
    "Starcoder2": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 12, "num_attention_heads": 16,
                   "num_key_value_heads": 2},
    "GPTNeo": {"hidden_size": 1024, "num_layers": 12, "num_heads": 16, "attention_types": [[["global", "local"], 6]]},
    "Cohere": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 16,
               "vocab_size": 128000},
    "Olmo": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 16},
    "SmolLM3": {"hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 15,
                "num_key_value_heads": 5, "vocab_size": 49152, "pad_token_id": 0},
    "Bloom": {"hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880},
    "Falcon": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "vocab_size": 65024},
    "StableLm": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 32,
                 "num_key_value_heads": 32, "vocab_size": 100352},
    "Phi3": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32},
    "Gemma": {"hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18, "num_attention_heads": 8,
              "num_key_value_heads": 1, "head_dim": 256},
    "Olmo2": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 16,
              "vocab_size": 100352},
    "Qwen3Moe": {"hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 12, "num_attention_heads": 16,
                 "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4},
    "Granite": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
                "num_key_value_heads": 4, "vocab_size": 49152},
    "Phi": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 16},
}  # fmt: skip


def causal(kind: str, batch: int, length: int) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(use_cache=False, **SIZES[kind])
    return getattr(transformers, f"{kind}ForCausalLM")(config), _tokens(batch, length, 32000)


def masked(kind: str, batch: int, length: int, **options: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**options)
    return getattr(transformers, f"{kind}ForMaskedLM")(config), _tokens(batch, length, 30000)


def bart(batch: int, length: int) -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        d_model=768, encoder_layers=6, decoder_layers=6, encoder_attention_heads=12, decoder_attention_heads=12,
        encoder_ffn_dim=3072, decoder_ffn_dim=3072, use_cache=False,
    )  # fmt: skip
    return BartForConditionalGeneration(config), _tokens(batch, length, 50000)


def whisper(batch: int, length: int = 64) -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8, decoder_attention_heads=8,
        encoder_ffn_dim=2048, decoder_ffn_dim=2048, use_cache=False,
    )  # fmt: skip
    sound = {"input_features": torch.randn(batch, 80, 3000), "labels": torch.randint(2, 50000, (batch, length))}
    return WhisperForConditionalGeneration(config), sound


# Vision and diffusion -------------------------------------------------------------------------------------------------


def _images(batch: int, side: int = 224) -> Batch:
    return {"pixel_values": torch.randn(batch, 3, side, side), "labels": torch.randint(0, 1000, (batch,))}


def vit(width: int = 768, layers: int = 12, heads: int = 12, batch: int = 128) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        num_labels=1000,
    )
    return ViTForImageClassification(config), _images(batch)


def vision(kind: str, batch: int = 128, side: int = 224, channels_last: bool = False) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(num_labels=1000)
    model = getattr(transformers, f"{kind}ForImageClassification")(config)
    inputs = _images(batch, side)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        inputs["pixel_values"] = inputs["pixel_values"].contiguous(memory_format=torch.channels_last)
    return model, inputs


class TimmClassifier(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        import timm

        self.model = timm.create_model(name)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(pixel_values), labels)


def timm_model(name: str, batch: int = 128) -> Any:
    return TimmClassifier(name), _images(batch)


def clip(batch: int) -> Any:
    from transformers import CLIPConfig, CLIPModel

    texts = {"input_ids": torch.randint(2, 49000, (batch, 77)), "pixel_values": torch.randn(batch, 3, 224, 224)}
    return CLIPModel(CLIPConfig()), texts | {"return_loss": True}


class DiffusionTransformer(nn.Module):
    """Patches of latents, conditioned by scale and shift."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, width, 2, 2)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DiffusionBlock(width, heads) for _ in range(layers))
        self.out = nn.Linear(width, 16)

    def forward(self, latents: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        x = self.patch(latents).flatten(2).transpose(1, 2)
        condition = self.time(time)
        for block in self.blocks:
            x = block(x, condition)
        return F.mse_loss(self.out(x), noise)


class DiffusionBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.condition(condition)[:, None].chunk(6, -1)
        y = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate1 * self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


def diffusion_transformer(width: int = 768, layers: int = 12, heads: int = 12, batch: int = 64, side: int = 32) -> Any:
    inputs = {
        "latents": torch.randn(batch, 4, side, side), "time": torch.randn(batch, 256),
        "noise": torch.randn(batch, (side // 2) ** 2, 16),
    }  # fmt: skip
    return DiffusionTransformer(width, layers, heads), inputs


class UNet(nn.Module):
    """Convolutions with group norms, down and up."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.begin, self.end = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down = nn.ModuleList(ResidualBlock(w, w) for w in widths)
        self.shrink = nn.ModuleList(nn.Conv2d(w, 2 * w, 3, 2, 1) for w in widths[:-1])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.up = nn.ModuleList(ResidualBlock(2 * w, w) for w in reversed(widths[:-1]))

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        x, kept = self.begin(images), []
        for block, shrink in zip(self.down, [*self.shrink, None], strict=True):
            x = block(x)
            if shrink is not None:
                kept.append(x)
                x = shrink(x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat((grow(x), kept.pop()), 1))
        return F.mse_loss(self.end(x), noise)


class ResidualBlock(nn.Module):
    def __init__(self, into: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, into), nn.GroupNorm(32, width)
        self.conv1, self.conv2 = nn.Conv2d(into, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.skip = nn.Conv2d(into, width, 1) if into != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


def unet(width: int = 128, levels: int = 4, batch: int = 16, side: int = 64) -> Any:
    return UNet(width, levels), {
        "images": torch.randn(batch, 3, side, side),
        "noise": torch.randn(batch, 3, side, side),
    }


# Recurrent, graph, tiny -----------------------------------------------------------------------------------------------


class RecurrentModel(nn.Module):
    def __init__(self, kind: str, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = getattr(nn, kind)(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden, _ = self.layers(self.embedding(input_ids))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def recurrent(kind: str = "LSTM", width: int = 1024, layers: int = 2, batch: int = 64, length: int = 128) -> Any:
    return RecurrentModel(kind, width, layers, 10000), _tokens(batch, length, 10000)


class GraphNetwork(nn.Module):
    """Messages along edges, summed at their ends."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, 40)

    def forward(self, features: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        x = features
        for layer in self.layers:
            summed = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
            x = F.relu(layer(torch.cat((x, summed), -1)))
        return F.cross_entropy(self.head(x), labels)


def graph(nodes: int = 100_000, edges: int = 1_000_000, width: int = 256, layers: int = 4) -> Any:
    inputs = {
        "features": torch.randn(nodes, width), "edges": torch.randint(0, nodes, (2, edges)),
        "labels": torch.randint(0, 40, (nodes,)),
    }  # fmt: skip
    return GraphNetwork(width, layers), inputs


class Perceptron(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.mse_loss(x, y)


def perceptron(width: int = 256, layers: int = 8, batch: int = 64) -> Any:
    return Perceptron(width, layers), {"x": torch.randn(batch, width), "y": torch.randn(batch, width)}


class Recommender(nn.Module):
    """Tables of embeddings for what is sparse, a perceptron over all of them."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        self.top = nn.Sequential(
            nn.Linear((tables + 1) * width, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 1)
        )

    def forward(self, numbers: Tensor, categories: Tensor, clicked: Tensor) -> Tensor:
        found = [table(categories[:, place]) for place, table in enumerate(self.tables)]
        logits = self.top(torch.cat([self.dense(numbers), *found], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, clicked)


def recommender(batch: int, tables: int = 16, rows: int = 50_000, width: int = 64) -> Any:
    inputs = {
        "numbers": torch.randn(batch, 13), "categories": torch.randint(0, rows, (batch, tables)),
        "clicked": torch.rand(batch).round(),
    }  # fmt: skip
    return Recommender(tables, rows, width), inputs


class Clips(nn.Module):
    """Convolutions over clips of pictures, or over sound, by how many axes they have."""

    def __init__(self, axes: int, channels: int, width: int, blocks: int, kernel: int) -> None:
        super().__init__()
        convolution, norm = ((nn.Conv1d, nn.BatchNorm1d), (nn.Conv3d, nn.BatchNorm3d))[axes == 3]
        widths = [channels, *(width * 2 ** (block // 2) for block in range(blocks))]
        layers: list[nn.Module] = []
        for into, out in pairwise(widths):
            layers += [convolution(into, out, kernel, 1 + (out > into), kernel // 2), norm(out), nn.ReLU()]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(widths[-1], 400)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(x).flatten(2).mean(-1)), labels)


def video(batch: int) -> Any:
    return Clips(3, 3, 64, 8, 3), {"x": torch.randn(batch, 3, 16, 112, 112), "labels": torch.randint(0, 400, (batch,))}


def audio(batch: int) -> Any:
    return Clips(1, 1, 64, 10, 9), {"x": torch.randn(batch, 1, 32000), "labels": torch.randint(0, 400, (batch,))}


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20000, 512), nn.Linear(512, 20000)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.embedding(input_ids))).flatten(0, 1), labels.flatten())


def encoder(batch: int, length: int) -> Any:
    return Encoder(), _tokens(batch, length, 20000)


def lm(build: Callable[..., Any], batch: int, length: int, **options: Any) -> Training:
    chosen = {name: options.pop(name) for name in list(options) if name not in Training.__dataclass_fields__}
    accumulate = options.get("accumulate", 1)
    return Training(
        build=build, settings={"batch": batch, "length": length} | chosen, samples=batch * accumulate,
        tokens=batch * length * accumulate, **options,
    )  # fmt: skip


def pictures(build: Callable[..., Any], batch: int, **options: Any) -> Training:
    chosen = {name: options.pop(name) for name in list(options) if name not in Training.__dataclass_fields__}
    return Training(build=build, settings={"batch": batch} | chosen, samples=batch, **options)


MEDIUM = {"width": 1024, "layers": 24, "heads": 16}
# Figures may be fitted to these.
KNOWN = {
    "gpt2-amp-16x1024": lm(gpt2, 16, 1024, precision="amp"),
    "gpt2-fp32-8x512-loop": lm(gpt2, 8, 512, precision="fp32", optimizer="adamw-loop"),
    "gpt2-bf16-32x256": lm(gpt2, 32, 256),
    "gpt2-amp-16x1024-compiled": lm(gpt2, 16, 1024, precision="amp", compiled=True),
    "gpt2-amp-1x128": lm(gpt2, 1, 128, precision="amp"),
    "gpt2-medium-fp32-8x512": lm(gpt2, 8, 512, precision="fp32", **MEDIUM),
    "gpt2-medium-tf32-8x1024": lm(gpt2, 8, 1024, precision="tf32", optimizer="adamw-foreach", **MEDIUM),
    "gpt2-medium-amp-8x1024-checkpointed": lm(gpt2, 8, 1024, precision="amp", checkpointed=True, **MEDIUM),
    "gpt2-medium-fp16-4x1024-accumulate": lm(gpt2, 4, 1024, precision="amp-fp16", accumulate=4, **MEDIUM),
    "llama-0.1b-bf16-8x2048": lm(llama, 8, 2048, size="0.1b"),
    "llama-0.5b-bf16-4x4096": lm(llama, 4, 4096, size="0.5b", optimizer="adamw-foreach"),
    "llama-0.5b-amp-8x512": lm(llama, 8, 512, size="0.5b", precision="amp"),
    "llama-1b-bf16-4x2048": lm(llama, 4, 2048),
    "llama-1b-bf16-1x16384": lm(llama, 1, 16384),
    "llama-1b-bf16-4x2048-compiled": lm(llama, 4, 2048, compiled=True),
    "llama-1b-bf16-2x2048-eager": lm(llama, 2, 2048, attention="eager"),
    "llama-1b-lora-4x2048": lm(llama, 4, 2048, adapters=16),
    "llama-3b-bf16-2x4096": lm(llama, 2, 4096, size="3b"),
    "llama-3b-bf16-1x16384-checkpointed": lm(llama, 1, 16384, size="3b", checkpointed=True),
    "llama-8b-bf16-2x2048": lm(llama, 2, 2048, size="8b"),
    "llama-8b-bf16-1x4096-sgd": lm(llama, 1, 4096, size="8b", optimizer="sgd"),
    "qwen3-0.6b-amp-4x2048": lm(qwen3, 4, 2048, precision="amp"),
    "qwen3-0.6b-bf16-4x4096-compiled": lm(qwen3, 4, 4096, compiled=True),
    "qwen3-0.6b-bf16-1x512": lm(qwen3, 1, 512),
    "mixtral-bf16-8x1024": lm(mixtral, 8, 1024),
    "bert-base-amp-32x512": lm(bert, 32, 512, precision="amp"),
    "bert-base-tf32-32x128": lm(bert, 32, 128, precision="tf32"),
    "bert-large-fp16-16x512": lm(bert, 16, 512, precision="amp-fp16", **MEDIUM),
    "bert-base-amp-8x128": lm(bert, 8, 128, precision="amp"),
    "t5-base-amp-16x512": lm(t5, 16, 512, precision="amp"),
    "t5-base-bf16-16x512": lm(t5, 16, 512),
    "vit-b-amp-128": pictures(vit, 128, precision="amp"),
    "vit-l-bf16-64": pictures(vit, 64, **MEDIUM),
    "vit-b-amp-128-compiled": pictures(vit, 128, precision="amp", compiled=True),
    "resnet50-amp-256-channels-last": pictures(vision, 256, kind="ResNet", precision="amp", channels_last=True, optimizer="sgd"),
    "resnet50-fp32-64": pictures(vision, 64, kind="ResNet", precision="fp32", optimizer="sgd"),
    "resnet50-amp-16": pictures(vision, 16, kind="ResNet", precision="amp", optimizer="sgd"),
    "resnet50-amp-128-compiled": pictures(vision, 128, kind="ResNet", precision="amp", optimizer="sgd", compiled=True),
    "convnext-t-amp-128": pictures(vision, 128, kind="ConvNext", precision="amp"),
    "swin-t-amp-128": pictures(vision, 128, kind="Swin", precision="amp"),
    "efficientnet-b0-amp-128": pictures(timm_model, 128, name="efficientnet_b0", precision="amp"),
    "mobilenet-v3-fp32-64": pictures(timm_model, 64, name="mobilenetv3_large_100", precision="fp32"),
    "dit-b-bf16-64": pictures(diffusion_transformer, 64),
    "dit-b-amp-256-compiled": pictures(diffusion_transformer, 256, precision="amp", compiled=True),
    "unet-amp-16": pictures(unet, 16, precision="amp"),
    "unet-fp32-8": pictures(unet, 8, precision="fp32", side=96),
    "lstm-fp32-64x128": lm(recurrent, 64, 128, precision="fp32"),
    "gru-amp-32x256": lm(recurrent, 32, 256, kind="GRU", precision="amp"),
    "graph-fp32": Training(build=graph, precision="fp32", samples=100_000),
    "graph-bf16-small": Training(build=graph, settings={"nodes": 5000, "edges": 50_000}, samples=5000),
    "mlp-fp32-64": pictures(perceptron, 64, precision="fp32", optimizer="adamw-foreach"),
    "mlp-bf16-8192-wide": pictures(perceptron, 8192, width=4096),
    "mlp-fp32-64-compiled": pictures(perceptron, 64, precision="fp32", compiled=True),
}  # fmt: skip

# These were judged by once, in three sets, and then looked at.
SEEN = {
    "gpt2-large-bf16-4x1024": lm(gpt2, 4, 1024, width=1280, layers=36, heads=20),
    "gpt2-amp-64x128": lm(gpt2, 64, 128, precision="amp"),
    "gpt2-xl-amp-2x1024-checkpointed": lm(gpt2, 2, 1024, precision="amp", checkpointed=True, width=1600, layers=48, heads=25),
    "gpt2-fp32-2x256-foreach": lm(gpt2, 2, 256, precision="fp32", optimizer="adamw-foreach"),
    "opt-350m-amp-8x512": lm(causal, 8, 512, kind="OPT", precision="amp"),
    "pythia-410m-bf16-8x1024": lm(causal, 8, 1024, kind="GPTNeoX"),
    "gemma2-bf16-2x2048": lm(causal, 2, 2048, kind="Gemma2"),
    "qwen2-1.5b-bf16-2x4096": lm(causal, 2, 4096, kind="Qwen2"),
    "mistral-12-bf16-1x8192": lm(causal, 1, 8192, kind="Mistral"),
    "olmoe-bf16-4x1024": lm(causal, 4, 1024, kind="Olmoe"),
    "phi-fp16-8x512": lm(causal, 8, 512, kind="Phi", precision="amp-fp16"),
    "llama-1b-amp-2x2048": lm(llama, 2, 2048, precision="amp"),
    "llama-3b-lora-4x2048-checkpointed": lm(llama, 4, 2048, size="3b", adapters=8, checkpointed=True),
    "llama-1b-tf32-1x1024": lm(llama, 1, 1024, precision="tf32"),
    "llama-0.5b-bf16-16x256": lm(llama, 16, 256, size="0.5b"),
    "llama-8b-bf16-1x8192-checkpointed": lm(llama, 1, 8192, size="8b", checkpointed=True, optimizer="sgd"),
    "llama-0.1b-amp-4x512-accumulate": lm(llama, 4, 512, size="0.1b", precision="amp", accumulate=2),
    "qwen3-0.6b-fp16-2x1024": lm(qwen3, 2, 1024, precision="amp-fp16"),
    "distilbert-amp-64x128": lm(masked, 64, 128, kind="DistilBert", precision="amp"),
    "roberta-bf16-16x512": lm(masked, 16, 512, kind="Roberta", max_position_embeddings=514),
    "electra-fp32-16x256": lm(masked, 16, 256, kind="Electra", precision="fp32"),
    "bart-base-amp-16x256": lm(bart, 16, 256, precision="amp"),
    "whisper-base-amp-16": lm(whisper, 16, 64, precision="amp"),
    "vit-b-tf32-32": pictures(vit, 32, precision="tf32"),
    "deit-s-amp-256": pictures(timm_model, 256, name="deit_small_patch16_224", precision="amp"),
    "resnet18-fp32-128": pictures(timm_model, 128, name="resnet18", precision="fp32", optimizer="sgd"),
    "resnet101-amp-64": pictures(timm_model, 64, name="resnet101", precision="amp", optimizer="sgd"),
    "convnext-b-bf16-64": pictures(timm_model, 64, name="convnext_base"),
    "densenet121-amp-64": pictures(timm_model, 64, name="densenet121", precision="amp"),
    "regnety-amp-128": pictures(timm_model, 128, name="regnety_032", precision="amp"),
    "mixer-b-amp-128": pictures(timm_model, 128, name="mixer_b16_224", precision="amp"),
    "swin-b-bf16-32": pictures(timm_model, 32, name="swin_base_patch4_window7_224"),
    "clip-amp-64": pictures(clip, 64, precision="amp"),
    "dit-l-bf16-32": pictures(diffusion_transformer, 32, **MEDIUM),
    "dit-s-amp-16": pictures(diffusion_transformer, 16, width=384, heads=6, precision="amp"),
    "unet-bf16-32": pictures(unet, 32, width=96),
    "lstm-bf16-256x64": lm(recurrent, 256, 64, width=512, layers=3),
    "gru-fp32-16x512": lm(recurrent, 16, 512, kind="GRU", width=256, precision="fp32"),
    "graph-bf16": Training(build=graph, settings={"nodes": 50_000, "edges": 400_000, "width": 128}, samples=50_000),
    "recommender-fp32-4096": pictures(recommender, 4096, precision="fp32"),
    "mlp-fp32-512": pictures(perceptron, 512, width=1024, layers=16, precision="fp32"),
    "gpt2-medium-bf16-8x1024-compiled": lm(gpt2, 8, 1024, compiled=True, **MEDIUM),
    "bert-base-amp-32x128-compiled": lm(bert, 32, 128, precision="amp", compiled=True),
    "llama-0.5b-bf16-2x2048-compiled": lm(llama, 2, 2048, size="0.5b", compiled=True),
    "dit-b-bf16-128-compiled": pictures(diffusion_transformer, 128, compiled=True),
    "convnext-t-amp-64-compiled": pictures(timm_model, 64, name="convnext_tiny", precision="amp", compiled=True),
    "deit-s-bf16-128-compiled": pictures(timm_model, 128, name="deit_small_patch16_224", compiled=True),
    "mlp-bf16-4096-compiled": pictures(perceptron, 4096, width=2048, layers=4, compiled=True),
    "smollm-360m-amp-8x1024": lm(causal, 8, 1024, kind="SmolLM3", precision="amp"),
    "bloom-560m-bf16-4x1024": lm(causal, 4, 1024, kind="Bloom"),
    "falcon-bf16-2x2048": lm(causal, 2, 2048, kind="Falcon"),
    "stablelm-1.6b-bf16-2x2048": lm(causal, 2, 2048, kind="StableLm"),
    "phi3-bf16-1x4096-checkpointed": lm(causal, 1, 4096, kind="Phi3", checkpointed=True),
    "gemma-2b-bf16-1x2048": lm(causal, 1, 2048, kind="Gemma"),
    "olmo2-1b-amp-4x1024": lm(causal, 4, 1024, kind="Olmo2", precision="amp"),
    "qwen3-moe-bf16-4x1024": lm(causal, 4, 1024, kind="Qwen3Moe"),
    "granite-tf32-2x1024": lm(causal, 2, 1024, kind="Granite", precision="tf32", optimizer="adamw-foreach"),
    "qwen2-1.5b-bf16-4x512-sgd": lm(causal, 4, 512, kind="Qwen2", optimizer="sgd"),
    "gpt2-fp16-8x1024": lm(gpt2, 8, 1024, precision="amp-fp16"),
    "gpt2-medium-bf16-2x512-accumulate": lm(gpt2, 2, 512, accumulate=4, **MEDIUM),
    "gpt2-large-amp-4x512": lm(gpt2, 4, 512, precision="amp", width=1280, layers=36, heads=20),
    "llama-0.1b-fp32-4x1024": lm(llama, 4, 1024, size="0.1b", precision="fp32"),
    "llama-1b-bf16-8x1024": lm(llama, 8, 1024),
    "llama-1b-amp-1x8192-checkpointed": lm(llama, 1, 8192, precision="amp", checkpointed=True),
    "llama-3b-bf16-4x1024": lm(llama, 4, 1024, size="3b"),
    "llama-8b-lora-1x4096": lm(llama, 1, 4096, size="8b", adapters=32),
    "bert-large-bf16-32x256": lm(bert, 32, 256, **MEDIUM),
    "bert-base-fp32-16x256": lm(bert, 16, 256, precision="fp32"),
    "albert-amp-32x256": lm(masked, 32, 256, kind="Albert", hidden_size=768, num_attention_heads=12, intermediate_size=3072,
                            precision="amp"),
    "mpnet-amp-64x128": lm(masked, 64, 128, kind="MPNet", precision="amp"),
    "modernbert-bf16-16x512": lm(masked, 16, 512, kind="ModernBert", attn_implementation="sdpa"),
    "vit-b-bf16-256": pictures(vit, 256),
    "vit-l-amp-32": pictures(vit, 32, precision="amp", **MEDIUM),
    "dinov2-amp-64": pictures(vision, 64, kind="Dinov2", precision="amp"),
    "segformer-amp-64": pictures(vision, 64, kind="Segformer", precision="amp"),
    "resnet50-bf16-128": pictures(timm_model, 128, name="resnet50", optimizer="sgd"),
    "resnext50-amp-128": pictures(timm_model, 128, name="resnext50_32x4d", precision="amp", optimizer="sgd"),
    "vgg16-amp-64": pictures(timm_model, 64, name="vgg16_bn", precision="amp", optimizer="sgd"),
    "efficientnetv2-s-amp-64": pictures(timm_model, 64, name="efficientnetv2_rw_s", precision="amp"),
    "mobilenet-v2-amp-256": pictures(timm_model, 256, name="mobilenetv2_100", precision="amp"),
    "maxvit-t-amp-32": pictures(timm_model, 32, name="maxvit_tiny_rw_224", precision="amp"),
    "dit-b-fp32-32": pictures(diffusion_transformer, 32, precision="fp32"),
    "dit-xl-bf16-16": pictures(diffusion_transformer, 16, width=1152, layers=28, heads=16),
    "unet-amp-64": pictures(unet, 64, precision="amp", width=64, levels=3, side=128),
    "lstm-amp-128x256": lm(recurrent, 128, 256, width=768, precision="amp"),
    "graph-fp32-wide": Training(build=graph, settings={"nodes": 20_000, "edges": 600_000, "width": 512}, precision="fp32",
                                samples=20_000),
    "recommender-amp-32768": pictures(recommender, 32768, tables=26, precision="amp"),
    "mlp-tf32-16384": pictures(perceptron, 16384, width=2048, layers=12, precision="tf32"),
    "llama-3b-bf16-2x2048-compiled": lm(llama, 2, 2048, size="3b", compiled=True),
    "gpt2-bf16-16x1024-compiled": lm(gpt2, 16, 1024, compiled=True),
    "qwen2-1.5b-amp-2x2048-compiled": lm(causal, 2, 2048, kind="Qwen2", precision="amp", compiled=True),
    "bert-large-bf16-16x512-compiled": lm(bert, 16, 512, compiled=True, **MEDIUM),
    "vit-l-bf16-64-compiled": pictures(vit, 64, compiled=True, **MEDIUM),
    "resnet50-bf16-256-compiled": pictures(timm_model, 256, name="resnet50", optimizer="sgd", compiled=True),
    "unet-bf16-16-compiled": pictures(unet, 16, compiled=True),
    "starcoder2-bf16-2x2048": lm(causal, 2, 2048, kind="Starcoder2"),
    "gpt-neo-amp-4x1024": lm(causal, 4, 1024, kind="GPTNeo", precision="amp"),
    "cohere-bf16-2x1024": lm(causal, 2, 1024, kind="Cohere"),
    "olmo-fp16-4x1024": lm(causal, 4, 1024, kind="Olmo", precision="amp-fp16"),
    "llama-0.5b-tf32-2x1024": lm(llama, 2, 1024, size="0.5b", precision="tf32"),
    "llama-1b-bf16-2x4096-sgd": lm(llama, 2, 4096, optimizer="sgd"),
    "llama-3b-bf16-1x8192-checkpointed": lm(llama, 1, 8192, size="3b", checkpointed=True),
    "llama-1b-lora-amp-2x1024": lm(llama, 2, 1024, adapters=8, precision="amp"),
    "qwen3-0.6b-bf16-8x1024": lm(qwen3, 8, 1024),
    "mixtral-amp-4x512": lm(mixtral, 4, 512, precision="amp"),
    "gpt2-xl-bf16-4x1024": lm(gpt2, 4, 1024, width=1600, layers=48, heads=25),
    "gpt2-tf32-16x512": lm(gpt2, 16, 512, precision="tf32"),
    "bert-large-amp-16x256": lm(bert, 16, 256, precision="amp", **MEDIUM),
    "deberta-amp-16x256": lm(masked, 16, 256, kind="DebertaV2", hidden_size=768, num_hidden_layers=12, num_attention_heads=12,
                             intermediate_size=3072, vocab_size=32000, precision="amp"),
    "t5-base-fp32-8x256": lm(t5, 8, 256, precision="fp32"),
    "bart-base-bf16-8x512": lm(bart, 8, 512),
    "vit-b-fp16-64": pictures(vit, 64, precision="amp-fp16"),
    "beit-b-amp-64": pictures(timm_model, 64, name="beit_base_patch16_224", precision="amp"),
    "cait-amp-64": pictures(timm_model, 64, name="cait_xxs24_224", precision="amp"),
    "poolformer-amp-128": pictures(timm_model, 128, name="poolformer_s12", precision="amp"),
    "resnet50-tf32-128": pictures(timm_model, 128, name="resnet50", precision="tf32", optimizer="sgd"),
    "resnetv2-50-amp-128": pictures(timm_model, 128, name="resnetv2_50", precision="amp", optimizer="sgd"),
    "dpn68-amp-64": pictures(timm_model, 64, name="dpn68", precision="amp"),
    "inception-v3-amp-128": pictures(timm_model, 128, name="inception_v3", precision="amp"),
    "convnextv2-t-amp-64": pictures(timm_model, 64, name="convnextv2_tiny", precision="amp"),
    "dit-b-tf32-64": pictures(diffusion_transformer, 64, precision="tf32"),
    "unet-amp-8-deep": pictures(unet, 8, precision="amp", levels=5),
    "video-amp-8": pictures(video, 8, precision="amp"),
    "audio-amp-32": pictures(audio, 32, precision="amp"),
    "encoder-amp-32x256": lm(encoder, 32, 256, precision="amp"),
    "lstm-fp16-64x64": lm(recurrent, 64, 64, width=1024, precision="amp-fp16"),
    "graph-tf32-deep": Training(build=graph, settings={"nodes": 40_000, "edges": 300_000, "layers": 8}, precision="tf32",
                                samples=40_000),
    "recommender-fp32-16384": pictures(recommender, 16384, width=128, precision="fp32"),
    "mlp-amp-2048": pictures(perceptron, 2048, width=4096, layers=6, precision="amp"),
}  # fmt: skip

# These are only ever judged by: their rows are not read while a model's form and figures are chosen.
JUDGED = {
    "qwen2-1.5b-amp-2x1024-accumulate": lm(causal, 2, 1024, kind="Qwen2", precision="amp", accumulate=2),
    "llama-1b-fp16-2x2048": lm(llama, 2, 2048, precision="amp-fp16"),
    "llama-0.5b-bf16-8x1024": lm(llama, 8, 1024, size="0.5b"),
    "llama-3b-amp-1x2048": lm(llama, 1, 2048, size="3b", precision="amp"),
    "llama-8b-bf16-1x2048-lora": lm(llama, 1, 2048, size="8b", adapters=16),
    "gpt2-medium-amp-16x512": lm(gpt2, 16, 512, precision="amp", **MEDIUM),
    "gpt2-bf16-64x256": lm(gpt2, 64, 256),
    "mistral-12-bf16-2x4096-checkpointed": lm(causal, 2, 4096, kind="Mistral", checkpointed=True),
    "gemma2-amp-2x1024": lm(causal, 2, 1024, kind="Gemma2", precision="amp"),
    "phi-bf16-4x2048": lm(causal, 4, 2048, kind="Phi"),
    "pythia-410m-fp16-2x2048": lm(causal, 2, 2048, kind="GPTNeoX", precision="amp-fp16"),
    "opt-350m-bf16-16x512": lm(causal, 16, 512, kind="OPT"),
    "bloom-560m-amp-2x1024": lm(causal, 2, 1024, kind="Bloom", precision="amp"),
    "olmoe-amp-2x1024": lm(causal, 2, 1024, kind="Olmoe", precision="amp"),
    "granite-bf16-8x2048": lm(causal, 8, 2048, kind="Granite"),
    "roberta-amp-64x128": lm(masked, 64, 128, kind="Roberta", max_position_embeddings=514, precision="amp"),
    "distilbert-fp32-32x256": lm(masked, 32, 256, kind="DistilBert", precision="fp32"),
    "electra-bf16-32x512": lm(masked, 32, 512, kind="Electra"),
    "bert-large-tf32-8x512": lm(bert, 8, 512, precision="tf32", **MEDIUM),
    "t5-base-fp16-8x512": lm(t5, 8, 512, precision="amp-fp16"),
    "whisper-base-bf16-32": lm(whisper, 32, 64),
    "vit-l-fp32-16": pictures(vit, 16, precision="fp32", **MEDIUM),
    "deit-s-bf16-512": pictures(timm_model, 512, name="deit_small_patch16_224"),
    "resnet18-amp-512": pictures(timm_model, 512, name="resnet18", precision="amp", optimizer="sgd"),
    "resnet101-tf32-64": pictures(timm_model, 64, name="resnet101", precision="tf32", optimizer="sgd"),
    "convnext-t-bf16-256": pictures(timm_model, 256, name="convnext_tiny"),
    "efficientnet-b0-fp32-64": pictures(timm_model, 64, name="efficientnet_b0", precision="fp32"),
    "swin-t-bf16-64": pictures(timm_model, 64, name="swin_tiny_patch4_window7_224"),
    "regnety-bf16-64": pictures(timm_model, 64, name="regnety_032"),
    "densenet121-fp32-32": pictures(timm_model, 32, name="densenet121", precision="fp32"),
    "mixer-b-tf32-64": pictures(timm_model, 64, name="mixer_b16_224", precision="tf32"),
    "levit-amp-256": pictures(timm_model, 256, name="levit_256", precision="amp"),
    "hrnet-amp-64": pictures(timm_model, 64, name="hrnet_w18_small", precision="amp"),
    "nfnet-amp-64": pictures(timm_model, 64, name="nfnet_l0", precision="amp"),
    "res2net50-amp-64": pictures(timm_model, 64, name="res2net50_26w_4s", precision="amp", optimizer="sgd"),
    "clip-bf16-128": pictures(clip, 128),
    "dit-l-amp-64": pictures(diffusion_transformer, 64, precision="amp", **MEDIUM),
    "unet-fp32-32": pictures(unet, 32, precision="fp32"),
    "gru-bf16-64x128": lm(recurrent, 64, 128, kind="GRU"),
    "lstm-fp32-256x64": lm(recurrent, 256, 64, width=512, precision="fp32"),
    "graph-amp": Training(build=graph, settings={"nodes": 60_000, "edges": 600_000}, precision="amp", samples=60_000),
    "recommender-bf16-8192": pictures(recommender, 8192),
    "mlp-fp16-8192": pictures(perceptron, 8192, width=2048, layers=10, precision="amp-fp16"),
    "video-bf16-16": pictures(video, 16),
    "encoder-fp32-16x512": lm(encoder, 16, 512, precision="fp32"),
}  # fmt: skip

TRAININGS = KNOWN | SEEN | JUDGED
