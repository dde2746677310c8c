"""A hand-written GPT under torch.compile: the model, its blocks, the training step or the optimizer's step."""
import argparse
from functools import partial

import torch
import torch._functorch.config
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.qkv(x).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim), nn.Dropout(dropout))

    def forward(self, x):
        x = x + self.attention(self.n1(x))
        return x + self.mlp(self.n2(x))


SAVED = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_dot_product_flash_attention.default,
         torch.ops.aten._scaled_dot_product_efficient_attention.default, torch.ops.aten._scaled_dot_product_cudnn_attention.default}


def policy(context, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operator in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


class GPT(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.recompute = args.recompute
        self.wte, self.wpe = nn.Embedding(args.vocab, args.dim), nn.Embedding(args.seq, args.dim)
        self.blocks = nn.ModuleList(Block(args.dim, args.heads, args.dropout) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.dim)
        self.head = nn.Linear(args.dim, args.vocab, bias=False)
        self.head.weight = self.wte.weight
        self.apply(self.initialise)

    def initialise(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            if self.recompute == "full":
                x = checkpoint(block, x, use_reentrant=False)
            elif self.recompute == "reentrant":
                x = checkpoint(block, x, use_reentrant=True)
            elif self.recompute == "selective":
                x = checkpoint(block, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy))
            else:
                x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)).float(), targets.view(-1))


p = argparse.ArgumentParser()
p.add_argument("--what", default="model", choices=["model", "blocks", "step", "nothing"], help="what torch.compile is given")
p.add_argument("--mode", default="default", choices=["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
p.add_argument("--compile-optimizer", action="store_true")
p.add_argument("--compiled-autograd", action="store_true")
p.add_argument("--precision", default="amp-bf16", choices=["fp32", "tf32", "bf16", "amp-bf16", "amp-fp16"])
p.add_argument("--recompute", default="none", choices=["none", "full", "reentrant", "selective"])
p.add_argument("--memory-budget", type=float, default=1.0, help="the partitioner's share of activations to keep")
p.add_argument("--varied", action="store_true", help="every step has another sequence length")
p.add_argument("--dynamic", action="store_true")
p.add_argument("--accumulate", type=int, default=1)
p.add_argument("--dim", type=int, default=1024)
p.add_argument("--heads", type=int, default=16)
p.add_argument("--layers", type=int, default=6)
p.add_argument("--vocab", type=int, default=50304)
p.add_argument("--batch", type=int, default=16)
p.add_argument("--seq", type=int, default=1024)
p.add_argument("--dropout", type=float, default=0.0)
p.add_argument("--clip", type=float, default=1.0)
p.add_argument("--steps", type=int, default=4)
args = p.parse_args()

torch.manual_seed(0)
if args.precision == "tf32":
    torch.set_float32_matmul_precision("high")
if args.compiled_autograd:
    torch._dynamo.config.compiled_autograd = True
torch._functorch.config.activation_memory_budget = args.memory_budget
device = "cuda"
model = GPT(args).to(device)
if args.precision == "bf16":
    model = model.to(torch.bfloat16)
amp = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}.get(args.precision)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=not args.compile_optimizer)
scaler = torch.amp.GradScaler("cuda", enabled=args.precision == "amp-fp16")
compiled = partial(torch.compile, mode=args.mode, dynamic=True if args.dynamic else None)


def forward_backward(x, y):
    with torch.autocast("cuda", dtype=amp, enabled=amp is not None):
        loss = model(x, y)
    scaler.scale(loss / args.accumulate).backward()
    return loss.detach()


step_optimizer = optimizer.step
if args.what == "model":
    model = compiled(model)
elif args.what == "blocks":
    for block in model.blocks:
        block.compile(mode=args.mode)
elif args.what == "step":
    forward_backward = compiled(forward_backward)
if args.compile_optimizer:
    step_optimizer = compiled(lambda: optimizer.step())

for step in range(args.steps):
    length = args.seq - 128 * (step % 4) if args.varied else args.seq
    for _ in range(args.accumulate):
        data = torch.randint(args.vocab, (args.batch, length + 1))
        x, y = data[:, :-1].to(device), data[:, 1:].contiguous().to(device)
        torch.compiler.cudagraph_mark_step_begin()
        loss = forward_backward(x, y)
    if args.clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    if scaler.is_enabled():
        scaler.step(optimizer)
        scaler.update()
    else:
        step_optimizer()
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item(), torch.cuda.memory_allocated() // 2**20)
