import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.fit.moving.host import Packing
from tonnage.fit.stepping import host_step
from tonnage.fit.stepping.host_step import DeviceStep, pieces_of
from tonnage.fit.stepping.parameter_step import parameter_steps
from tonnage.fit.stepping.pieces import flat, flat_like

DTYPES = st.sampled_from([torch.int8, torch.bfloat16, torch.float32, torch.float64])


@given(st.lists(st.tuples(DTYPES, st.integers(0, 99)), max_size=5))
def test_packed_states_lie_apart_and_aligned(lengths: list[tuple[torch.dtype, int]]) -> None:
    layouts = ((f"state {index}", dtype, (count,), (1,)) for index, (dtype, count) in enumerate(lengths))
    packing = Packing.of(layouts, alignment=16)
    buffer = torch.zeros(packing.byte_count, dtype=torch.uint8)
    state = {
        f"state {index}": torch.full((count,), index + 1).to(dtype) for index, (dtype, count) in enumerate(lengths)
    }
    assert packing.store({**state, "step": 7}, buffer) == {"step": 7}
    views = packing.views(buffer)
    for name, value in state.items():
        assert torch.equal(views[name], value)
        assert packing.places[name].start % 16 == 0
    assert packing.tensor_bytes == sum(value.nbytes for value in state.values())


@given(count=st.integers(0, 5000), gpu_bytes=st.integers(0, 50_000), piece_bytes=st.integers(1, 20_000))
@settings(max_examples=60)
def test_pieces_hold_each_element_once_and_the_device_its_share(count: int, gpu_bytes: int, piece_bytes: int) -> None:
    parameter = torch.nn.Parameter(torch.zeros(count))
    optimizer = torch.optim.AdamW([parameter])
    steps = parameter_steps(optimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_step, "LEAST_ELEMENTS", 16)
        way = DeviceStep(
            steps.function, torch.device("cpu"), gpu_bytes=gpu_bytes, piece_bytes=piece_bytes, window_bytes=0
        )
        pieces = pieces_of(way.own_state(parameter, {}, optimizer.param_groups[0]))
    assert [0, *(piece.stop for piece in pieces)] == [*(piece.start for piece in pieces), count]
    here = sum(piece.packing.tensor_bytes for piece in pieces if piece.buffer is None)
    assert here == min(8 * count, gpu_bytes // 8 * 8)
    assert all(piece.stop - piece.start <= max(16, piece_bytes // 8) for piece in pieces if piece.buffer is not None)


def test_flat_follows_memory_and_gradients_follow_the_parameter() -> None:
    parameter = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    gradient = parameter.contiguous()
    assert flat(parameter).data_ptr() == parameter.data_ptr()
    assert torch.equal(flat_like(gradient, parameter), flat(parameter))
    assert flat(torch.tensor(2.0)).tolist() == [2.0]
