"""What a typical step calls, captured from small models on the virtual GPU of a CPU build."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import torchvision_names  # noqa: F401
from tonnage.clock.captured import CapturedStep
from tonnage.explain import advice_for
from tonnage.hardware import find_gpu
from tonnage.recording import Note, Recording
from tonnage.report.runs.terminal import figures_of
from tonnage.script import capture, profiler
from tonnage.virtual.builds import new_session

torch = pytest.importorskip("torch")
if torch.version.cuda:
    pytest.skip("for the virtual GPU of a CPU build", allow_module_level=True)


def record(script: Callable[[], Any]) -> Recording:
    session = new_session(find_gpu("h200"), "2.11")
    session.open(capture=True)
    try:
        script()
    finally:
        session.close()
    return session.recording()


def captured(script: Callable[[], Any]) -> CapturedStep:
    recording = record(script)
    assert recording.captured is not None, recording.notes
    return recording.captured


def calls(step: CapturedStep, name: str) -> int:
    return sum(moment.call.name == name and moment.call.kind != "region" for moment in step.moments())


def train(*, steps: int = 3, accumulate: int = 1, **options: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for _ in range(steps):
        for _ in range(accumulate):
            model(torch.randn(32, 8, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_language_model_with_all_that_its_step_calls() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    def script() -> None:
        model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=1000, use_cache=False)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = torch.randint(0, 1000, (4, 32), device="cuda")
        for _ in range(3):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    step = captured(script)
    assert (step.number, step.training, step.samples, step.tokens) == (capture.STEPS, True, 4, 128)
    addmm = next(call for call in step.calls if call.name == "addmm" and call.types[0] == "c10::BFloat16")
    assert calls(step, "addmm") == 16  # four in each layer, and each within one that autocast caught
    assert [moment.call for moment in step.moments()].count(addmm) == 2
    assert addmm.shapes[:3] == ((192,), (128, 64), (64, 192))
    assert addmm.strides[:3] == ((1,), (64, 1), (192, 1))
    assert addmm.types[:3] == ("c10::BFloat16",) * 3
    assert addmm.devices[:3] == ("cuda",) * 3
    assert calls(step, "embedding_dense_backward") == 2
    phases = [m.phase for m in step.moments() if m.call.name == "mm" and m.call.types[0] == "c10::BFloat16"]
    assert phases.count("forward") == 1  # the logits
    assert phases.count("backward") == 18
    assert sum(moment.call.kind == "node" for moment in step.moments()) > 30
    assert step.optimizer_parameters == 28
    assert step.module_calls == 31  # twelve in each layer


def test_a_list_of_tensors_has_all_shapes_and_a_type() -> None:
    step = captured(lambda: train(foreach=True))
    root = next(call for call in step.calls if call.name == "_foreach_sqrt")
    assert root.shapes == (((16, 8), (16,), (4, 16), (4,)),)
    assert root.types == ("float[]",)


def test_the_first_step_is_kept_where_there_is_no_other() -> None:
    assert captured(lambda: train(steps=1)).number == 1
    assert captured(lambda: train(steps=2)).number == 2


def test_the_first_step_is_without_the_making_of_states_and_enough_where_it_is_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = captured(lambda: train(steps=1)), captured(lambda: train(steps=2))
    assert calls(first, "zeros_like") == calls(second, "zeros_like") == 0
    assert calls(first, "addmm") == calls(second, "addmm") == 2
    monkeypatch.setattr(capture, "_ENOUGH_THOUSANDS", 0)
    assert captured(lambda: train(steps=2)).number == 1


def test_what_a_checkpoint_recomputes_has_a_phase_of_its_own() -> None:
    def script() -> None:
        block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).cuda()
        head = torch.nn.Linear(8, 1).cuda()
        optimizer = torch.optim.SGD([*block.parameters(), *head.parameters()])
        for _ in range(2):
            hidden = torch.utils.checkpoint.checkpoint(block, torch.randn(4, 8, device="cuda"), use_reentrant=False)
            head(hidden).sum().backward()
            optimizer.step()

    step = captured(script)
    again = [moment.call.name for moment in step.moments() if moment.phase == "recompute"]
    assert "addmm" in again
    assert "relu" in again
    assert [phase for _, phase in step.phases].count("backward") == 2  # before it, and when its node goes on


def test_a_step_begins_where_the_one_before_it_ended() -> None:
    step = captured(train)
    moments = list(step.moments())
    assert moments[0].call.name.startswith("Optimizer.zero_grad")
    assert any(moment.call.name.startswith("Optimizer.step") for moment in moments)
    assert [phase for _, phase in step.phases][:3] == ["other", "forward", "backward"]


def test_gradients_that_are_accumulated_make_one_step() -> None:
    step = captured(lambda: train(accumulate=3))
    assert (step.samples, step.tokens) == (96, None)
    assert calls(step, "addmm") == 6
    assert step.module_calls == 12


def test_numbers_and_lists_are_words() -> None:
    def script() -> None:
        torch.nn.Conv2d(3, 8, 3, stride=2, padding=1).cuda()(torch.randn(2, 3, 16, 16, device="cuda"))

    step = captured(script)
    convolution = next(call for call in step.calls if call.name == "convolution")
    assert convolution.values[3:6] == ("[2, 2]", "[1, 1]", "[1, 1]")
    assert convolution.types[3:6] == ("ScalarList",) * 3


def test_without_an_optimizer_a_step_is_one_call_of_the_model() -> None:
    def script() -> None:
        model = torch.nn.Linear(8, 8).cuda()
        with torch.no_grad():
            for size in (64, 2, 3):
                model(torch.randn(size, 8, device="cuda")).argmax()

    step = captured(script)
    assert (step.training, step.samples) == (False, 2)
    assert calls(step, "addmm") == calls(step, "argmax") == 1


def test_an_evaluation_is_no_part_of_a_typical_step() -> None:
    def script() -> None:
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for step in range(4):
            model.train()
            model(torch.randn(4, 8, device="cuda")).sum().backward()
            optimizer.step()
            if step == 0:
                model.eval()
                with torch.no_grad():
                    model(torch.randn(64, 8, device="cuda"))

    step = captured(script)
    assert step.number == 3
    assert calls(step, "addmm") == 1


def test_optimizers_that_step_within_backward() -> None:
    def script() -> None:
        model = torch.nn.Linear(8, 8).cuda()
        optimizers = {p: torch.optim.SGD([p]) for p in model.parameters()}

        def update(parameter: Any) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for _ in range(3):
            model(torch.randn(4, 8, device="cuda")).sum().backward()

    step = captured(script)
    assert step.optimizer_parameters == 2
    assert calls(step, "addmm") == calls(step, "mm") == 1


def test_what_the_virtual_gpu_computes_for_itself_is_left_out() -> None:
    step = captured(train)
    devices = {device for call in step.calls for device in call.devices}
    assert "meta" not in devices
    assert not any(call.name.startswith("tonnage::") for call in step.calls)


def test_casts_have_no_shapes_and_their_copies_have() -> None:
    def script() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            train()

    step = captured(script)
    casts = [call for call in step.calls if call.name in ("to", "_to_copy") and call.on_card]
    assert casts and not any(call.shapes for call in casts)
    assert any(call.name == "copy_" and "c10::BFloat16" in call.types and call.shapes[0] for call in step.calls)


def test_a_shape_rule_that_is_a_program_of_its_own_is_left_out() -> None:
    def script() -> None:
        weight = torch.ones(6, 6, device="cuda", requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        model = torch.nn.Dropout(0.1)
        for _ in range(3):
            model(weight.roll(1, 0)).sum().backward()
            optimizer.step()

    step = captured(script)
    assert calls(step, "roll") == 2 and calls(step, "native_dropout_backward") == 1
    assert calls(step, "arange") == calls(step, "type_as") == 0


def test_a_script_that_profiles_itself_is_left_alone() -> None:
    seen: list[str] = []

    def script() -> None:
        with torch.profiler.profile() as profiler:
            train()
        seen.extend(event.key for event in profiler.key_averages())

    for before in (lambda: None, train):  # a profile of ours may be under way
        recording = record(lambda before=before: (before(), script()))
        assert "aten::addmm" in seen
        if before is not train:
            assert recording.captured is None
            assert Note("assumption", "profiler", 1, capture._NOTE) in recording.notes


def test_a_script_that_traces_itself_is_left_alone(tmp_path: Path) -> None:
    def script() -> None:
        torch.func.vmap(torch.sin)(torch.randn(4, 8, device="cuda"))
        observer = torch.profiler.ExecutionTraceObserver()
        observer.register_callback(str(tmp_path / "own.json"))
        observer.start()
        torch.func.vmap(torch.cos)(torch.randn(4, 8, device="cuda"))
        train()
        observer.stop()
        observer.unregister_callback()

    recording = record(script)
    assert recording.captured is None
    assert Note("assumption", "profiler", 1, capture._NOTE) in recording.notes
    assert '"aten::addmm"' in (tmp_path / "own.json").read_text()


def test_trouble_is_a_note_and_never_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("another version of torch")

    monkeypatch.setattr(profiler, "ProfilerResults", fail)
    recording = record(train)
    assert recording.captured is None
    assert "another version of torch" in recording.notes[0].text
    assert not torch._C._autograd._profiler_enabled()


def test_a_step_without_end_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_MOST_THOUSANDS", 0)
    recording = record(lambda: train(accumulate=80))
    assert recording.captured is None
    assert recording.notes == [Note("assumption", "profiler", 1, capture._TOO_LONG)]


def test_settings_of_the_step() -> None:
    step = captured(train)
    assert set(step.settings) == {"matmul_tf32", "cudnn_tf32", "cudnn_benchmark"}
    assert step.settings["cudnn_tf32"] == "True"


def prefetching(*, pinned: bool, aside: bool) -> Callable[[], None]:
    """A training whose next batch is copied while this one is trained on, on a stream of its own or not."""

    def script() -> None:
        host = torch.randn(64, 8)
        host = host.pin_memory() if pinned else host
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        side = torch.cuda.Stream() if aside else torch.cuda.current_stream()
        coming = host.to("cuda", non_blocking=True)
        for _ in range(4):
            torch.cuda.current_stream().wait_stream(side)
            batch = coming
            with torch.cuda.stream(side):
                coming = host.to("cuda", non_blocking=True)
            model(batch).sum().backward()
            optimizer.step()

    return script


def test_streams_and_events_are_noted() -> None:
    moments = captured(prefetching(pinned=True, aside=True)).moments()
    notes = [(moment.call.name, moment.call.values) for moment in moments if moment.call.kind == "stream"]
    assert notes == [
        ("record_event", ("1", "1")), ("wait_event", ("1", "0")), ("set_stream", ("1",)), ("set_stream", ("0",)),
    ]  # fmt: skip


@pytest.mark.parametrize(("pinned", "side"), [(True, "pinned"), (False, "cpu")])
def test_pinned_memory_is_told_apart(pinned: bool, side: str) -> None:
    step = captured(prefetching(pinned=pinned, aside=False))
    copy = next(call for call in step.calls if call.name == "copy_" and call.devices[1] != "cuda")
    assert copy.devices[:2] == ("cuda", side)
    assert copy.value(2) == "True"


def test_streams_are_as_they_were_when_the_profiler_is_done() -> None:
    before = torch.cuda.Event.record
    captured(train)
    assert torch.cuda.Event.record is before


def test_what_is_left_out_is_no_step() -> None:
    def script() -> None:
        from tonnage.virtual.session import active

        with active().uncaptured():
            train(steps=5)
        train(accumulate=2)

    assert captured(script).samples == 64


def test_backward_runs_on_the_stream_of_its_forward() -> None:
    def script() -> None:
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        side = torch.cuda.Stream()
        for _ in range(3):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = model(torch.randn(4, 8, device="cuda")).sum()
            loss.backward()
            optimizer.step()

    recording = record(script)
    assert recording.step_time is not None
    streams = {span.name: span.stream for span in recording.step_time.timeline.spans}
    assert (streams["addmm"], streams["mm"]) == (1, 1)
    assert streams["_foreach_add_"] == 0


def test_a_model_that_the_script_drops_is_not_kept() -> None:
    allocated = []

    def script() -> None:
        for _ in range(3):
            model = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
            model(torch.ones(1, 1024, device="cuda")).sum().backward()
            del model
            allocated.append(torch.cuda.memory_allocated())

    record(script)
    assert allocated[0] == allocated[-1] < 2**22 + 2**26, "no weight of 4 MiB is left beside cuBLAS's workspaces"


def test_a_model_that_is_traced_and_scripted_has_figures_that_json_takes() -> None:
    """While `torch.jit` traces, sizes of tensors are tensors; such calls are no part of a step."""

    def script() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).cuda()
        batch = torch.randn(32, 8, device="cuda")
        traced, scripted = torch.jit.trace(model, batch), torch.jit.script(model)
        optimizer = torch.optim.SGD(scripted.parameters(), lr=0.1)
        for _ in range(3):
            (traced(batch).sum() + scripted(batch).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()

    recording = record(script)
    assert recording.captured is not None and type(recording.captured.samples) is int
    figures = json.loads(json.dumps(figures_of([recording], [advice_for(recording)])))
    assert figures["samples_per_s"] * figures["step_time_s"] == pytest.approx(recording.captured.samples)


def test_sizes_that_are_symbols_are_not_counted() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(assume_static_by_default=False), allow_non_fake_inputs=True)
    symbolic = mode.from_tensor(torch.ones(6, 5))
    assert not isinstance(symbolic.shape[0], int)
    assert capture._batch((symbolic,), {}) == (None, None)
    assert capture._batch((torch.ones(6, 5),), {}) == (6, None)
    assert capture._batch((torch.ones(6, 5, dtype=torch.int64),), {}) == (6, 30)
