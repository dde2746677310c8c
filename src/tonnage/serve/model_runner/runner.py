"""Run steps on the device: move blocks, send inputs, run the pass, sample tokens and send them back.

Everything runs in order on one stream and nothing here waits for it, so a step is launched while the previous one
runs: its input tokens are those that the previous one writes into the slots. Decode-only steps replay a captured
graph if there is one. On the CPU the same is synchronous. This module does not know how a step was scheduled.

Rows that need more than plain sampling are sampled again from copies of their logits, a bounded number at a time. Log
probabilities are those of the model's own logits, before temperature and filters.

Graphs are captured largest first, so that smaller ones reuse the memory of the largest. So a graph's logits are valid
only until the next graph runs, and are referenced by address alone, which keeps nothing alive.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import local

import torch
from torch import Tensor

from tonnage.budget.serving.own_engine import FILTERED_ROWS, capture_sizes
from tonnage.garbage import no_collection
from tonnage.serve.batch import Batch
from tonnage.serve.cache.kv_cache import KvCache
from tonnage.serve.config import EngineConfig
from tonnage.serve.kernels import logit_threshold, sample
from tonnage.serve.model_runner.inputs import Inputs, Ints, decode_batch
from tonnage.serve.models.decoder import Decoder
from tonnage.serve.sampling import MOST_LOGPROBS, Sampling, TokenLogprob
from tonnage.serve.scheduler.sequence import ScheduledStep, Sequence

Body = Callable[[int], Tensor]


@dataclass(frozen=True, slots=True)
class _Address:
    """FP32 numbers at a device address, as torch.as_tensor accepts them."""

    pointer: int
    shape: tuple[int, ...]

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": self.shape, "typestr": "<f4", "data": (self.pointer, False), "version": 3}


class DecodeGraphs:
    """Graphs of `body(rows)`, which reads buffers that `prepare(rows)` fills, and returns the logits of those rows."""

    def __init__(self, prepare: Callable[[int], None], body: Body, largest: int, stream: torch.cuda.Stream) -> None:
        self.sizes = capture_sizes(largest)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits: dict[int, Tensor] = {}
        pool = torch.cuda.graph_pool_handle()
        gc.collect()
        with no_collection(), torch.inference_mode():
            for size in reversed(self.sizes):
                # Compile kernels and initialize libraries before capturing.
                prepare(size)
                body(size)
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    logits = body(size)
                assert logits.dtype == torch.float32 and logits.is_contiguous()
                address = _Address(logits.data_ptr(), tuple(logits.shape))
                self._logits[size] = torch.as_tensor(address, device=logits.device)
                self._graphs[size] = graph
                # The address must be all that refers to them when the next size is captured.
                del logits

    def size_for(self, rows: int) -> int:
        """Return the smallest captured size of at least this many rows."""
        return self.sizes[bisect_left(self.sizes, rows)]

    def replay(self, size: int) -> Tensor:
        """Replay a graph; its logits are valid until the next replay."""
        self._graphs[size].replay()
        return self._logits[size]


@dataclass(slots=True)
class Logprobs:
    """Log probabilities of some rows in transit to the host: of the sampled token, and of the most likely ones."""

    wanted: list[Sampling]
    tokens: Tensor
    sampled: Tensor
    numbers: Tensor
    ids: Tensor

    def read(self) -> Iterator[TokenLogprob | None]:
        """Yield one per row, None if not requested; the copy must have arrived."""
        rows = zip(self.tokens.tolist(), self.sampled.tolist(), self.ids.tolist(), self.numbers.tolist(), strict=True)
        for sampling, (token, sampled, ids, numbers) in zip(self.wanted, rows, strict=True):
            count = sampling.logprobs
            best = tuple(zip(ids[:count], numbers[:count], strict=True)) if count else ()
            yield None if count is None else TokenLogprob(token, sampled, best)


def sample_special(
    logits: Tensor, rows: Tensor, wanted: list[Sampling], temperatures: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Logprobs | None]:
    """Return tokens of these rows of the logits, and their log probabilities if any row requests them."""
    scored = any(sampling.logprobs is not None for sampling in wanted)
    sampled: list[tuple[Tensor, ...]] = []
    for first in range(0, len(wanted), FILTERED_ROWS):
        part = slice(first, first + FILTERED_ROWS)
        own = logits.index_select(0, rows[part])
        kept = filtered(own, wanted[part], temperatures[part])
        tokens = sample(kept, temperatures[part], seeds[part], positions[part])
        if not scored:
            sampled.append((tokens,))
            continue
        numbers = own.float().log_softmax(dim=-1)
        best = numbers.topk(min(MOST_LOGPROBS, own.shape[-1]), dim=-1)
        sampled.append((tokens, numbers.gather(1, tokens.unsqueeze(1)).squeeze(1), best.values, best.indices))
    tokens, *scores = (torch.cat(parts) for parts in zip(*sampled, strict=True))
    return tokens, Logprobs(wanted, to_host(tokens), *map(to_host, scores)) if scored else None


def filtered(logits: Tensor, wanted: list[Sampling], temperatures: Tensor) -> Tensor:
    """Return the logits with −inf for tokens excluded by top-k, top-p or min-p."""
    if not any(sampling.filtered for sampling in wanted):
        return logits
    ruled = [sampling if sampling.filtered else Sampling() for sampling in wanted]
    vocabulary = logits.shape[-1]
    rules = torch.tensor(
        [[one.top_k or vocabulary for one in ruled], [one.top_p for one in ruled], [one.min_p for one in ruled]],
        dtype=torch.float32,
        pin_memory=logits.is_cuda,
    )
    kept_from = logit_threshold(logits, temperatures, *rules.to(logits.device, non_blocking=True))
    return logits.masked_fill(logits < kept_from.unsqueeze(1), -torch.inf)


def to_host(values: Tensor) -> Tensor:
    """Return a copy on the host without waiting for the device."""
    if values.device.type != "cuda":
        return values
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)


@dataclass(slots=True)
class TokensInTransit:
    """A step's tokens in transit to the host, and the sequences that sampled them."""

    sampling_sequences: list[Sequence]
    tokens: Ints
    arrived: torch.cuda.Event | None = None
    logprobs: Logprobs | None = None
    logprob_rows: tuple[int, ...] = ()

    def result(self) -> tuple[list[int], list[TokenLogprob | None] | None]:
        """Wait for the tokens, and log probabilities if any row requested them."""
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens: list[int] = self.tokens.tolist()
        if self.logprobs is None:
            return tokens, None
        found: list[TokenLogprob | None] = [None] * len(tokens)
        for row, logprob in zip(self.logprob_rows, self.logprobs.read(), strict=True):
            found[row] = logprob
        return tokens, found


