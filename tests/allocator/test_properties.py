"""What holds after any sequence of requests, under any settings."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.allocator import AllocatorSettings, CachingAllocator, OutOfMemory
from tonnage.allocator.blocks import Block

MIB = 2**20
TEXTS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:30",
    "roundup_power2_divisions:[1:8,64:4,>:2]",
    "garbage_collection_threshold:0.5",
    "garbage_collection_threshold:0.3,max_split_size_mb:25",
    "expandable_segments:True,max_split_size_mb:30,garbage_collection_threshold:0.4",
    "large_segment_size_mb:12",
]
SIZES = st.integers(1, 3 * MIB) | st.integers(MIB, 90 * MIB) | st.sampled_from([512, MIB, 10 * MIB, 20 * MIB])
STREAMS = st.integers(0, 2)
STEPS = st.lists(
    st.tuples(st.just("alloc"), SIZES, STREAMS)
    | st.tuples(st.just("free"), st.integers(0, 50), STREAMS)
    | st.tuples(st.just("record"), st.integers(0, 50), STREAMS)
    | st.tuples(st.sampled_from(["events", "empty", "pool", "switch"]), st.integers(0, 7), STREAMS),
    max_size=60,
)


class Program:
    """Takes random steps on an allocator."""

    def __init__(self, text: str, fraction: float) -> None:
        self.reserved = 0
        self.allocator = CachingAllocator(500 * MIB, AllocatorSettings.parse(text), observer=self.observe)
        self.allocator.set_memory_fraction(fraction)
        self.live: list[Block] = []
        self.pool: tuple[int, int] | None = None

    def observe(self, action: str, address: int, size: int, stream: int) -> None:
        sign = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1, "oom": 0}[action]
        self.reserved += sign * size

    def take(self, action: str, number: int, stream: int) -> None:
        allocator = self.allocator
        if action == "alloc":
            try:
                self.live.append(allocator.malloc(number, stream))
            except OutOfMemory as error:
                assert error.shortage.segment_bytes > 0
        elif action in ("free", "record") and self.live:
            index = number % len(self.live)
            if action == "free":
                allocator.free(self.live.pop(index))
            else:
                allocator.record_stream(self.live[index].address, stream)
        elif action == "events":
            allocator.process_events(stream)
        elif action == "empty":
            allocator.empty_cache()
        elif action == "switch" and number == 0:
            flag = not allocator.settings.expandable_segments
            allocator.settings = allocator.settings.changed_by(f"expandable_segments:{flag}")
        elif action == "pool":
            self.toggle_pool()

    def toggle_pool(self) -> None:
        if self.pool is None:
            self.pool = (0, 1)
            self.allocator.begin_allocate_to_pool(self.pool)
        else:
            self.allocator.end_allocate_to_pool(self.pool)
            self.pool = None

    def finish(self) -> None:
        if self.pool is not None:
            self.toggle_pool()
        for block in self.live:
            self.allocator.free(block)
        self.live = []


def check(program: Program) -> None:
    allocator, stats = program.allocator, program.allocator.memory_stats()
    segments = allocator.snapshot()
    check_tiling(segments)
    blocks = [block for segment in segments for block in segment["blocks"]]
    check_sums(stats, segments, blocks)
    live = {block.address: block for block in program.live}
    allocated = {b["address"]: b["size"] for b in blocks if b["state"] == "active_allocated"}
    assert allocated == {address: block.size for address, block in live.items()}
    assert all(block.size >= block.requested_bytes for block in program.live)
    assert stats["reserved_bytes.all.current"] == program.reserved <= allocator.capacity_bytes


def check_tiling(segments: list[dict]) -> None:
    """Segments do not overlap, blocks tile them, and no two free neighbours are left apart."""
    for segment, following in pairwise(segments):
        assert segment["address"] + segment["total_size"] <= following["address"]
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address
            address += block["size"]
        assert address == segment["address"] + segment["total_size"]
        states = [block["state"] for block in segment["blocks"]]
        assert ("inactive", "inactive") not in pairwise(states)


def check_sums(stats: dict[str, int], segments: list[dict], blocks: list[dict]) -> None:
    allocated = [block["size"] for block in blocks if block["state"] == "active_allocated"]
    active = [block["size"] for block in blocks if block["state"] != "inactive"]
    assert stats["allocated_bytes.all.current"] == sum(allocated)
    assert stats["allocation.all.current"] == len(allocated)
    assert (stats["active_bytes.all.current"], stats["active.all.current"]) == (sum(active), len(active))
    assert stats["reserved_bytes.all.current"] == sum(segment["total_size"] for segment in segments)
    assert stats["requested_bytes.all.current"] == sum(segment["requested_size"] for segment in segments)
    split = [
        block["size"]
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "inactive" and len(segment["blocks"]) > 1 and not segment["is_expandable"]
    ]
    assert (stats["inactive_split_bytes.all.current"], stats["inactive_split.all.current"]) == (sum(split), len(split))
    for key, value in stats.items():
        name, _, rest = key.partition(".all.")
        if rest in ("current", "allocated", "freed"):
            assert value == stats[f"{name}.small_pool.{rest}"] + stats[f"{name}.large_pool.{rest}"]
        if rest == "current":
            assert value == stats[f"{name}.all.allocated"] - stats[f"{name}.all.freed"]
            assert value <= stats[f"{name}.all.peak"] <= stats[f"{name}.all.allocated"]


@settings(max_examples=150)
@given(text=st.sampled_from(TEXTS), fraction=st.sampled_from([1.0, 0.5]), steps=STEPS)
def test_invariants(text: str, fraction: float, steps: list[tuple[str, int, int]]) -> None:
    program = Program(text, fraction)
    for step in steps:
        program.take(*step)
        check(program)
    program.finish()
    if (0, 1) in program.allocator._pools:
        while program.allocator.pool_use_count((0, 1)):
            program.allocator.release_pool((0, 1))
    program.allocator.empty_cache()
    check(program)
    assert program.reserved == 0
    assert program.allocator.snapshot() == []
