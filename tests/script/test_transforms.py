"""Calls within torch.func's transforms: traced as the profiler would have told them, and holding no memory."""

import gc
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tonnage.clock.captured import CapturedStep
from tonnage.hardware import find_gpu
from tonnage.script import profiler, transforms
from tonnage.virtual.builds import new_session

torch = pytest.importorskip("torch")
if torch.version.cuda:
    pytest.skip("for the virtual GPU of a CPU build", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def devices() -> None:
    """Register the virtual GPU: autograd's engine learns of devices at the first backward pass of a process."""
    session = new_session(find_gpu("h200"), "2.11")
    session.open()
    session.close()


def calls(step: CapturedStep) -> list[tuple[Any, ...]]:
    return [(m.depth, m.thread, m.call.name, m.call.shapes, m.call.strides, m.call.types, m.call.values, m.call.devices)
            for m in step.moments()]  # fmt: skip


def names(step: CapturedStep) -> list[str]:
    return [moment.call.name for moment in step.moments()]


@contextmanager
def within_a_transform() -> Iterator[None]:
    """Have the calls traced as within a transform, though there is none."""
    (trace,) = profiler._transforms
    trace._level += 1
    trace._follow()
    assert trace._traces
    yield
    trace._level -= 1
    trace._follow()


def compare(run: Callable[[], Any]) -> CapturedStep:
    """Require the trace to tell what the profiler tells."""

    def traced() -> None:
        with within_a_transform():
            run()

    plain, other = profiler.calls_of(run), profiler.calls_of(traced)
    assert calls(plain) == calls(other)
    return other


def test_a_language_model_is_traced_as_it_is_profiled() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=100)
    )
    ids, mask = torch.randint(0, 100, (2, 8)), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        model.zero_grad()

    step = compare(run)
    assert {"mm", "_scaled_dot_product_flash_attention_for_cpu", "MmBackward0"} <= set(names(step))


def test_arguments_of_all_kinds() -> None:
    values, flags = torch.randn(4), torch.tensor([True, False, True, False])

    def run() -> None:
        values.masked_fill(flags, float("-inf")).clamp(max=1.5)
        torch.cat([values, values.double()])
        torch.stack([values, values])
        values.reshape(2, 2).T.sum(dim=(0, 1), keepdim=True)
        values[flags].to(torch.float16)
        torch.nn.functional.layer_norm(values, (4,), eps=0.5)

    compare(run)


def test_an_operator_that_raises_an_error_leaves_the_others_in_their_place() -> None:
    values = torch.randn(4)

    def run() -> None:
        for _ in range(3):
            with pytest.raises(RuntimeError):
                values.reshape(3)
            values.softmax(-1)

    def traced() -> None:
        with within_a_transform():
            run()

    plain, other = (calls(profiler.calls_of(way)) for way in (run, traced))
    assert other == [call for call in plain if call[2] not in ("reshape", "view")]  # the trace leaves out what failed
    assert [call[2] for call in other] == ["softmax", "_softmax"] * 3


def test_calls_of_other_threads_are_left_out() -> None:
    values = torch.randn(4)

    def run() -> None:
        other = threading.Thread(target=values.exp)
        with within_a_transform():
            other.start()
            other.join()
            values.sin()

    assert names(profiler.calls_of(run)) == ["sin"]


def test_notes_and_calls_keep_their_order() -> None:
    values = torch.randn(3, 4)

    def each(row: Any) -> Any:
        row = row.sin()
        profiler.note("stream", "set_stream", 35)
        return row.cos()

    step = profiler.calls_of(lambda: (values.exp(), torch.func.vmap(each)(values), values.log()))
    found = [name for name in names(step) if name in ("exp", "sin", "set_stream", "cos", "log")]
    assert found[0] == "exp" and found[-1] == "log"
    at = found.index("set_stream")
    assert set(found[1:at]) == {"sin"} and set(found[at + 1 : -1]) == {"cos"}


@pytest.mark.parametrize(
    ("way", "inner"),
    [
        (lambda f, x: torch.func.vmap(f)(x), "sin"),
        (lambda f, x: torch.func.grad(lambda x: f(x).sum())(x), "cos"),
        (lambda f, x: torch.func.jvp(f, (x,), (x,)), "cos"),
        (lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x), "cos"),
        (lambda f, x: torch.func.functionalize(f)(x), "sin"),
        (lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True), "cos"),
    ],
    ids=["vmap", "grad", "jvp", "hessian", "functionalize", "jacobian"],
)
def test_every_transform_is_traced(way: Callable[..., Any], inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []
    switch = transforms.TransformTrace._trace
    monkeypatch.setattr(transforms.TransformTrace, "_trace", lambda trace: (traced.append(1), switch(trace)))
    step = profiler.calls_of(lambda: (way(torch.sin, torch.randn(4)), torch.exp(torch.zeros(2))))
    assert traced and inner in names(step) and names(step)[-1] == "exp"


def test_nothing_is_left_and_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plain = torch._functorch.vmap._vmap_increment_nesting

    def run() -> None:
        assert torch._functorch.vmap._vmap_increment_nesting is not plain
        torch.func.vmap(torch.sin)(torch.randn(2, 3))
        assert list(tmp_path.iterdir())

    profiler.calls_of(run)
    assert not list(tmp_path.iterdir())
    assert torch._functorch.vmap._vmap_increment_nesting is plain
    assert "race" not in capfd.readouterr().err


def test_without_room_for_a_file_the_profiler_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert "sin" in names(profiler.calls_of(lambda: torch.func.vmap(torch.sin)(torch.randn(2, 3))))


def test_a_capture_may_begin_and_end_within_a_transform() -> None:
    steps: list[CapturedStep] = []

    def each(row: Any) -> Any:
        steps.append(profiler.calls_of(row.sin))
        return row.cos()

    torch.func.vmap(each)(torch.randn(2, 3))
    assert set(names(steps[0])) == {"sin"}
    assert not profiler.is_on()


def test_what_is_captured_needs_no_memory() -> None:
    """Gradients of each sample: under the profiler alone, the wrappers kept all that they had held."""

    def peak(*, capture: bool) -> int:
        session = new_session(find_gpu("h200"), "2.11")
        session.open(capture=capture)
        gc.disable()
        try:
            model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))).cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            rows = torch.randn(4096, 1, 256, device="cuda")

            def loss(parameters: Any) -> Any:
                return torch.func.vmap(lambda row: torch.func.functional_call(model, parameters, (row,)))(rows).sum()

            for _ in range(3):
                gc.collect()  # transforms leave cycles behind
                parameters = {name: value.detach() for name, value in model.named_parameters()}
                gradients = torch.func.grad(loss)(parameters)
                for name, value in model.named_parameters():
                    value.grad = gradients[name]
                del gradients
                optimizer.step()
                optimizer.zero_grad()
        finally:
            gc.enable()
            session.close()
        recording = session.recording()
        assert (recording.captured is not None) is capture, recording.notes
        return int(recording.peak_allocated_bytes)

    assert peak(capture=True) == peak(capture=False)
