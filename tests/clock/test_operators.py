import pytest

from tonnage.clock.kernels import launch_of
from tonnage.clock.launch import Settings
from tonnage.clock.operators import OperatorCall, shapeless, silent, work_of

BF16, FP32 = "c10::BFloat16", "float"


def call(name: str, *arguments: tuple, kernels: tuple[str, ...] = ()) -> OperatorCall:
    """Arguments as (shape, type), (shape, type, strides) or a text."""
    tensors = [argument if isinstance(argument, tuple) else ((), "Scalar") for argument in arguments]
    values = [argument if isinstance(argument, str) else "" for argument in arguments]
    return OperatorCall(
        name=name,
        shapes=tuple(tensor[0] for tensor in tensors),
        strides=tuple(tensor[2] if len(tensor) > 2 else () for tensor in tensors),
        types=tuple(tensor[1] for tensor in tensors),
        values=tuple(values),
        kernels=kernels,
    )


def test_a_product() -> None:
    work = work_of(call("mm", ((8, 16), BF16), ((16, 4), BF16)))
    assert work.operations == 2 * 8 * 16 * 4
    assert work.moved_bytes == 2 * (8 * 16 + 16 * 4 + 8 * 4)
    assert work.precision == "bf16"


def test_a_product_with_a_bias_and_one_of_batches() -> None:
    biased = work_of(call("addmm", ((4,), BF16), ((8, 16), BF16), ((16, 4), BF16)))
    assert biased.operations == 2 * 8 * 16 * 4 and biased.moved_bytes == 2 * (4 + 8 * 16 + 16 * 4 + 8 * 4)
    batched = work_of(call("bmm", ((3, 8, 16), FP32), ((3, 16, 4), FP32)))
    assert batched.operations == 3 * 2 * 8 * 16 * 4 and batched.precision == "fp32"
    assert work_of(call("mv", ((8, 16), FP32), ((16,), FP32))).operations == 2 * 8 * 16


def test_a_product_of_bytes_has_a_wider_result() -> None:
    fp8 = "c10::Float8_e4m3fn"
    work = work_of(call("_scaled_mm", ((8, 16), fp8), ((16, 4), fp8)))
    assert work.moved_bytes == 8 * 16 + 16 * 4 + 2 * 8 * 4 and work.precision == "fp8"


def test_tf32_where_the_kernel_says_so() -> None:
    shapes = (((8, 16), FP32), ((16, 4), FP32))
    assert work_of(call("mm", *shapes, kernels=("cutlass_80_tensorop_tf32_s1688gemm",))).precision == "tf32"
    assert work_of(call("mm", *shapes, kernels=("ampere_sgemm_128x64_nn",))).precision == "fp32"


def attention(causal: str) -> OperatorCall:
    qkv = [((2, 4, 128, 64), BF16)] * 3
    none = [((), "")] * 3
    return call("_cudnn_attention_forward", *qkv, *none, "128", "128", "True", "0.", causal, "False", ((), ""))


def test_attention_counts_the_pairs_that_a_mask_leaves() -> None:
    full, causal = work_of(attention("False")), work_of(attention("True"))
    assert full.operations == 2 * 2 * 2 * 4 * 128 * 128 * 64
    assert causal.operations == full.operations * 129 / 256
    assert full.moved_bytes == causal.moved_bytes == 4 * 2 * 4 * 128 * 64 * 2


def test_packed_sequences_are_not_guessed() -> None:
    packed = call("_flash_attention_forward", *[((1024, 4, 64), BF16)] * 3, ((9,), "int"), ((9,), "int"), *["0"] * 5)
    assert work_of(packed) is None


