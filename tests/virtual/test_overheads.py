"""What a process holds beside the allocator, by version of torch."""

from tonnage.hardware import find_cuda_gpu
from tonnage.virtual.overheads import Overheads


def test_all_kernels_are_loaded_at_once_before_1_13() -> None:
    gpu = find_cuda_gpu("rtx-3090")
    old, new = Overheads(gpu, (1, 12)), Overheads(gpu, (1, 13))
    for overheads in (old, new):
        assert overheads.use("kernels")
        assert not overheads.use("kernels"), "once"
    assert old.total_bytes == (1644 - 158) << 20, "pytorch/pytorch#49877"
    assert new.total_bytes < old.total_bytes / 2