class Runner:
    """A decoder with its cache and everything a step needs. `context` is the longest sequence."""

    def __init__(
        self, decoder: Decoder, cache: KvCache, config: EngineConfig, *, context: int,
        stream: torch.cuda.Stream | None = None,
    ) -> None:  # fmt: skip
        self._decoder, self.cache, self._stream = decoder, cache, stream
        device, self._block = cache.device, cache.shape.block
        self._cuda = device.type == "cuda"
        max_seqs = config.max_seqs
        self.inputs = Inputs(
            max_seqs=max_seqs, columns=-(-context // self._block), block=self._block,
            batched_tokens=config.batched_tokens, device=device, stream=stream,
        )  # fmt: skip
        self._sampled = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        self._hosts = [torch.zeros(max_seqs, dtype=torch.int64, pin_memory=self._cuda) for _ in range(2)]
        self._arrays: list[Ints] = [host.numpy() for host in self._hosts]
        self._arrived = [torch.cuda.Event() for _ in range(2)] if self._cuda else [None, None]
        self._turn = 0
        self._graphs: DecodeGraphs | None = None
        self._captured = 0  # rows of the largest graph, while asleep
        self._thread = local()  # `at_work` per thread
        if self._cuda:
            # Weights and pages were written on another stream.
            torch.cuda.synchronize(device)

    def capture(self, largest: int) -> None:
        """Capture graphs of up to this many decode rows."""
        assert self._stream is not None
        self.inputs.forget()
        with torch.cuda.stream(self._stream):
            # Without sequences all rows are padding.
            self._graphs = DecodeGraphs(self.inputs.decodes, self._decode, largest, self._stream)

    def sleep(self) -> None:
        """Free the cache, and the graphs, which hold its address."""
        self._captured, self._graphs = self._graphs.sizes[-1] if self._graphs else 0, None
        self.inputs.forget()
        self.cache.release()

    def wake(self) -> None:
        """Allocate the cache and capture the graphs again."""
        self.cache.allocate()
        if self._cuda:
            # Pages and weights are written on other streams than the one steps use.
            torch.cuda.synchronize(self.cache.device)
        if self._captured:
            self.capture(self._captured)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Set thread state once for many steps, since that takes longer than launching a graph."""
        with torch.cuda.stream(self._stream) if self._stream else nullcontext(), torch.inference_mode():
            before = getattr(self._thread, "at_work", False)
            self._thread.at_work = True
            try:
                yield
            finally:
                self._thread.at_work = before

    def launch(self, step: ScheduledStep) -> TokensInTransit:
        """Launch a step. An exception leaves the runner ready for the next step."""
        try:
            if getattr(self._thread, "at_work", False):
                return self._launch(step)
            with self.at_work():
                return self._launch(step)
        except BaseException:
            self.inputs.forget()
            raise

    def _launch(self, step: ScheduledStep) -> TokensInTransit:
        cache, inputs = self.cache, self.inputs
        if step.swaps_out:
            cache.swap_out(step.swaps_out)
        if step.swaps_in:
            cache.swap_in(step.swaps_in)
        if step.copies:
            cache.copy(step.copies)
        inputs.take(step)
        if step.chunks or inputs.renewed:
            logits = self._pass(*inputs.mixed(step))
        elif step.decodes:
            count, graphs = len(step.decodes), self._graphs
            size = graphs.size_for(count) if graphs is not None and count <= graphs.sizes[-1] else 0
            inputs.decodes(size or count)
            logits = graphs.replay(size) if graphs is not None and size else self._decode(count, inputs.widest)
        else:
            return TokensInTransit([], self._arrays[0][:0])
        logprobs = self._special(step, logits) if inputs.special else None
        return self._send(len(inputs.sampling_sequences), logprobs)

    def _decode(self, size: int, columns: int | None = None) -> Tensor:
        """Run the whole step of the rows in the inputs' buffer, as captured in graphs."""
        return self._pass(*decode_batch(self.inputs.rows(size), self.inputs.slots, self._block, columns))

    def _pass(self, batch: Batch, at: Tensor) -> Tensor:
        """Return the logits of the rows that sample, at these slots; tokens are sampled and stored for the next step."""
        logits = self._decoder.forward(batch, self.cache.layers)
        count = at.shape[0]
        if count:
            slots, sampled, positions = self.inputs.slots, self._sampled[:count], batch.positions
            if batch.samples is not None:
                positions = positions.index_select(0, batch.samples)
            temperatures, seeds = slots.temperatures.index_select(0, at), slots.seeds.index_select(0, at)
            slots.last_tokens.index_copy_(0, at, sample(logits, temperatures, seeds, positions, out=sampled))
        return logits

    def _special(self, step: ScheduledStep, logits: Tensor) -> Logprobs | None:
        """Sample again for the rows that need more than plain sampling."""
        slots, rows = self.inputs.slots, self.inputs.special
        works = [work for work in step.works if work.samples]
        works = [works[row] for row in rows]
        at_row = self._index(rows)
        at_slot = self._index([work.sequence.slot for work in works])
        positions = self._index([work.start + work.count - 1 for work in works])
        wanted = [work.sequence.sampling for work in works]
        tokens, logprobs = sample_special(
            logits, at_row, wanted, slots.temperatures[at_slot], slots.seeds[at_slot], positions
        )
        slots.last_tokens.index_copy_(0, at_slot, tokens)
        self._sampled.index_copy_(0, at_row, tokens)
        return logprobs

    def _send(self, count: int, logprobs: Logprobs | None) -> TokensInTransit:
        """Copy the whole buffer to the host: a view of part of it would take longer."""
        self._turn ^= 1
        arrived = self._arrived[self._turn]
        self._hosts[self._turn].copy_(self._sampled, non_blocking=True)
        if arrived is not None:
            arrived.record(self._stream)
        tokens, rows = self._arrays[self._turn][:count], tuple(self.inputs.special) if logprobs else ()
        return TokensInTransit(self.inputs.sampling_sequences, tokens, arrived, logprobs, rows)

    def _index(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, pin_memory=self._cuda).to(self.cache.device, non_blocking=True)
