"""Samples of different lengths: the cost of padding, the worst micro-batch, and the useful share of a step.

| batching     | a micro-batch of B samples                           | its worst                                   |
|--------------|------------------------------------------------------|---------------------------------------------|
| pad          | B random samples, padded to the longest of them      | B × the longest of all                      |
| bucket       | B of about one length (`group_by_length`)            | B × the longest of all                      |
| padding-free | B samples concatenated without padding               | the largest sum of B in an epoch            |
| pack         | B sequences, each filled with whole samples          | B × the sequence                            |

Memory is that of the worst micro-batch, time that of the mean one. A step's time at another length than the one that counts for
memory is that of as many tokens, cut into pieces with the same attention work.
"""

import json
import math
import re
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from tonnage.budget.time.step import StepClock, StepTime
from tonnage.budget.training.configuration import Configuration, Number, Quantity
from tonnage.errors import BadLayout
from tonnage.hardware.cluster import Cluster
from tonnage.models.shape import ModelShape
from tonnage.units import parse_count

Batching = Literal["pad", "bucket", "padding-free", "pack"]
BATCHINGS: tuple[Batching, ...] = get_args(Batching)

_LONGEST = 2**24
_MOST_SAMPLES = 10**12
_MOST_FILE_BYTES = 2**28
# Lengths that represent a distribution given in words; one in a thousand reaches the maximum.
_DRAWN = 4000
_RARE = 3.0902  # standard deviations exceeded by one in a thousand
_ROUNDS = 20  # iterations to match its mean
_USUAL_SAMPLES = 10_000
# Batches that transformers' `LengthGroupedSampler` sorts at a time.
_SORTED_BATCHES = 50
_MOST_DRAWN = 2**15
_EPOCHS, _MOST_BATCHES, _SHUFFLED = 8, 2**13, 2**16
_LENGTH = re.compile(r"(?:([0-9]{1,12})x)?([0-9.]+[kKmM]?)")
_NEARLY = 0.9


class MeanBatch(NamedTuple):
    """The mean micro-batch: its tokens including padding, and the equivalent length per token for attention."""

    tokens: float
    attended: float


