"""A step's inputs: packed into pinned buffers on the host, sent in one or two copies, unpacked on the device.

What a sequence keeps from step to step is on the device, indexed by its slot: last token, block table, sampling
parameters. Decode rows need three numbers each: slot, position, and the order of rows, longest first. They also stay
on the device, where every pass advances the positions; so a step with the same sequences sends nothing unless one
has a new block. If only some left, their rows are removed. Everything else takes the general path. This module knows
neither model nor graphs.
"""

from bisect import bisect_left
from collections.abc import Sequence as Sized
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tonnage.serve.batch import Batch
from tonnage.serve.scheduler.sequence import Decode, ScheduledStep, Sequence

Ints = NDArray[np.signedinteger[Any]]
_MASK = 2**64 - 1
_FEW = 8  # rows that may leave before a full rebuild is as fast


def mixed_seed(seed: int, sample_index: int) -> int:
    """Return a seed per sample of one prompt, as a signed 64-bit integer (SplitMix64)."""
    mixed = (seed + (sample_index + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    mixed ^= mixed >> 31
    return mixed - (mixed >> 63 << 64)


def _longest_first(positions: Ints) -> Ints:
    return (-positions).argsort(kind="stable")


class Slots:
    """Per-slot state on the device. The last slot is a dummy, for the padding rows of graphs."""

    def __init__(self, max_seqs: int, columns: int, device: torch.device) -> None:
        self.dummy = max_seqs
        self.last_tokens = torch.zeros(max_seqs + 1, dtype=torch.int64, device=device)
        self.tables = torch.zeros(max_seqs + 1, columns, dtype=torch.int32, device=device)
        self.temperatures = torch.zeros(max_seqs + 1, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(max_seqs + 1, dtype=torch.int64, device=device)
        self.no_chunks = torch.zeros(1, dtype=torch.int32, device=device)


class Staging:
    """Two pinned buffers in turn, and one on the device; views, which cost as much as a copy, are cached."""

    def __init__(self, numbers: int, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        cuda, self._stream = device.type == "cuda", stream
        self._hosts = [torch.zeros(numbers, dtype=torch.int32, pin_memory=cuda) for _ in range(2)]
        self._arrays: list[Ints] = [host.numpy() for host in self._hosts]
        self._sent = [torch.cuda.Event() for _ in range(2)] if cuda else []
        self._turn = 0
        self._views: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self.device = torch.zeros(numbers, dtype=torch.int32, device=device)

    def begin(self) -> Ints:
        """Return the buffer to write to."""
        self._turn ^= 1
        if self._sent:
            self._sent[self._turn].synchronize()
        return self._arrays[self._turn]

    def send(self, count: int) -> Tensor:
        """Copy its first `count` numbers to the device."""
        return self._send(self.device[:count], self._hosts[self._turn][:count])

    def send_again(self, count: int) -> None:
        """Like `send`, with cached views for counts that recur."""
        views = self._views.get(count)
        if views is None:
            views = self._views[count] = self.device[:count], [host[:count] for host in self._hosts]
        self._send(views[0], views[1][self._turn])

    def _send(self, target: Tensor, source: Tensor) -> Tensor:
        target.copy_(source, non_blocking=True)
        if self._sent:
            self._sent[self._turn].record(self._stream)
        return target


class _Pack:
    """Named arrays in one buffer, sent at once and read on the device as 32 or 64 bits."""

    def __init__(self, staging: Staging) -> None:
        self._staging, self._buffer = staging, staging.begin()
        self._slices: dict[str, slice] = {}
        self._used = 0

    def put(self, name: str, *arrays: Ints | Sized[int]) -> None:
        first = self._used
        for array in arrays:
            end = self._used + len(array)
            self._buffer[self._used : end] = array
            self._used = end
        self._slices[name] = slice(first, self._used)

    def send(self) -> None:
        self._narrow = self._staging.send(self._used)
        self._wide = self._narrow.long()

    def narrow(self, name: str) -> Tensor:
        return self._narrow[self._slices[name]]

    def wide(self, name: str) -> Tensor:
        return self._wide[self._slices[name]]


def decode_batch(rows: Tensor, slots: Slots, block: int, columns: int | None = None) -> tuple[Batch, Tensor]:
    """Return the batch of decode rows [3, rows] (slot, position, order), which advance, and their slots.

    A padding row has the dummy slot, whose table holds null blocks, and position −1. `columns` None: all of the tables.
    """
    wide = rows[:2].long()
    at, positions = wide[0], wide[1].clamp(min=0)
    tables = slots.tables[:, :columns].index_select(0, at)
    blocks = tables.gather(1, (positions // block).unsqueeze(1)).squeeze(1)
    lengths = rows[1] + 1
    batch = Batch(
        token_ids=slots.last_tokens.index_select(0, at),
        positions=positions,
        slots=positions % block + blocks * block,
        decodes=rows.shape[1],
        tables=tables,
        lengths=lengths,
        chunk_starts=slots.no_chunks,
        longest_chunk=0,
        order=rows[2],
    )
    rows[1].add_(lengths.sign())
    return batch, at


class Inputs:
    """The host's record of the last step, and the transfer to the device."""

    def __init__(
        self, *, max_seqs: int, columns: int, block: int, batched_tokens: int, device: torch.device,
        stream: torch.cuda.Stream | None = None,
    ) -> None:  # fmt: skip
        self.slots = Slots(max_seqs, columns, device)
        self._block, self._columns = block, columns
        self._staging = Staging(3 * batched_tokens + max_seqs * (2 * columns + 20) + 16, device, stream)
        self._row_staging = Staging(3 * max_seqs, device, stream)
        # Of the decode rows: slot, position, and the order with the longest first, which take longest.
        self._rows: Ints = np.zeros((3, max_seqs), dtype=np.int32)
        self._padding: Ints = np.empty((3, max_seqs), dtype=np.int32)
        self._padding[0], self._padding[1], self._padding[2] = self.slots.dummy, -1, np.arange(max_seqs)
        self._sent = 0  # rows on the device, padding included, that are valid for the next step
        self._grown: Sized[tuple[Sequence, int]] = ()
        self._decodes: tuple[Decode, ...] = ()  # of the last step
        self._decoding: list[Sequence] = []
        self._needy: set[Sequence] = set()
        self.sampling_sequences: list[Sequence] = []  # those that sample a token in this step, decodes first
        self.renewed: list[Sequence] = []  # those unknown or outdated on the device
        self.special: list[int] = []  # rows of `sampling_sequences` that need more than plain sampling

    def rows(self, size: int) -> Tensor:
        """Return the decode rows on the device [3, size], always at the same address, for graphs."""
        return self._row_staging.device[: 3 * size].view(3, size)

    @property
    def widest(self) -> int:
        """Table columns of the longest decoding sequence."""
        return int(self._rows[1, : len(self._decoding)].max()) // self._block + 1

    def take(self, step: ScheduledStep) -> None:
        """Update the host's rows to this step."""
        moved = step.chunks or step.copies or step.swaps_in or len(self.sampling_sequences) != len(self._decodes)
        if not moved and self._left(step.decodes):
            self._rows[1, : len(self._decoding)] += 1
            self.renewed = []
        else:
            self._look_up(step)
        self._decodes, self._grown = step.decodes, step.grown

    def forget(self) -> None:
        """Treat every row as new, since the last step did not complete."""
        self._decodes, self._decoding, self.sampling_sequences, self._grown, self._sent = (), [], [], (), 0

    def decodes(self, size: int) -> None:
        """Ensure that the decode rows, padded to `size`, are at `rows(size)`, and their blocks in the tables."""
        if self._grown:
            pack = _Pack(self._staging)
            self._pack_grown(pack)
            pack.send()
            self._put_blocks(pack)
        if size != self._sent:
            count = len(self._decoding)
            rows = self._row_staging.begin()[: 3 * size].reshape(3, size)
            rows[:, :count] = self._rows[:, :count]
            rows[:, count:] = self._padding[:, count:size]
            self._row_staging.send_again(3 * size)
        self._sent = size  # the pass advances their positions

    def mixed(self, step: ScheduledStep) -> tuple[Batch, Tensor]:
        """Return the batch of a step with chunks or new rows, and the slots of the rows that sample."""
        renewed, chunks, block, device = self.renewed, step.chunks, self._block, self.slots
        pack = _Pack(self._staging)
        # Per-slot state and changed table entries: whole rows of the renewed, new blocks of the others.
        tables = [np.array(one.blocks, dtype=np.int32) for one in renewed]
        seeds = np.array([mixed_seed(one.sampling.seed or 0, one.sample_index) for one in renewed], dtype=np.int64)
        # First, since 64-bit values must be aligned.
        pack.put("seeds", seeds.view(np.int32))
        heat = [0.0 if one.sampling.greedy else one.sampling.temperature for one in renewed]
        pack.put("temperatures", np.array(heat, np.float32).view(np.int32))
        pack.put("renewed", [one.slot for one in renewed])
        pack.put("last tokens", [one.tokens[-1] for one in renewed])
        rows = [one.slot * self._columns + np.arange(len(table)) for one, table in zip(renewed, tables, strict=True)]
        self._pack_grown(pack, rows, tables)
        # The rows of the pass: decodes, then chunks.
        slots, starts, order = self._rows[:, : len(self._decoding)]
        blocks = [one.blocks[start // block] for one, start in zip(self._decoding, starts.tolist(), strict=True)]
        spans = [np.arange(work.start, work.start + work.count) for work in chunks]
        own = tables[len(tables) - len(chunks) :]
        pages = [table[span // block] * block + span % block for table, span in zip(own, spans, strict=True)]
        ends = np.cumsum([0] + [work.count for work in chunks])
        last_rows = [end - 1 + len(slots) for work, end in zip(chunks, ends[1:], strict=True) if work.samples]
        pack.put("slots", slots, [work.sequence.slot for work in chunks])
        pack.put("ids", *(work.sequence.tokens[work.start : work.start + work.count] for work in chunks))
        pack.put("positions", starts, *spans)
        pack.put("pages", np.array(blocks, dtype=np.int32) * block + starts % block, *pages)
        pack.put("order", order)
        pack.put("lengths", starts + 1, [work.start + work.count for work in chunks])
        pack.put("chunk starts", ends)
        pack.put("samples", np.arange(len(slots)), last_rows)
        pack.put("sample slots", [one.slot for one in self.sampling_sequences])
        pack.send()
        # On the device.
        if renewed:
            at = pack.wide("renewed")
            device.tables.index_fill_(0, at, 0)
            device.seeds.index_copy_(0, at, pack.narrow("seeds").view(torch.int64))
            device.temperatures.index_copy_(0, at, pack.narrow("temperatures").view(torch.float32))
            device.last_tokens.index_copy_(0, at, pack.wide("last tokens"))
        self._put_blocks(pack)
        self._sent = 0
        widest = max(len(one.blocks) for one in (*self._decoding, *renewed))
        at = pack.wide("slots")
        batch = Batch(
            token_ids=torch.cat([device.last_tokens.index_select(0, at[: len(slots)]), pack.wide("ids")]),
            positions=pack.wide("positions"),
            slots=pack.wide("pages"),
            decodes=len(slots),
            tables=device.tables[:, :widest].index_select(0, at),
            lengths=pack.narrow("lengths"),
            chunk_starts=pack.narrow("chunk starts"),
            longest_chunk=max((work.count for work in chunks), default=0),
            samples=pack.wide("samples"),
            order=pack.narrow("order"),
        )
        return batch, pack.wide("sample slots")

    def _pack_grown(self, pack: _Pack, rows: Sized[Ints] = (), tables: Sized[Ints] = ()) -> None:
        """Pack table entries and their new blocks: those of this step, and these."""
        columns, grown = self._columns, self._grown
        pack.put("entries", [one.slot * columns + column for one, column in grown], *rows)
        pack.put("blocks", [one.blocks[column] for one, column in grown], *tables)

    def _put_blocks(self, pack: _Pack) -> None:
        self.slots.tables.view(-1).index_copy_(0, pack.wide("entries"), pack.narrow("blocks"))

    def _left(self, decodes: tuple[Decode, ...]) -> bool:
        """Remove the rows of sequences that stopped decoding, if they are few and the others unchanged."""
        kept = self._decodes
        if decodes is kept:
            return True
        rows: list[int] = []
        if not decodes or not 0 < len(kept) - len(decodes) <= _FEW:
            return False
        while len(kept) > len(decodes):
            # All rows before the first that left are equal, and none after it.
            row = bisect_left(range(len(decodes)), True, key=lambda row: kept[row] is not decodes[row])
            kept = kept[:row] + kept[row + 1 :]
            rows.append(row)
        if kept != decodes:
            return False
        count, self._decoding = len(self._decoding), self._decoding[:]
        for row in rows:
            del self._decoding[row]
            self._rows[:, row : count - 1] = self._rows[:, row + 1 : count]
            count -= 1
        self._rows[2, :count] = _longest_first(self._rows[1, :count])
        self._sent = 0
        self.sampling_sequences = self._decoding
        self._find_special(self._needy)
        return True

    def _look_up(self, step: ScheduledStep) -> None:
        decoding, starts = [work.sequence for work in step.decodes], [work.start for work in step.decodes]
        count = len(decoding)
        self._rows[0, :count] = [sequence.slot for sequence in decoding]
        self._rows[1, :count] = starts
        self._rows[2, :count] = _longest_first(self._rows[1, :count])
        self._sent = 0
        # The table and last token must be sent of all but those that sampled in the last step.
        sampled_now, back = set(self.sampling_sequences), bool(step.swaps_in)
        self.renewed = [
            one
            for one, start in zip(decoding, starts, strict=True)
            if one not in sampled_now or (back and start < len(one.tokens))
        ] + [work.sequence for work in step.chunks]
        self._decoding = decoding
        self.sampling_sequences = decoding + [work.sequence for work in step.chunks if work.samples]
        wishes = ((one, one.sampling) for one in self.renewed)
        self._find_special(self._needy.union(one for one, wish in wishes if wish.filtered or wish.logprobs is not None))

    def _find_special(self, needy: set[Sequence]) -> None:
        self.special = [row for row, one in enumerate(self.sampling_sequences) if one in needy] if needy else []
        self._needy = {self.sampling_sequences[row] for row in self.special}
