"""Every tensor of a step of nanotron on the first stage of a pipeline, replayed through the caching allocator.

Written from nanotron's source (models/llama.py, parallel/, optim/) and independent of the formulas, which are held
against it. Collectives end at once: how far the host runs ahead of the device is not replayed.
"""

from collections import deque
from dataclasses import dataclass, field

from tonnage.allocator import CachingAllocator
from tonnage.allocator.blocks import Block

GIB = 2**30
DDP_BUCKET_BYTES = 25 * 2**20

Kept = dict[str, Block]


@dataclass
class Step:
    """A Llama with as many heads of keys as of queries, trained in BF16 with FP32 gradients."""

    hidden: int
    ffn: int
    heads: int
    vocab: int
    layers: int  # on this stage
    has_head: bool
    tied: bool
    tokens: int
    tp: int = 1
    data: int = 1
    zero: int = 0
    in_flight: int = 1
    micro_batches: int = 2
    allocator: CachingAllocator = field(default_factory=lambda: CachingAllocator(80 * GIB))

    def __post_init__(self) -> None:
        h, f, tp = self.hidden, self.ffn, self.tp
        self.matrices = [3 * h * h // tp, h * h // tp, 2 * h * f // tp, h * f // tp]
        self.embedding = self.vocab * h // tp
        self.sizes = [self.embedding, *[size for _ in range(self.layers) for size in (h, h, *self.matrices)]]
        if self.has_head:
            self.sizes += [h] if self.tied else [h, self.embedding]
        self.parameters = sum(self.sizes)
        self.shards = self.data if self.zero else 1
        self.has_states = False
        self.made: list[Block] = []
        self._begin()

    def peaks(self, steps: int = 3) -> tuple[int, int]:
        """Allocated and reserved."""
        for _ in range(steps):
            self._step()
        stats = self.allocator.memory_stats()
        return stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]

    def _new(self, size: float) -> Block:
        return self.allocator.malloc(int(size))

    def _drop(self, *blocks: Block) -> None:
        for block in blocks:
            self.allocator.free(block)

    def _stream(self, width: float) -> Block:
        """16-bit numbers for each token, along the sequence or across heads divided by tensor parallelism."""
        return self._new(2 * width * self.tokens / self.tp)

    def _begin(self) -> None:
        for size in self.sizes:
            self._new(2 * size)
        bucket = 0
        for size in reversed(self.sizes if self.data > 1 and self.zero == 0 else []):
            bucket += 2 * size
            if bucket >= DDP_BUCKET_BYTES or size is self.sizes[0]:
                self._new(bucket)
                bucket = 0
        self._new(4 * self.parameters)
        self._new(4 * self.parameters / self.shards)
        if self.tp > 1:
            self._new(2 * self.hidden * self.tokens)
            self._new(2 * self.hidden * self.tokens)

    def _step(self) -> None:
        """One forward, one backward, after as many forwards as there are stages behind."""
        waiting: deque[list[Kept]] = deque()
        for done in range(self.micro_batches):
            waiting.append(self._forward())
            if done >= self.in_flight - 1:
                self._backward(waiting.popleft())
        while waiting:
            self._backward(waiting.popleft())
        self._optimize()

    def _forward(self) -> list[Kept]:
        passed: list[Kept] = []
        stream = self._reduced()
        for _ in range(self.layers):
            block, stream = self._forward_block(stream)
            passed.append(block)
        if not self.has_head:
            self._drop(stream)
            return passed
        last = {"input": stream, "normed": self._stream(self.hidden)}
        logits, wide = self._stream(self.vocab), self._stream(2 * self.vocab)
        self._drop(logits)
        last["softmax"] = self._stream(2 * self.vocab)
        self._drop(wide)
        return [*passed, last]

    def _reduced(self) -> Block:
        """What a row-parallel matrix puts out: whole, then scattered."""
        whole = self._new(2 * self.hidden * self.tokens)
        if self.tp == 1:
            return whole
        scattered = self._stream(self.hidden)
        self._drop(whole)
        return scattered

    def _forward_block(self, stream: Block) -> tuple[Kept, Block]:
        h, f = self.hidden, self.ffn
        kept = {"input": stream, "normed": self._stream(h)}
        projected, kept["qkv"] = self._stream(3 * h), self._stream(3 * h)
        joined, kept["kv"] = self._stream(2 * h), self._stream(2 * h)
        self._drop(joined)
        kept["attended"], kept["sums"] = self._stream(h), self._stream(2 * self.heads)
        added = self._reduced()
        self._drop(projected)
        kept["middle"] = self._stream(h)
        self._drop(added)
        kept["normed again"], kept["gate and up"] = self._stream(h), self._stream(2 * f)
        kept["activated"], kept["product"] = self._stream(f), self._stream(f)
        added = self._reduced()
        out = self._stream(h)
        self._drop(added)
        return kept, out

    def _backward(self, passed: list[Kept]) -> None:
        gradient = self._backward_head(passed.pop()) if self.has_head else self._stream(self.hidden)
        for kept in reversed(passed):
            gradient = self._backward_block(kept, gradient)
        self.made.append(self._new(2 * self.embedding))
        self._drop(gradient, *self.made)
        self.made = []

    def _backward_head(self, kept: Kept) -> Block:
        logits = self._stream(self.vocab)
        self._drop(kept["softmax"])
        gradient = self._through_column(logits, kept["normed"], self.embedding)
        return self._through_norm(gradient, kept["input"])

    def _through_column(self, gradient: Block, read: Block, weights: int) -> Block:
        whole = self._new(2 * self.hidden * self.tokens)
        scattered = self._stream(self.hidden) if self.tp > 1 else whole
        self.made.append(self._new(2 * weights))
        self._drop(gradient, read)
        if self.tp > 1:
            self._drop(whole)
        return scattered

    def _through_norm(self, gradient: Block, read: Block) -> Block:
        out = self._stream(self.hidden)
        self.made.append(self._new(2 * self.hidden))
        self._drop(gradient, read)
        return out

    def _joined(self, gradient: Block, residual: Block) -> Block:
        out = self._stream(self.hidden)
        self._drop(gradient, residual)
        return out

    def _backward_block(self, kept: Kept, residual: Block) -> Block:
        h, f = self.hidden, self.ffn
        qkv_weights, out_weights, gate_weights, down_weights = self.matrices
        product = self._stream(f)
        self.made.append(self._new(2 * down_weights))
        self._drop(kept["product"])
        activated, up = self._stream(f), self._stream(f)
        self._drop(product, kept["activated"])
        gate = self._stream(f)
        self._drop(activated)
        both = self._stream(2 * f)
        self._drop(gate, up, kept["gate and up"])
        gradient = self._through_column(both, kept["normed again"], gate_weights)
        residual = self._joined(self._through_norm(gradient, kept["middle"]), residual)
        attended = self._stream(h)
        self.made.append(self._new(2 * out_weights))
        parts, wide = [self._stream(h) for _ in range(3)], self._stream(2 * h)
        self._drop(wide, attended, kept["attended"], kept["sums"])
        joined = self._stream(2 * h)
        self._drop(*parts[1:], kept["kv"])
        projected = self._stream(3 * h)
        self._drop(parts[0], joined, kept["qkv"])
        gradient = self._through_column(projected, kept["normed"], qkv_weights)
        return self._joined(self._through_norm(gradient, kept["input"]), residual)

    def _optimize(self) -> None:
        if not self.has_states:
            for size in self.sizes:
                self._new(4 * size / self.shards)
                self._new(4 * size / self.shards)
            self.has_states = True
        if self.shards > 1:
            shard = 2 * self.parameters / self.shards
            flat = [self._new(shard) for _ in range(self.shards + 1)]
            self._drop(*flat, self._new(2 * self.parameters))
