"""Operators whose arguments or results are out of the ordinary, as scripts use them on a real card."""

import torch


def check_unknown_tensors_are_compared() -> None:
    steps = torch.arange(6, device="cuda")
    lengths = torch.randint(0, 6, (6,), device="cuda")
    for compare in (torch.ge, torch.lt, torch.eq, torch.ne, torch.gt, torch.le):
        assert compare(steps, lengths).shape == compare(lengths, steps).shape == (6,)
    scores = torch.nn.Linear(4, 4, device="cuda")(torch.ones(3, 4, device="cuda"))
    assert (scores >= scores[:1]).shape == (3, 4)
    assert (scores.sum() > scores.mean()).dtype == torch.bool


def check_numbers_of_any_type() -> None:
    ones = torch.ones(3, device="cuda")
    assert (ones * 1j).dtype == (1j + ones).dtype == torch.complex64
    assert (ones.double() * 1j).dtype == torch.complex128
    assert (torch.ones(3, dtype=torch.complex64, device="cuda") * 2j).tolist() == [2j] * 3
    bytes_ = torch.zeros(2, dtype=torch.uint8, device="cuda")
    assert (bytes_ - 1).tolist() == [255, 255] and (bytes_ + 300).tolist() == [44, 44]


def check_sets() -> None:
    values, empty = torch.randn(5, device="cuda"), torch.empty(0, device="cuda")
    assert torch.isin(values, empty).tolist() == [False] * 5
    assert torch.isin(values, empty, invert=True).tolist() == [True] * 5
    assert torch.isin(torch.arange(3, device="cuda"), torch.tensor([1], device="cuda")).tolist() == [False, True, False]
    mask = torch.tensor([True, False, True], device="cuda")
    found, counts = mask.unique(return_counts=True)
    assert found.tolist() == [False, True] and counts.tolist() == [1, 2]
    assert torch.ones(3, dtype=torch.bool, device="cuda").unique().tolist() == [True]
    assert (torch.rand(8, device="cuda") > 0.5).unique().tolist() == [False, True]
    assert torch.tensor([2, 1, 2], device="cuda").unique_consecutive().tolist() == [2, 1, 2]
    assert torch.nn.Linear(2, 3, device="cuda")(torch.ones(5, 2, device="cuda")).unique_consecutive(dim=1).shape[0] == 5


def check_signals() -> None:
    window = torch.hann_window(8, device="cuda")
    spectrum = torch.stft(torch.randn(64, device="cuda"), 8, window=window, return_complex=True)
    assert torch.istft(spectrum, 8, window=window).shape == (64,)


def check_indefinite_matrices() -> None:
    for dtype in (torch.float32, torch.float64, torch.complex64):
        matrices = torch.randn(2, 4, 4, device="cuda", dtype=dtype)
        factor, pivots = torch.linalg.ldl_factor(matrices)
        assert factor.shape == (2, 4, 4) and pivots.shape == (2, 4)
        assert torch.linalg.ldl_solve(factor, pivots, matrices[..., :2]).shape == (2, 4, 2)


def check_backward_passes() -> None:
    number = torch.randn((), device="cuda", requires_grad=True)
    filling = torch.tensor(2.0, device="cuda", requires_grad=True)
    number.index_fill(0, torch.tensor([0], device="cuda"), filling).backward()
    assert number.grad is not None and filling.grad is not None
    _, vectors = torch.linalg.eig(torch.randn(3, 3, device="cuda", requires_grad=True))
    vectors.abs().sum().backward()
    torch.sort(torch.randn((), device="cuda").sin())
    torch.randn((), device="cuda", requires_grad=True).unfold(0, 1, 1).sum().backward()


def check_values_under_autocast() -> None:
    with torch.autocast("cuda", torch.float16):
        positions = torch.arange(4, device="cuda")
        assert positions.cumsum(0).tolist() == [0, 1, 3, 6]
        assert (positions != 0).sum().item() == 3
        assert torch.cat([positions, positions]).max().item() == 3


def check_values_that_are_written_over() -> None:
    ones = torch.ones(4, device="cuda")
    places = torch.tensor([0], device="cuda")
    # Read, they are placeholders, not the zeros that the kernel began with.
    assert torch.zeros(4, device="cuda").index_add_(0, places, ones[:1]).tolist() != [0.0] * 4
    zeros = torch.zeros(4, device="cuda")
    torch.lerp(ones, ones, 0.5, out=zeros)
    assert zeros.tolist() != [0.0] * 4
    counts = torch.zeros(4, dtype=torch.int64, device="cuda")
    counts.index_put_((torch.tensor([1, 1], device="cuda"),), torch.tensor(3, device="cuda"), accumulate=True)
    assert counts.tolist() == [0, 6, 0, 0]


def check_default_type_of_old_scripts() -> None:
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    try:
        values, labels = torch.randn(32, 8), torch.randint(0, 4, (32,))
        assert values.is_cuda and labels.is_cuda and torch.Tensor([1, 2]).is_cuda
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4))
        optimizer = torch.optim.Adam(model.parameters())
        data = torch.utils.data.TensorDataset(values, labels)
        order = torch.Generator(device="cuda")
        for batch, target in torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, generator=order):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch), target).backward()
            optimizer.step()
        assert values[values > 0].dim() == 1 and values.topk(2).indices.max().item() < 8
        assert torch.repeat_interleave(torch.tensor([1, 2])).tolist() == [0, 1, 1]
        assert torch.multinomial(torch.ones(5), 2).unique().numel() == 2
    finally:
        torch.set_default_tensor_type("torch.FloatTensor")


for name, check in list(globals().items()):
    if name.startswith("check_"):
        try:
            check()
            print(name, "holds")
        except Exception as error:
            print(name, "fails:", repr(error)[:200])
