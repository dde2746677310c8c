"""What every byte is for: categories that sum to the peak, modules, phases, steps and the script's lines."""

from collections.abc import Iterator

import pytest

import tonnage
from tonnage.ledger import Category
from tonnage.recording import Recording


def train(steps: int = 2) -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(1024, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        batch = torch.randn(4096, 1024).to("cuda")
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def recording() -> Recording:
    with tonnage.virtual_gpu("h200", torch="2.11") as gpu:
        train()
        return gpu.recording


def test_categories_sum_to_the_peak(recording: Recording) -> None:
    assert recording.ledger().total_bytes == recording.peak_allocated_bytes


def test_parameters_and_states_are_counted_to_the_block(recording: Recording) -> None:
    ledger = recording.ledger()
    weights = 4 * (1024 * 2048 + 2048 * 512) + 4 * (2048 + 512)
    assert ledger[Category.PARAMETERS] == weights
    steps = 4 * 512  # four step counters on the host cost nothing on the device; states are two copies
    assert 2 * weights <= ledger[Category.OPTIMIZER_STATES] <= 2 * weights + steps
    assert ledger[Category.INPUTS] == 4 * 4096 * 1024
    assert ledger[Category.ACTIVATIONS] > 0


def test_what_a_model_is_given_by_name_is_an_input_too() -> None:
    with tonnage.virtual_gpu("h200", torch="2.11") as gpu:
        import torch

        class Scale(torch.nn.Module):
            def forward(self, *, batch: torch.Tensor) -> torch.Tensor:
                return 2 * batch

        Scale()(batch=torch.ones(1024, 1024, device="cuda"))
        ledger = gpu.recording.ledger()
    assert ledger[Category.INPUTS] == 4 * 1024 * 1024
    assert ledger[Category.OTHER] == 0


def test_modules_phases_and_steps(recording: Recording) -> None:
    hidden = [a for a in recording.allocations if a.shape == (4096, 2048) and a.phase == "forward"]
    assert {a.module for a in hidden} == {"0", "1"}
    assert {a.step for a in hidden} == {1, 2}
    backward = [a for a in recording.allocations if a.phase == "backward" and a.shape == (2048, 1024)]
    assert {a.module for a in backward} == {"0"}
    assert {a.category for a in backward} == {Category.GRADIENTS}


def test_lines_are_the_scripts_own(recording: Recording) -> None:
    assert {a.line.split(":")[0] for a in recording.allocations} == {"test_attribution.py"}


def test_a_second_virtual_gpu_starts_empty() -> None:
    for _ in range(2):
        with tonnage.virtual_gpu("rtx-4090") as gpu:
            import torch

            assert gpu.allocated_bytes == 0
            kept = torch.empty(1 << 20, device="cuda")
            assert gpu.allocated_bytes == 4 << 20
            assert torch.cuda.get_device_name() == "NVIDIA GeForce RTX 4090"
            assert kept.is_cuda


def test_outside_the_block_there_is_no_gpu() -> None:
    import torch

    with tonnage.virtual_gpu("h200"):
        assert torch.cuda.is_available()
    assert not torch.cuda.is_available()


def test_out_of_memory_is_pytorchs_own_error() -> None:
    import torch

    with tonnage.virtual_gpu("rtx-4090"), pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 40\.00 GiB"):
        torch.empty(10 << 30, device="cuda")


def test_gradients_of_single_samples_run_through_torch_func() -> None:
    with tonnage.virtual_gpu("h200", torch="2.11") as gpu:
        import torch
        from torch.func import functional_call, grad, vmap

        model = torch.nn.Linear(256, 256).cuda()
        parameters = {name: value.detach() for name, value in model.named_parameters()}

        def loss(values: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
            return functional_call(model, values, (sample,)).square().mean()

        gradients = vmap(grad(loss), (None, 0))(parameters, torch.ones(16, 256, device="cuda"))
        assert gradients["weight"].shape == (16, 256, 256)
        assert gpu.recording.peak_allocated_bytes > 4 * 16 * 256 * 256


def test_a_subclass_that_wraps_tensors_is_told_by_what_it_wraps() -> None:
    import torch
    from torch.utils._pytree import tree_map

    class Wrapped(torch.Tensor):
        """As quantised weights are written: a shape without bytes, around a tensor that has them."""

        inner: torch.Tensor

        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> "Wrapped":
            made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
            made.inner = inner
            return made

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["inner"], None

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            def bare(value: object) -> object:
                return value.inner if isinstance(value, Wrapped) else value

            result = function(*tree_map(bare, args), **tree_map(bare, kwargs or {}))
            keeps = function in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default)
            return Wrapped(result) if keeps else result

    with tonnage.virtual_gpu("h200", torch="2.11") as gpu:
        model = torch.nn.Linear(256, 256, bias=False)
        model.weight = torch.nn.Parameter(Wrapped(torch.randn(256, 256, device="cuda")), requires_grad=False)
        model = model.cuda()
        model(torch.randn(8, 256, device="cuda"))
        kept = [a for a in gpu.recording.allocations if a.category is Category.PARAMETERS]
    assert [a.requested_bytes for a in kept] == [256 * 256 * 4]


def test_validation_is_no_step_of_a_training() -> None:
    import torch

    with tonnage.virtual_gpu("h200", torch="2.11") as gpu:
        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model.eval()
            with torch.no_grad():
                for _ in range(4):
                    model(torch.ones(8, 64, device="cuda"))
            model.train()
            model(torch.ones(8, 64, device="cuda")).sum().backward()
            optimizer.step()
        recording = gpu.recording
    assert [step.step for step in recording.steps if step.step] == [1, 2, 3]
    assert "evaluation" in [phase.name for phase in recording.phases]


def test_a_step_with_a_closure_ends_in_the_optimizer() -> None:
    import torch

    with tonnage.virtual_gpu("h200", torch="2.11") as gpu:
        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.AdamW(model.parameters())

        def closure() -> float:
            model(torch.ones(8, 64, device="cuda")).sum().backward()
            return 0.0

        optimizer.step(closure)
        recording = gpu.recording
    states = [a for a in recording.allocations if a.category is Category.OPTIMIZER_STATES]
    assert {a.phase for a in states} == {"optimizer"}


def test_a_lazy_module_moves_before_it_knows_its_size() -> None:
    import torch

    with tonnage.virtual_gpu("h200", torch="2.11") as gpu:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LazyLinear(8)).cuda()
        model(torch.zeros(4, 64, device="cuda"))
        assert gpu.recording.ledger()[Category.PARAMETERS] >= 4 * 64 * 64


