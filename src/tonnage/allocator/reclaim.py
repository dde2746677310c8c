"""Which cached segments go back to the device before everything does.

Two policies, each off unless a setting asks for it: garbage collection by age, and the release of blocks above
`max_split_size_mb`, which nothing smaller can ever use.
"""

from tonnage.allocator.blocks import BlockPool
from tonnage.allocator.segments import Segments
from tonnage.allocator.settings import SIZE_MAX


def collect_garbage(segments: Segments, pool: BlockPool, excess_bytes: int) -> None:
    """Give back whole free segments of at least average age, round by round, until the excess is gone."""
    ages = {block: pool.searches - block.gc_base for block in pool.all_free() if not block.is_split}
    progressed = True
    while excess_bytes > 0 and progressed and ages:
        average = sum(ages.values()) / len(ages)
        old = [block for block, age in ages.items() if age >= average and block.segment is None]
        progressed = bool(old)
        for block in old:
            excess_bytes -= block.size
            del ages[block]
            segments.release(block)


def release_oversize(segments: Segments, pool: BlockPool, size: int, stream: int) -> bool:
    """Give back one block above the split limit that is large enough, or several from the largest down."""
    limit, free = segments.settings.max_split_bytes, pool.free.get(stream)
    if limit == SIZE_MAX or free is None:
        return False
    wanted = max(size, limit)
    index = free.first_of(wanted)
    if index < len(free.blocks) and free.blocks[index].segment is None:
        segments.release(free.blocks[index])
        return True
    released = 0
    for block in free.blocks[:index][::-1]:
        if released >= wanted or block.size < limit:
            break
        if block.segment is None:
            released += block.size
            segments.release(block)
    return released >= wanted
