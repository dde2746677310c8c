import pytest

from tonnage.roofline.readers.names import short_kernel_name


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_NNT", "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_NNT"),
        ("void at::vectorized_elementwise_kernel<4, at::CUDAFunctorOnSelf_add<float>>(int, T2)", "elementwise add"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, 0>(int)", "layer_norm"),
        ("void at::<unnamed>::cunn_SoftMaxForwardReg<float, long, 4>(T3 *)", "cunn_SoftMaxForwardReg"),
        ("void reduce_kernel<512, 1, ReduceOp<float, func_wrapper_t<float, sum_functor<float>>>>(T3)", "reduce sum"),
        ("void k<4, at::native::AUnaryFunctor<float, binary_internal::MulFunctor<float>>>()", "k Mul"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(x)>()", "elementwise Gelu"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("kernel", "kernel"),
        ("", ""),
    ],
)
def test_short_names(name: str, short: str) -> None:
    assert short_kernel_name(name) == short
