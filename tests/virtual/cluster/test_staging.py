"""What backends take from the allocator of a virtual card."""

import pytest

from tonnage.virtual.cluster.staging import Gloo, Nccl, staging_of
from tonnage.virtual.modelled import ModelledSession as Session


@pytest.mark.parametrize(
    ("backend", "staging"),
    [("nccl", Nccl), ("cpu:gloo,cuda:nccl", Nccl), ("cuda:gloo,cpu:gloo", Gloo), ("gloo", Gloo), ("undefined", Nccl)],
)
def test_cuda_tensors_go_through_the_backend_that_is_named_for_them(backend: str, staging: type[Nccl]) -> None:
    assert staging_of(backend) is staging


def test_gloo_gathers_into_a_tensor_of_its_own_and_nccl_does_not(gpu: Session) -> None:
    import torch

    output = torch.empty(2**20, device="cuda")
    before = torch.cuda.memory_allocated()
    held = staging_of("gloo").gathers_single(output), staging_of("nccl").gathers_single(output)
    assert torch.cuda.memory_allocated() - before == 2**22
    assert held[1] is None


def test_lists_are_flattened_where_their_tensors_are_alike(gpu: Session) -> None:
    import torch

    alike = [torch.empty(4, device="cuda") for _ in range(3)]
    assert staging_of("nccl").flattens(alike).shape == (3, 4)
    assert staging_of("nccl").flattens([*alike, torch.empty(5, device="cuda")]) is None