def test_a_convolution_forward_and_backward() -> None:
    image, weight = ((2, 3, 32, 32), FP32), ((8, 3, 3, 3), FP32)
    forward = work_of(call("cudnn_convolution", image, weight, "[1, 1]", "[2, 2]", "[1, 1]", "1"))
    assert forward.operations == 2 * (2 * 8 * 16 * 16) * 3 * 9
    arguments = (((2, 8, 16, 16), FP32), image, weight, "[8]", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1")
    both = work_of(call("convolution_backward", *arguments, "[True, True, False]"))
    assert both.operations == 2 * forward.operations
    assert work_of(call("convolution_backward", *arguments, "[False, True, False]")).operations == forward.operations


@pytest.mark.parametrize(
    ("asked", "moved"),
    [
        (call("add", ((8, 16), FP32), ((16,), FP32), "1"), 4 * (128 + 16 + 128)),
        (call("add", ((8, 16), FP32), ((8, 16), BF16), "1"), 4 * 128 + 2 * 128 + 4 * 128),
        (call("add_", ((8, 16), BF16), ((8, 16), FP32), "1"), 2 * 128 + 4 * 128 + 2 * 128),
        (call("mul", ((8, 16), FP32), ((), "double")), 4 * 256),
        (call("add", ((8, 16), FP32, (16, 1)), ((8, 16), FP32, (0, 1)), "1"), 4 * (128 + 16 + 128)),
        (call("lt", ((8, 16), FP32), ((8, 16), FP32)), 4 * 256 + 128),
        (call("copy_", ((8, 16), BF16), ((8, 16), FP32), "False"), 6 * 128),
        (call("fill_", ((8, 16), FP32), "0"), 4 * 128),
        (call("sum", ((8, 16), FP32), "[0]", "True", ((), "")), 4 * (128 + 16)),
        (call("sum", ((8, 16), FP32), ((), "")), 4 * 129),
        (call("_softmax", ((8, 16), BF16), "1", "False"), 2 * 256),
        (call("_log_softmax", ((8, 16), BF16), "1", "True"), 6 * 128),
        (call("embedding", ((100, 16), FP32), ((8,), "long int")), 8 * 8 + 2 * 8 * 16 * 4),
        (call("embedding_dense_backward", ((8, 16), FP32), ((8,), "long int"), "100"), 4 * 128 + 64 + 100 * 16 * 4),
        (call("cat", (((8, 16), (4, 16)), "TensorList"), "0", kernels=("Cat<OpaqueType<2u>>",)), 2 * 2 * 12 * 16),
        (call("_fused_adamw_", (((8, 16), (4,)), "TensorList"), kernels=("M<AdamFunctor<float, 4>>",)), 7 * 4 * 132),
    ],
)
def test_bytes_that_must_move(asked: OperatorCall, moved: int) -> None:
    assert work_of(asked).moved_bytes == moved


@pytest.mark.parametrize(
    "asked",
    [
        call("no_such_operator", ((8, 16), FP32)),
        OperatorCall(name="mm"),
        call("mm", ((8, 16), FP32), ((3, 4), FP32)),
        call("mm", ((8, 16), FP32)),
        call("cat", (((8, 16),), "TensorList"), "0"),
        call("_fused_adamw_", ((), "TensorList"), kernels=("M<AdamFunctor<float, 4>>",)),
        call("cudnn_convolution", ((2, 3, 32, 32), FP32), ((8, 3, 3, 3), FP32), "", "", "", ""),
        call("add", ((8, 16), "a type of tomorrow")),
    ],
    ids=lambda asked: asked.name,
)
def test_what_is_not_said_is_not_guessed(asked: OperatorCall) -> None:
    assert work_of(asked) is None


def test_no_launch_depends_on_the_shapes_of_those_that_have_none() -> None:
    assert {"view", "to", "_to_copy"} <= shapeless() <= silent()
    settings = Settings(tf32_matmul=False, tf32_convolution=True)
    shapes = ((4, 8), (4, 8))
    for name in shapeless():
        assert launch_of(OperatorCall(name=name, shapes=shapes, types=("float", "float")), settings) is None, name
