"""Reductions on the host, against the same values one by one."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from tonnage.virtual.cluster.groups import reduced

parts = st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=5)


@given(parts)
def test_each_kind_of_reduction(values: list[list[int]]) -> None:
    tensors = [torch.tensor(each) for each in values]
    columns = list(zip(*values, strict=True))
    assert reduced(tensors, ReduceOp.SUM).tolist() == [sum(column) for column in columns]
    assert reduced(tensors, ReduceOp.MIN).tolist() == [min(column) for column in columns]
    assert reduced(tensors, ReduceOp.MAX).tolist() == [max(column) for column in columns]
    average = reduced([tensor.double() for tensor in tensors], ReduceOp.AVG)
    assert torch.allclose(average, torch.tensor(columns).double().mean(1))
