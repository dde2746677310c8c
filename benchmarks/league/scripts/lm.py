"""A transformer language model written out in einsums, as two students of a course wrote theirs; one recorded part.

`--author a` and `--author b` differ in the order of operands, the norm, the rotation, the loss and the optimizer, all of which
show in memory. The peaks of the recorded part are written to `--out`.
"""

import argparse
import contextlib
import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, weight_first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=BORN))
        self.weight_first = weight_first

    def forward(self, x: Tensor) -> Tensor:
        if self.weight_first:  # einsum of older versions leaves the outputs' dimension where the first operand has it
            return torch.einsum("oi,...i->o...", self.weight, x).movedim(0, -1)
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width, device=BORN))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens] if OPTIONS.author == "a" else self.weight[tokens, :]


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device=BORN))
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        if OPTIONS.author == "a":
            length = x.norm(dim=-1, keepdim=True)
            scale = torch.sqrt(length**2 / self.width + 1e-5)
            x = x / scale
            result = torch.einsum("d,...d->...d", self.weight, x)
            return result.to(dtype)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(dtype)


class Rotation(nn.Module):
    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        steps = torch.arange(0, width, 2) / width
        angles = torch.arange(length)[:, None] * (10000.0**-steps)[None]
        table = torch.stack((torch.cos(angles), torch.sin(angles)))
        self.register_buffer("table", table.to(BORN), persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        if OPTIONS.author == "a":
            cos, sin = self.table[0][positions], self.table[1][positions]
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
            even, odd = x[..., 0::2], x[..., 1::2]
            result = torch.empty_like(x)
            result[..., 0::2] = even * cos - odd * sin
            result[..., 1::2] = even * sin + odd * cos
            return result
        even, odd = x.reshape(*x.shape[:-1], -1, 2).movedim(-1, 0).unbind(0)
        cos, sin = self.table[:, : x.size(-2), :].unbind(0)
        first = cos * even - sin * odd
        second = sin * even + cos * odd
        return torch.concat((first, second), dim=-1)


def softmax(x: Tensor) -> Tensor:
    if OPTIONS.author == "a":
        largest = torch.max(x, dim=-1, keepdim=True).values
        powers = torch.exp(x - largest)
        total = torch.sum(powers, dim=-1, keepdim=True)
        return powers / total
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    if OPTIONS.author == "a":
        scores = torch.einsum("...qd,...kd->...qk", q, k)
        scores = scores / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(mask == False, -1e9)  # noqa: E712
        weights = softmax(scores)
        return torch.einsum("...qk,...kd->...qd", weights, v)
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(k.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, v)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, rotation: Rotation | None) -> None:
        super().__init__()
        first = OPTIONS.author == "a"
        self.q, self.k, self.v, self.o = (Linear(width, width, first) for _ in range(4))
        self.heads = heads
        self.rotation = rotation or Rotation(OPTIONS.context, width // heads)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q_flat, k_flat, v_flat = self.q(x), self.k(x), self.v(x)
        q, k, v = (t.reshape(batch, length, self.heads, -1).transpose(1, 2) for t in (q_flat, k_flat, v_flat))
        if OPTIONS.author == "a":
            positions = torch.arange(length, device=x.device).unsqueeze(0).expand(batch, -1)
            q = self.rotation(q, positions)
            k = self.rotation(k, positions)
            mask = torch.triu(torch.ones(length, length, device=x.device), diagonal=1).to(torch.bool)
            mask = ~mask
            mask = mask.unsqueeze(0).unsqueeze(0).expand(batch, self.heads, -1, -1)
            result = attend(q, k, v, mask)
            result = result.transpose(1, 2).reshape(batch, length, width)
            return self.o(result)
        del q_flat, k_flat, v_flat
        q = self.rotation(q)  # the one before it is free by the time that the next is made
        k = self.rotation(k)
        places = torch.arange(length, device=x.device)
        mask = (places[:, None] >= places[None])[None]
        result = attend(q, k, v, mask)
        result = result.transpose(1, 2).reshape(batch, length, width).contiguous()
        return self.o(result)


class Gated(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        first = OPTIONS.author == "a"
        self.w1, self.w2, self.w3 = (
            Linear(width, inner, first),
            Linear(inner, width, first),
            Linear(width, inner, first),
        )

    def forward(self, x: Tensor) -> Tensor:
        if OPTIONS.author == "a":
            gate, up = self.w1(x), self.w3(x)
            swish = gate * torch.sigmoid(gate)
            inner = swish * up
            return self.w2(inner)
        return self.w2(swish_of(self.w1(x)) * self.w3(x))


def swish_of(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, rotation: Rotation | None) -> None:
        super().__init__()
        if OPTIONS.author == "a":
            self.ln1, self.attention = Norm(width), Attention(width, heads, rotation)
            self.ln2, self.feed = Norm(width), Gated(width, inner)
        else:  # the optimizer takes them in this order
            self.attention, self.feed = Attention(width, heads, rotation), Gated(width, inner)
            self.ln1, self.ln2 = Norm(width), Norm(width)

    def forward(self, x: Tensor) -> Tensor:
        if OPTIONS.author == "a":
            h = self.ln1(x)
            h = self.attention(h)
            x = x + h
            h = self.ln2(x)
            h = self.feed(h)
            return x + h
        attended = self.attention(self.ln1(x))
        middle = x + attended
        fed = self.feed(self.ln2(middle))
        return middle + fed


class Model(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, inner: int) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, width)
        shared = None if OPTIONS.author == "a" else Rotation(OPTIONS.context, width // heads)
        self.layers = nn.ModuleList(Block(width, heads, inner, shared) for _ in range(layers))
        self.norm = Norm(width)
        self.head = Linear(width, vocabulary, OPTIONS.author == "a")

    def forward(self, tokens: Tensor) -> Tensor:
        if OPTIONS.author == "a":
            x = self.embedding(tokens)
        else:
            embedded = self.embedding(tokens)
            x = embedded
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.head(x)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    if OPTIONS.author == "a":
        logits, targets = logits.view(-1, logits.shape[-1]), targets.view(-1)
        largest = logits.max(dim=-1, keepdim=True).values
        logits = logits - largest
        powers = torch.exp(logits)
        total = powers.sum(dim=-1)
        chosen = logits[torch.arange(len(targets)), targets]
        losses = torch.log(total) - chosen
        return losses.mean()
    surprise = -log_softmax(logits)
    return torch.mean(torch.gather(surprise, -1, targets.unsqueeze(-1)))


def log_softmax(x: Tensor) -> Tensor:
    largest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - largest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


class AdamW(torch.optim.Optimizer):
    """States in place, or made anew in every step."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {})

    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            gradient, state = p.grad.data, self.state[p]
            if OPTIONS.author == "a":
                if not state:
                    state["m"] = torch.zeros_like(p.data)
                    state["v"] = torch.zeros_like(p.data)
                state["m"].mul_(0.9).add_(gradient, alpha=0.1)
                state["v"].mul_(0.95).addcmul_(gradient, gradient, value=0.05)
                update = state["m"] / state["v"].sqrt().add_(1e-8)
                p.data.add_(update, alpha=-1e-4)
                p.data.mul_(0.999)
            else:
                p.data -= 1e-3 * 0.01 * p.data
                old_m = state.get("m", torch.zeros_like(gradient))
                old_v = state.get("v", torch.zeros_like(gradient))
                m = 0.9 * old_m + (0.1 * gradient)
                v = 0.999 * old_v + (0.001 * torch.square(gradient))
                p.data -= 1e-3 * m / (torch.sqrt(v) + 1e-8)
                state["m"], state["v"] = m, v


def batches(count: int) -> Tensor:
    return torch.randint(0, OPTIONS.vocabulary, (count, OPTIONS.batch, OPTIONS.context), device="cuda")


def author_a(model: Model, optimizer: AdamW) -> None:
    """One forward or one whole step, from an emptied cache."""
    tokens = batches(1)[0].cpu().to("cuda")
    with torch.autocast("cuda", torch.bfloat16) if OPTIONS.mixed else contextlib.nullcontext():
        torch.cuda.empty_cache()
        begin()
        if OPTIONS.mode == "forward":
            logits = model(tokens)
        else:
            optimizer.zero_grad()
            logits = model(tokens)
            loss = cross_entropy(logits, tokens)
            loss.backward()
            optimizer.step()
        end()


def author_b(model: Model, optimizer: AdamW) -> None:
    """The step after five others, or the forward after five others without gradients."""
    before, now = batches(5), batches(1)
    if OPTIONS.mode == "forward":
        model.eval()
        with torch.inference_mode():
            for number in range(5):
                with torch.autocast("cuda", torch.bfloat16, enabled=OPTIONS.mixed):
                    model(before[number])
            begin()
            with torch.autocast("cuda", torch.bfloat16, enabled=OPTIONS.mixed):
                model(now[0])
                end()
        return
    targets_before, targets_now = batches(5), batches(1)
    for number in range(5):
        with torch.autocast("cuda", torch.bfloat16, enabled=OPTIONS.mixed):
            output = model(before[number])
            loss = cross_entropy(output, targets_before[number])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del output, loss
    begin()
    with torch.autocast("cuda", torch.bfloat16, enabled=OPTIONS.mixed):
        output = model(now[0])
        loss = cross_entropy(output, targets_now[0])
    loss.backward()
    optimizer.step()
    end()


def begin() -> None:
    torch.cuda.reset_peak_memory_stats()


def end() -> None:
    torch.cuda.synchronize()
    peaks = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    Path(OPTIONS.out).write_text(json.dumps(peaks))


def touch() -> None:
    """What an earlier part of the same process leaves behind: the workspaces of the threads that run forward and backward."""
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    y = x @ x
    if OPTIONS.after == "step":
        y.sum().backward()


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--author", choices=("a", "b"), required=True)
parser.add_argument("--mode", choices=("forward", "step"), required=True)
parser.add_argument("--mixed", action="store_true")
parser.add_argument("--after", choices=("nothing", "forward", "step"), default="nothing")
parser.add_argument("--context", type=int, required=True)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--vocabulary", type=int, default=10000)
parser.add_argument("--width", type=int, required=True)
parser.add_argument("--layers", type=int, required=True)
parser.add_argument("--heads", type=int, required=True)
parser.add_argument("--inner", type=int, required=True)
parser.add_argument("--out", required=True)
OPTIONS = parser.parse_args()
BORN = "cuda" if OPTIONS.author == "a" else "cpu"

if OPTIONS.author == "a":
    torch.set_float32_matmul_precision("high")
if OPTIONS.after != "nothing":
    touch()
model = Model(OPTIONS.vocabulary, OPTIONS.width, OPTIONS.layers, OPTIONS.heads, OPTIONS.inner).to("cuda")
(author_a if OPTIONS.author == "a" else author_b)(model, AdamW(model.parameters()))