@dataclass(frozen=True, eq=False)
class Lengths:
    """Sample lengths in ascending order with the share of each, and how they are batched."""

    values: NDArray[np.int64]
    shares: NDArray[np.float64]
    samples: float  # per epoch
    batching: Batching = "pad"
    seq: int = 0  # longer samples are truncated; also the length of packs
    cut: float = 0.0  # share of samples that were longer

    @property
    def mean(self) -> float:
        """Mean tokens per sample."""
        return float(self.values @ self.shares)

    @property
    def longest(self) -> int:
        """Longest sample."""
        return int(self.values[-1])

    @property
    def attended(self) -> float:
        """Mean length of the sample that a token belongs to."""
        return float((self.values**2.0) @ self.shares) / self.mean

    def spread(self, count: int) -> NDArray[np.int64]:
        """Return `count` lengths that represent all, in ascending order."""
        ranks = (np.arange(count) + 0.5) / count
        return self.values[np.minimum(np.searchsorted(np.cumsum(self.shares), ranks), len(self.values) - 1)]

    def limited(self, seq: int) -> "Lengths":
        """Return the lengths truncated to `seq`."""
        over = float(self.shares[self.values > seq].sum())
        return replace(self, values=np.minimum(self.values, seq), seq=seq, cut=over)

    def worst(self, micro_batch: Number) -> Number:
        """Return tokens per sequence in the largest micro-batch expected in an epoch, as if all were equally long."""
        if self.batching == "padding-free":
            largest: Number = _each(micro_batch, lambda size: -(-self._largest_sum(size) // size))
            return largest
        return self.seq if self.batching == "pack" else self.longest

    def _largest_sum(self, micro_batch: int) -> int:
        """Return the tokens of the largest micro-batch of an epoch, on average."""
        return round(float(_sums(self, micro_batch).max(axis=1).mean()))

    # Both are asked for again and again by a search; lengths are compared by identity.
    @lru_cache(maxsize=1024)  # noqa: B019
    def work(self, micro_batch: int) -> MeanBatch:
        """Return the work of the mean micro-batch."""
        if self.batching in ("pack", "padding-free"):
            return MeanBatch(micro_batch * (self.seq if self.batching == "pack" else self.mean), self.attended)
        lengths, shares = self.padded(micro_batch)
        mean = float(lengths @ shares)
        return MeanBatch(micro_batch * mean, float(lengths**2.0 @ shares) / mean)

    @lru_cache(maxsize=64)  # noqa: B019
    def padded(self, micro_batch: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the lengths that micro-batches are padded to, and how often each occurs."""
        if self.batching == "bucket":
            # Batches sorted in groups, shuffled with a fixed seed.
            at_once = min(_SORTED_BATCHES, max(_SHUFFLED // micro_batch, 1)) * micro_batch
            shuffled = np.random.default_rng(0).permutation(self.spread(max(_SHUFFLED // at_once, 1) * at_once))
            lengths = np.sort(shuffled.reshape(-1, at_once), axis=1)[:, micro_batch - 1 :: micro_batch].ravel()
            return lengths, np.full(len(lengths), 1 / len(lengths))
        below = np.minimum(np.append(0.0, np.cumsum(self.shares)), 1.0) ** micro_batch
        return self.values, np.diff(below)

    def useful(self, micro_batch: int) -> float:
        """Return the tokens of samples in the mean micro-batch."""
        return micro_batch * (self.seq * self._filled if self.batching == "pack" else self.mean)

    @cached_property
    def _filled(self) -> float:
        """Share of packed sequences that is samples, with best-fit decreasing packing."""
        samples, packs = self.spread(_DRAWN), 0
        rooms: list[int] = []
        for length in samples[::-1].tolist():
            place = bisect_left(rooms, length)
            packs += place == len(rooms)
            room = rooms.pop(place) if place < len(rooms) else self.seq
            insort(rooms, room - length)
        return float(samples.sum()) / (packs * self.seq)

    def padding(self, micro_batch: int) -> float:
        """Return the share of computed tokens that is padding."""
        return max(1 - self.useful(micro_batch) / self.work(micro_batch).tokens, 0.0)

    def at_worst(self, micro_batch: int) -> float:
        """Return the share of micro-batches within a tenth of the worst."""
        if self.batching == "pack":
            return 1.0
        if self.batching == "padding-free":
            return float((_sums(self, micro_batch) >= _NEARLY * self._largest_sum(micro_batch)).mean())
        lengths, shares = self.padded(micro_batch)
        return float(shares[lengths >= _NEARLY * self.longest].sum())


class LengthClock(StepClock):
    """A step clock for micro-batches of different lengths; its tokens exclude padding."""

    def __init__(self, shape: ModelShape, cluster: Cluster, lengths: Lengths) -> None:
        super().__init__(shape, cluster)
        self.sample_tokens = lengths.mean
        self._lengths = lengths

    def step(self, config: Configuration) -> StepTime:
        """Predict one configuration, or each of many."""
        pieces = _each(config.micro_batch, lambda size: self._pieces(size)[0])
        seq = _each(config.micro_batch, lambda size: self._pieces(size)[1])
        time = super().step(replace(config, micro_batch=pieces, seq=seq))
        tokens: Quantity = _each(config.micro_batch, self._lengths.useful) * config.accumulate * config.data
        passes = sum((time.parts[name] for name in ("forward", "backward", "recompute")), start=0.0)
        # The slowest rank's tokens over the mean: per pass if ranks gather parameters, else per step. Pipeline stages wait
        # for the largest micro-batch in flight; data-parallel ranks wait for each other once a step.
        staged = np.asarray(config.pp) > 1
        rounds = np.where(staged | (config.zero > 1), 1, config.accumulate)
        ranks = np.where(staged, config.pp, config.data)
        columns = np.broadcast_arrays(*np.atleast_1d(config.micro_batch, ranks, rounds))
        rows, places = np.unique(np.stack(columns, axis=-1), axis=0, return_inverse=True)
        found = np.array([_slowest(self._lengths, *row) for row in rows.tolist()])[places.ravel()]
        waiting = passes * ((found if np.ndim(config.micro_batch) else float(found[0])) - 1)
        return replace(time, tokens=tokens, parts=time.parts | {"uneven ranks": waiting})

    def _pieces(self, micro_batch: int) -> tuple[int, int]:
        """Return sequences and length of a uniform micro-batch with the cost of the mean one."""
        work = self._lengths.work(micro_batch)
        pieces = max(round(work.tokens / work.attended), 1)
        return pieces, max(round(work.tokens / pieces), 1)


def clock_of(shape: ModelShape, cluster: Cluster, lengths: Lengths | None) -> StepClock:
    """Return the clock for samples of one length, or of many."""
    return StepClock(shape, cluster) if lengths is None else LengthClock(shape, cluster, lengths)


def _each(numbers: Number, value: Callable[[int], Any]) -> Any:
    """Evaluate a function once per distinct micro-batch."""
    if not np.ndim(numbers):
        return value(int(numbers))
    sizes, places = np.unique(np.asarray(numbers), return_inverse=True)
    return np.array([value(int(size)) for size in sizes])[places]


@lru_cache(maxsize=64)
def _sums(lengths: Lengths, micro_batch: int) -> NDArray[Any]:
    """Return the tokens of micro-batches of a few epochs, sampled with a fixed seed."""
    batches = int(min(max(lengths.samples // micro_batch, 1), _MOST_BATCHES))
    drawn = np.random.default_rng(0).choice(lengths.values, (_EPOCHS * batches, micro_batch), p=lengths.shares)
    sums: NDArray[Any] = drawn.sum(axis=1)
    return sums.reshape(_EPOCHS, batches)


@lru_cache(maxsize=4096)
def _slowest(lengths: Lengths, micro_batch: int, ranks: int, rounds: int) -> float:
    """Return the most tokens of any rank over the mean. Sorted and packed micro-batches are all alike."""
    if ranks == 1 or lengths.batching in ("bucket", "pack"):
        return 1.0
    if lengths.batching == "padding-free":
        sizes = _sums(lengths, micro_batch).ravel()
        shares = np.full(sizes.size, 1 / sizes.size)
    else:
        sizes, shares = lengths.padded(micro_batch)
    rounds = min(max(rounds, 1), max(_MOST_DRAWN // ranks, 1))
    trials = max(_MOST_DRAWN // (ranks * rounds), 1)
    drawn = np.random.default_rng(0).choice(sizes, (trials, rounds, ranks), p=shares / shares.sum())
    return max(float(drawn.mean(axis=1).max(axis=1).mean()) / float(sizes @ shares), 1.0)


def parse_lengths(text: str, samples: float | None = None) -> Lengths:
    """Parse a file of lengths, a list ("512,1024", "999x600,32k"), or words ("mean 600 max 4096")."""
    words = text.split()
    if words and words[0] in ("mean", "median"):
        # A log-normal distribution of which one in a thousand reaches the maximum.
        hint = "Write mean 600 max 4096, or median 400 max 4096."
        if len(words) != 4 or words[2] != "max":
            raise BadLayout(f"--lengths {text}: the words are not known.", hint=hint)
        middle, longest = parse_count(words[1]), parse_count(words[3])
        if not 1 <= middle < longest <= _LONGEST:
            raise BadLayout(f"--lengths {text}: the {words[0]} lies between 1 and the maximum.", hint=hint)
        apart = math.log(longest / middle)
        spread, centre = apart / _RARE, math.log(middle)
        if words[0] == "mean":
            # centre + spread²/2 is the mean's logarithm, centre + _RARE × spread the maximum's.
            spread = _RARE - math.sqrt(max(_RARE**2 - 2 * apart, 0.0))
            centre -= spread**2 / 2
        deviates = np.array([NormalDist().inv_cdf((rank + 0.5) / _DRAWN) for rank in range(_DRAWN)])
        drawn = np.clip(np.exp(centre + spread * deviates), 1, longest)
        for _ in range(_ROUNDS if words[0] == "mean" else 0):
            # Truncation at the maximum lowers the mean.
            centre += math.log(middle / float(drawn.mean()))
            drawn = np.clip(np.exp(centre + spread * deviates), 1, longest)
        return _counted(np.round(drawn).astype(int).tolist(), [1] * _DRAWN, text, samples or _USUAL_SAMPLES)
    matches = [_LENGTH.fullmatch(part.strip()) for part in text.split(",")]
    if all(matches):
        found = [(parse_count(match[2]), int(match[1] or 1)) for match in matches if match]
        return _counted([length for length, _ in found], [count for _, count in found], text, samples)
    path = Path(text).expanduser()
    hint = "Name a file with a length in each line or a JSON list, or write 512,1024, or mean 600 max 4096."
    try:
        if not path.is_file():
            raise BadLayout(f"--lengths {text}: there is no such file, and it is no list of lengths.", hint=hint)
        if path.stat().st_size > _MOST_FILE_BYTES:
            raise BadLayout(f"--lengths {text}: the file is too large.", hint="Give a sample of the lengths.")
        content = path.read_text("utf-8").strip()
        numbers = json.loads(content) if content.startswith("[") else [int(line) for line in content.split()]
    except (OSError, ValueError, RecursionError) as error:
        raise BadLayout(f"--lengths {text} cannot be read: {error}.", hint=hint) from None
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise BadLayout(f"--lengths {text}: its list holds other things than whole numbers.", hint=hint)
    return _counted(numbers, [1] * len(numbers), text, samples)


def _counted(lengths: list[int], counts: list[int], text: str, samples: float | None) -> Lengths:
    if not lengths or sum(counts) < 1:
        raise BadLayout(f"--lengths {text}: there are none.", hint="Write 512,1024, or mean 600 max 4096.")
    if not 1 <= min(lengths) <= max(lengths) <= _LONGEST:
        raise BadLayout(f"--lengths {text}: a sample has 1 to {_LONGEST:,} tokens.", hint="Leave others out.")
    values, places = np.unique(np.array(lengths, dtype=np.int64), return_inverse=True)
    sums = np.bincount(places, weights=np.array(counts, dtype=float))
    values, sums = values[sums > 0], sums[sums > 0]
    return Lengths(values, sums / sums.sum(), min(samples or float(sums.sum()), _MOST_SAMPLES), seq=int(values[-1]))
