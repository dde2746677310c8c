"""What the host takes: by phase, by kind of launch, and for what torch.compile and checkpoints add."""

from typing import Any

from pytest import approx

from tonnage.clock.captured import CallInStep, CapturedCall
from tonnage.clock.host import host_costs, kernel_floor_s
from tonnage.clock.launch import Launch

COSTS = host_costs()


def moment(name: str = "mul", *, kind: Any = "operator", phase: str = "forward", thread: int = 0) -> CallInStep:
    return CallInStep(CapturedCall(name=name, kind=kind), 0, phase, thread, None, is_inner=False)


def launch(kind: str, kernels: int = 1) -> Launch:
    return Launch(kind=kind, name=kind, shape=(), precision="bf16", moved_bytes=0.0, operations=0.0, kernels=kernels)


def test_python_calls_an_operator_of_the_forward_pass_and_the_engine_those_of_the_backward() -> None:
    assert COSTS.call_s(moment()) > COSTS.call_s(moment(phase="backward", thread=1))


def test_what_is_recomputed_costs_what_a_forward_does_and_its_hooks_on_top() -> None:
    again = moment(phase="recompute", thread=1)
    assert COSTS.call_s(again) == COSTS.call_s(moment())
    assert COSTS.launch_s(again, launch("norm")) == COSTS.launch_s(moment(), launch("norm"))
    assert COSTS.call_s(moment("detach", kind="region", phase="recompute", thread=1)) > COSTS.call_s(again)
    assert COSTS.call_s(moment("detach", kind="region", phase="backward", thread=1)) == 0


def test_libraries_choose_their_kernels_before_they_launch_them() -> None:
    backward = moment(phase="backward", thread=1)
    plain = COSTS.launch_s(backward, launch("elementwise"))
    assert COSTS.launch_s(backward, launch("convolution")) > COSTS.launch_s(backward, launch("matmul")) > plain


def test_further_kernels_of_an_operator_cost_the_drivers_call_alone() -> None:
    one, many = (COSTS.launch_s(moment(), launch("indexing", kernels)) for kernels in (1, 26))
    assert many - one == approx(25 * COSTS.forward.further_kernel)
    assert COSTS.forward.further_kernel < COSTS.forward.launch


def test_compiled_code_costs_a_region_and_each_of_its_kernels() -> None:
    assert COSTS.call_s(moment("Torch-Compiled Region: 0/0", kind="region")) == COSTS.compiled_region > 0
    assert COSTS.call_s(moment("CompiledFunctionBackward", kind="node", thread=1)) == COSTS.compiled_region
    assert COSTS.call_s(moment("MulBackward0", kind="node", thread=1)) == 0
    within = moment("mm", phase="backward", thread=1)._replace(is_compiled=True)
    assert COSTS.launch_s(within, launch("matmul")) < COSTS.launch_s(
        within._replace(is_compiled=False), launch("matmul")
    )
    assert COSTS.launch_s(moment("triton_poi_fused", kind="kernel"), launch("elementwise")) == COSTS.triton_kernel


def test_an_optimizer_looks_at_every_parameter() -> None:
    assert COSTS.optimizer_s(100) - COSTS.optimizer_s(0) == approx(100 * COSTS.optimizer_parameter)


def test_a_kernel_takes_a_few_microseconds_at_least() -> None:
    assert 5e-7 < kernel_floor_s() < 5e-6
