"""What is taken for granted of values that nobody computed."""

import pytest
import torch

from tonnage.virtual.kernels.values import choose, choose_distinct, forget, is_known, put
from tonnage.virtual.modelled import ModelledSession as Session

pytestmark = pytest.mark.usefixtures("gpu")


def test_values_can_be_put_and_forgotten() -> None:
    x = torch.empty(3, 2, dtype=torch.int64, device="cuda").t()
    assert not is_known(x)
    assert put(x, torch.arange(6).reshape(2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert not is_known(forget(x))


def test_of_no_elements_everything_is_known() -> None:
    assert is_known(torch.empty(0, dtype=torch.int64, device="cuda"), torch.tensor([], device="cuda"))
    assert is_known(forget(torch.empty(0, device="cuda")))
    assert (torch.tensor([], dtype=torch.int64, device="cuda") > 0).sum().item() == 0


def test_what_is_made_up_is_stated(gpu: Session) -> None:
    choose(torch.empty(3, dtype=torch.int64, device="cuda"), 5, "somewhere")
    assert any(note.operator == "somewhere" for note in gpu.stand_ins.notes())


@pytest.mark.parametrize(("rows", "choices"), [(10, 8), (1000, 128_256)])
def test_choices_along_a_row_differ(rows: int, choices: int) -> None:
    x = torch.empty(rows, 5, dtype=torch.int64, device="cuda")
    chosen = choose_distinct(x, choices, 1, "topk").cpu()
    assert all(len(set(row)) == 5 and max(row) < choices for row in chosen.tolist())


def test_gradients_are_finite_to_the_scaler() -> None:
    weight = torch.rand(10, 10, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(3):
        scaler.scale((weight * 2).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 65536.0


def test_equality_of_what_nobody_knows() -> None:
    x = torch.rand(4, device="cuda")
    assert torch.equal(x, x)
    assert torch.equal(x, torch.rand(4, device="cuda"))
    assert not torch.equal(x, torch.rand(5, device="cuda"))


def test_ordinary_numbers_lie_between_huge_ones() -> None:
    x = torch.rand(4, device="cuda")
    assert (x > -1e9).tolist() == [True] * 4
    assert (torch.full((4,), 1e9, device="cuda") < x).tolist() == [False] * 4
    assert not is_known(x > 0.5)


def test_a_mask_of_ones_as_large_as_a_batch_of_sequences_is_known_to_be_all_ones() -> None:
    mask = torch.ones(16, 2048, device="cuda")
    assert bool(mask.sum() == mask.numel())
    mask[0, 0] = 0
    assert not bool(mask.to(torch.bool).all())
