"""Parse PYTORCH_ALLOC_CONF as PyTorch does.

Grammar, limits and error messages are PyTorch's, oddities included: separators are counted but not checked
("max_split_size_mb,30" is 30), and a number ends where its digits end ("30x" is 30). The allocator implements the
settings; options of the pinned host allocator are only stored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from tonnage.errors import RequestError
from tonnage.units import MIB

SIZE_MAX = 2**64 - 1
MIN_BLOCK_BYTES = 512
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
MIN_LARGE_SEGMENT_BYTES = 10 * MIB
SEGMENT_UNIT_BYTES = 2 * MIB
ROUNDUP_INTERVALS = 16
MAX_REGISTER_THREADS = 128
_DECIMAL = re.compile(r"[+-]?(?:inf(?:inity)?|nan|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)", re.IGNORECASE)
_HEXADECIMAL = re.compile(r"[+-]?0x(?:[0-9a-f]+\.?[0-9a-f]*|\.[0-9a-f]+)(?:p[+-]?[0-9]+)?", re.IGNORECASE)
_UNCLOSED = "Expected closing bracket ']' in ConfigTokenizer but reached end of config"
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


Version = tuple[int, int]
NEWEST: Version = (2, 13)


class BadAllocatorSettings(RequestError, ValueError):
    """A text that PyTorch would reject; `pytorch_type` is the exception that it would raise."""

    def __init__(self, message: str, pytorch_type: type[Exception] = ValueError) -> None:
        super().__init__(message, hint="PYTORCH_ALLOC_CONF is written key:value,key:value.")
        self.pytorch_type = pytorch_type


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    """One configuration of the caching allocator; the defaults are PyTorch's."""

    max_split_bytes: int = SIZE_MAX
    max_non_split_rounding_bytes: int = 20 * MIB
    large_segment_bytes: int = 20 * MIB
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = (0,) * ROUNDUP_INTERVALS
    expandable_segments: bool = False
    memory_fraction: float = 1.0
    backend: str = "native"
    release_lock_on_cudamalloc: bool = False
    graph_capture_record_stream_reuse: bool = False
    throw_on_cudamalloc_oom: bool = False
    pinned_use_cuda_host_register: bool = False
    pinned_num_register_threads: int = 1
    pinned_use_background_threads: bool = False
    pinned_reserve_segment_bytes: int = 0
    pinned_free_catch_all: bool = False
    pinned_max_round_threshold_bytes: int = SIZE_MAX
    pinned_max_cached_bytes: int = SIZE_MAX
    text: str = ""

    @classmethod
    def parse(cls, text: str, torch_version: Version = NEWEST) -> AllocatorSettings:
        """Return the settings that a text such as "expandable_segments:True" gives a fresh process."""
        return cls().changed_by(text, torch_version)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], torch_version: Version = NEWEST) -> AllocatorSettings:
        """Return the settings of a process: PYTORCH_CUDA_ALLOC_CONF takes precedence over PYTORCH_ALLOC_CONF."""
        return cls.parse(next((environ[name] for name in VARIABLES if name in environ), ""), torch_version)

    def changed_by(self, text: str, torch_version: Version = NEWEST) -> AllocatorSettings:
        """Return the result of `torch.cuda.memory._set_allocator_settings(text)`, which resets some options."""
        tokens = _Tokens(text)
        known = {key for key in _COMMON_OPTIONS | _CUDA_OPTIONS if torch_version >= (2, 12) or key not in _SINCE_2_12}
        draft = {field.name: getattr(self, field.name) for field in fields(self)}
        draft |= {name: getattr(_DEFAULTS, name) for name in _STARTING_OVER} | {"text": text}
        for index, token in enumerate(tokens.items):
            if token == "large_segment_size_mb":
                _read(tokens, index, draft)
        draft["max_non_split_rounding_bytes"] = draft["large_segment_bytes"]
        for options in (_COMMON_OPTIONS, _CUDA_OPTIONS):
            index = 0
            while index < len(tokens.items):
                key = tokens.at(index)
                if key not in known:
                    raise BadAllocatorSettings(f"Unrecognized key '{key}' in Accelerator allocator config.")
                index = 2 + (_read(tokens, index, draft) if key in options else tokens.skip(index))
        return replace(self, **draft)

    def rounded_bytes(self, size_bytes: int) -> int:
        """Return the block size for a request of this many bytes."""
        if size_bytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        interval = min(max(size_bytes.bit_length() - MIB.bit_length(), 0), ROUNDUP_INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        if divisions > 1 and size_bytes > MIN_BLOCK_BYTES * divisions:
            floor = 1 << (size_bytes.bit_length() - 1)
            step = floor >> (divisions.bit_length() - 1)
            return size_bytes if floor == size_bytes else -(-size_bytes // step) * step if step else floor << 1
        return -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES

    def segment_bytes(self, block_bytes: int) -> int:
        """Return the size passed to cudaMalloc if no cached block fits."""
        if block_bytes <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if block_bytes < MIN_LARGE_SEGMENT_BYTES:
            return self.large_segment_bytes
        return -(-block_bytes // SEGMENT_UNIT_BYTES) * SEGMENT_UNIT_BYTES

    @property
    def rounds_to_divisions(self) -> bool:
        """Whether requests are rounded to divisions of a power of two."""
        return any(divisions > 1 for divisions in self.roundup_power2_divisions)

    @property
    def not_modelled(self) -> dict[str, str]:
        """Settings that are not modelled, and what is done instead."""
        found = {}
        if self.backend != "native":
            found[f"backend:{self.backend}"] = (
                "PyTorch's own allocator is modelled: of reserved bytes, the driver's pool has others"
            )
        if self.throw_on_cudamalloc_oom:
            found["throw_on_cudamalloc_oom"] = "memory is asked for all the same, which changes no outcome"
        if self.graph_capture_record_stream_reuse:
            found["graph_capture_record_stream_reuse"] = "blocks of a capture are used again after it, not within it"
        return found

    def as_snapshot(self) -> dict[str, Any]:
        """Return the `allocator_settings` of `torch.cuda.memory._snapshot()`."""
        return {
            "PYTORCH_CUDA_ALLOC_CONF": self.text,
            "max_split_size": self.max_split_bytes if self.max_split_bytes != SIZE_MAX else -1,
            "garbage_collection_threshold": self.garbage_collection_threshold,
            "expandable_segments": self.expandable_segments,
            "pinned_num_register_threads": self.pinned_num_register_threads,
            "release_lock_on_cudamalloc": self.release_lock_on_cudamalloc,
            "pinned_use_cuda_host_register": self.pinned_use_cuda_host_register,
            "graph_capture_record_stream_reuse": self.graph_capture_record_stream_reuse,
            "roundup_power2_divisions": {str(2**i): count for i, count in enumerate(self.roundup_power2_divisions)},
        }


class _Tokens:
    def __init__(self, text: str) -> None:
        self.items: list[str] = re.findall(r"[,:\[\]]|[^,:\[\]]+", re.sub(r"\s", "", text))

    def at(self, index: int) -> str:
        if index >= len(self.items):
            raise BadAllocatorSettings("Index out of bounds in ConfigTokenizer", RuntimeError)
        return self.items[index]

    def whole(self, index: int) -> int:
        """Parse like std::stoull: leading digits; a minus wraps around."""
        match = re.match(r"([+-]?)([0-9]+)", self.at(index))
        if match is None:
            raise BadAllocatorSettings("stoull")
        value = int(match[2])
        if value > SIZE_MAX:
            raise BadAllocatorSettings("stoull", IndexError)
        return (SIZE_MAX + 1 - value) % (SIZE_MAX + 1) if match[1] == "-" else value

    def real(self, index: int) -> float:
        """Parse like std::stod: the longest leading number."""
        token = self.at(index)
        match = _HEXADECIMAL.match(token)
        if match is not None:
            return float.fromhex(match[0])
        match = _DECIMAL.match(token)
        if match is None:
            raise BadAllocatorSettings("stod")
        value = float(match[0])
        overflows = math.isinf(value) and "inf" not in match[0].lower()
        if overflows or (abs(value) < 2.2250738585072014e-308 and re.search(r"[1-9]", match[0].lower().split("e")[0])):
            raise BadAllocatorSettings("stod", IndexError)
        return value

    def flag(self, index: int) -> bool:
        token = self.at(index)
        if token not in ("True", "False"):
            raise BadAllocatorSettings(
                f"Expected 'True' or 'False' at index {index} in ConfigTokenizer but got '{token}'"
            )
        return token == "True"

    def skip(self, index: int) -> int:
        """Return the index of the last token of a value that another reader handles."""
        self.at(index + 1)
        if self.at(index + 2) != "[":
            return index + 2
        if "]" not in self.items[index + 2 :]:
            raise BadAllocatorSettings(_UNCLOSED, RuntimeError)
        return self.items.index("]", index + 2)


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _read(tokens: _Tokens, index: int, draft: dict[str, Any]) -> int:
    """Parse an option's value, check it and store it under its field's name; return the index of its last token."""
    key = tokens.at(index)
    if key == "roundup_power2_divisions":
        return _read_divisions(tokens, index, draft)
    name, parse = (_COMMON_OPTIONS | _CUDA_OPTIONS)[key]
    value, least = parse(tokens, index + 2), draft["large_segment_bytes"] // MIB
    for is_valid, refusal in _CHECKS.get(key, ()):
        if not is_valid(value, least):
            raise BadAllocatorSettings(refusal.format(key=key, value=value, least=least))
    draft[name] = min(value, SIZE_MAX // MIB) * MIB if name.endswith("_bytes") else value
    return index + 2


def _read_divisions(tokens: _Tokens, index: int, draft: dict[str, Any]) -> int:
    def divisor(index: int, refusal: str, *, or_zero: bool = False) -> int:
        value = tokens.whole(index)
        if not (_is_power_of_two(value) or (or_zero and value == 0)):
            raise BadAllocatorSettings(f"For roundups, the {refusal} ")
        return value

    index += 2
    if tokens.at(index) != "[":
        value = divisor(index, "divisions has to be power of 2")
        draft["roundup_power2_divisions"] = (value,) * ROUNDUP_INTERVALS
        return index
    divisions = list(draft["roundup_power2_divisions"])
    last: int | None = None
    index += 1
    while index < len(tokens.items) and tokens.at(index) != "]":
        boundary = index
        index += 2
        value = divisor(index, "divisions has to be power of 2 or 0 to disable roundup", or_zero=True)
        if tokens.at(boundary) == ">":
            start = (last or 0) + 1
            divisions[start:] = [value] * (ROUNDUP_INTERVALS - start)
        else:
            edge = divisor(boundary, "intervals have to be power of 2")
            interval = min(edge.bit_length() - 1, ROUNDUP_INTERVALS - 1)
            if last is None:
                divisions[:interval] = [value] * interval
            divisions[interval] = value
            last = interval
        index += 1 if tokens.at(index + 1) == "]" else 2
    if index >= len(tokens.items):
        raise BadAllocatorSettings(_UNCLOSED, RuntimeError)
    draft["roundup_power2_divisions"] = tuple(divisions)
    return index


_DEFAULTS = AllocatorSettings()
_STARTING_OVER = ("max_split_bytes", "roundup_power2_divisions", "garbage_collection_threshold")
# By key: the field, and how its value is parsed. A size in MiB becomes bytes.
_Option = tuple[str, Callable[[_Tokens, int], Any]]
_COMMON_OPTIONS: dict[str, _Option] = {
    "large_segment_size_mb": ("large_segment_bytes", _Tokens.whole),
    "max_split_size_mb": ("max_split_bytes", _Tokens.whole),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _Tokens.whole),
    "garbage_collection_threshold": ("garbage_collection_threshold", _Tokens.real),
    "roundup_power2_divisions": ("roundup_power2_divisions", _Tokens.whole),  # or a list
    "expandable_segments": ("expandable_segments", _Tokens.flag),
    "pinned_use_background_threads": ("pinned_use_background_threads", _Tokens.flag),
    "pinned_max_round_threshold_mb": ("pinned_max_round_threshold_bytes", _Tokens.whole),
    "pinned_max_cached_size_mb": ("pinned_max_cached_bytes", _Tokens.whole),
}
_CUDA_OPTIONS: dict[str, _Option] = {
    "backend": ("backend", _Tokens.at),
    "release_lock_on_cudamalloc": ("release_lock_on_cudamalloc", _Tokens.flag),
    "release_lock_on_hipmalloc": ("release_lock_on_cudamalloc", _Tokens.flag),
    "pinned_use_cuda_host_register": ("pinned_use_cuda_host_register", _Tokens.flag),
    "pinned_use_hip_host_register": ("pinned_use_cuda_host_register", _Tokens.flag),
    "pinned_num_register_threads": ("pinned_num_register_threads", _Tokens.whole),
    "pinned_reserve_segment_size_mb": ("pinned_reserve_segment_bytes", _Tokens.whole),
    "pinned_free_catch_all": ("pinned_free_catch_all", _Tokens.flag),
    "graph_capture_record_stream_reuse": ("graph_capture_record_stream_reuse", _Tokens.flag),
    "per_process_memory_fraction": ("memory_fraction", _Tokens.real),
    "throw_on_cudamalloc_oom": ("throw_on_cudamalloc_oom", _Tokens.flag),
}
# What must hold for a value and the MiB of a large segment, and what PyTorch says otherwise.
_Check = tuple[Callable[[Any, int], bool], str]
_A_SEGMENT: _Check = (lambda size, least: size >= least, "CachingAllocator option {key} too small, must be >= {least}")
_CHECKS: dict[str, list[_Check]] = {
    "large_segment_size_mb": [(lambda size, _: size > 10, "CachingAllocator option {key} must be > 10 MB")],
    "max_split_size_mb": [_A_SEGMENT],
    "max_non_split_rounding_mb": [_A_SEGMENT],
    "garbage_collection_threshold": [
        (lambda share, _: 0 < share < 1, "garbage_collect_threshold is invalid, set it in (0.0, 1.0)")
    ],
    "backend": [
        (
            lambda name, _: name in ("native", "cudaMallocAsync"),
            "Unknown allocator backend, options are native and cudaMallocAsync",
        )
    ],
    "pinned_num_register_threads": [
        (lambda value, _: _is_power_of_two(value), "Number of register threads has to be power of 2, got {value}"),
        (
            lambda value, _: value <= MAX_REGISTER_THREADS,
            f"Number of register threads should be less than or equal to {MAX_REGISTER_THREADS}, got {{value}}",
        ),
    ],
    "pinned_reserve_segment_size_mb": [
        (lambda size, _: size > 0, "Pinned reserve segment size has to be greater than 0")
    ],
    "per_process_memory_fraction": [
        (lambda share, _: 0 <= share <= 1, "per_process_memory_fraction is invalid, set it in [0.0, 1.0]")
    ],
}
# PyTorch 2.11 rejected these four on a GPU, and 2.13 accepts them.
_SINCE_2_12 = {
    "throw_on_cudamalloc_oom", "pinned_free_catch_all", "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb"
}  # fmt: skip