def test_the_parts_of_a_training_are_known_by_name(recording: Recording) -> None:
    assert recording.header.training == {"optimizers": "torch.optim.AdamW", "stepping": "1"}


class Marks:
    """Takes the phases and steps of a script."""

    held_line = ""

    def __init__(self) -> None:
        self.names: list[str] = []

    def mark(self, kind: str, name: str) -> None:
        self.names.append(f"step {name}" if kind == "step" else name)

    def at_module(self, context: int) -> None: ...

    def categorise(self, category: Category, addresses: list[int], only: Category | None) -> None: ...


@pytest.fixture
def marks() -> Iterator[Marks]:
    from tonnage.script.attribution import Attribution
    from tonnage.script.hooks import install_hooks

    sink = Marks()
    remove = install_hooks(Attribution(sink))
    yield sink
    remove()


STEP = ["forward", "backward", "other", "optimizer", "other"]


def test_a_compiled_function_is_what_a_step_begins_with(marks: Marks) -> None:
    import torch

    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return net(x).square().mean()  # type: ignore[no-any-return]

    for _ in range(2):
        loss_of(torch.ones(2, 8)).backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        loss_of(torch.ones(2, 8))
    assert marks.names == ["step 1", *STEP, "step 2", *STEP, "evaluation"]


def test_steps_within_a_compiled_function_are_counted(marks: Marks) -> None:
    import torch

    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def train(batches: list[torch.Tensor]) -> None:
        for x in batches:
            net(x).square().mean().backward()
            optimizer.step()

    train([torch.ones(2, 8) for _ in range(3)])
    assert [name for name in marks.names if name.startswith("step")] == ["step 1", "step 2", "step 3"]


def test_a_compiled_function_that_an_optimizer_calls_is_part_of_its_step(marks: Marks) -> None:
    import torch

    parameter = torch.nn.Parameter(torch.ones(4, 4))

    @torch.compile(backend="eager")
    def orthogonalised(update: torch.Tensor) -> torch.Tensor:
        return update @ update.T

    class Muon(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            for group in self.param_groups:
                for trained in group["params"]:
                    trained.sub_(orthogonalised(trained.grad))

    optimizer = Muon([parameter], {})
    parameter.square().sum().backward()
    optimizer.step()
    assert marks.names == ["backward", "other", "optimizer", "other"]


def test_a_compiled_function_without_gradients_is_one_step_of_inference(marks: Marks) -> None:
    import torch

    net = torch.nn.Linear(8, 8)

    @torch.compile(backend="eager")
    def decode(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()  # behind it the module calls its hooks
        return net(x)  # type: ignore[no-any-return]

    with torch.no_grad():
        for _ in range(2):
            decode(torch.ones(2, 8))
    assert [name for name in marks.names if name.startswith("step")] == ["step 1", "step 2"]


def test_modules_of_a_function_are_found_where_it_may_have_them() -> None:
    import torch

    from tonnage.script.attribution import modules_within

    closed_over, given, owned = (torch.nn.Linear(2, 2) for _ in range(3))

    class Trainer:
        def __init__(self) -> None:
            self.model = owned

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return inner(self.model(x))

    def inner(x: torch.Tensor) -> torch.Tensor:
        return closed_over(x)  # type: ignore[no-any-return]

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x)

    assert modules_within(outer, [given]) == [given, closed_over]
    assert modules_within(Trainer().step, []) == [owned, closed_over]
    assert modules_within(len, []) == []
