# SPDX-License-Identifier: Apache-2.0
"""Names of kernels as torch 2.11 and its libraries gave them on one H200, and what they are shown as."""

from __future__ import annotations

import pytest

from lora_suite.report.kernel_names import short

_GROUPED = (
    "_ZN7cutlass13device_kernelIN2at4cuda6detail25enable_3x_kernel_for_sm9xINS_4gemm6kernel13GemmUniversalI"
    "NS5_17GroupProblemShapeIN4cute5tupleIJiiiEEEEENS5_10collective13CollectiveMmaINS5_39MainloopSm90Array"
    "TmaGmmaWarpSpecializedILi4ENSA_IJNS9_1CILi2EEENSG_ILi1EEESI_EEE{schedule}EEENSA_IJ{tile}EEENS_10bfloat"
    "16_tEPNSA_IJSI_lNSG_ILi0EEEEEESQ_ST_NS9_8TiledMMAINS9_8MMA_AtomIJNS9_4SM904GMMA28MMA_64x256x16_F32BF16"
    "BF16_SSILNSX_5MajorE{a}ELSZ_{b}ELNSX_7ScaleInE1ELS10_1EEEEEENS9_6LayoutISJ_NSA_IJSI_SR_SR_EEEEE"
)
_COOPERATIVE = "NS5_43KernelPtrArrayTmaWarpSpecializedCooperative"
_PINGPONG = "NS5_40KernelPtrArrayTmaWarpSpecializedPingpong"


_NAMES = [
    (
        _GROUPED.format(schedule=_COOPERATIVE, tile="NSG_ILi128EEENSG_ILi256EEENSG_ILi64EEE", a=1, b=1),
        "cutlass grouped gemm 128x256 nt bf16",
    ),
    (
        _GROUPED.format(schedule=_PINGPONG, tile="NSG_ILi64EEENSG_ILi128EEESN_", a=0, b=1),
        "cutlass grouped gemm 64x128 tt bf16",
    ),
    (
        _GROUPED.format(schedule=_PINGPONG, tile="NSG_ILi128EEESM_NSG_ILi64EEE", a=0, b=0),
        "cutlass grouped gemm 128x128 tn bf16",
    ),
    (
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>, "
        "cutlass::gemm::collective::CollectiveMma<cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<4, "
        "cute::tuple<cute::C<2>, cute::C<1>, cute::C<1> >, cutlass::gemm::KernelTmaWarpSpecializedPingpong>,"
        " cute::tuple<cute::C<64>, cute::C<128>, cute::C<64> >, cutlass::half_t, long> > >(int)",
        "cutlass gemm 64x128 fp16",
    ),
    (
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x4_nn_align8>"
        "(cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x4_nn_align8::Params)",
        "cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x4_nn_align8",
    ),
    (
        "void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortOnesweepKernel<at_cuda_detail::cub::"
        "detail::radix::policy_hub<short, at::cuda::cub::detail::OpaqueType<8>, unsigned long long>::"
        "Policy1000, short>(int*, int*)",
        "cub RadixSortOnesweep",
    ),
    ("_ZN3cub17CUB_200400_SM_90030DeviceRadixSortHistogramKernelINS_EEEvPT_", "cub RadixSortHistogram"),
    (
        "void at::native::vectorized_elementwise_kernel<8, at::native::FillFunctor<c10::BFloat16>, "
        "std::array<char*, 1ul> >(int, at::native::FillFunctor<c10::BFloat16>, std::array<char*, 1ul>)",
        "elementwise Fill bf16",
    ),
    (
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
        "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#12}"
        "::operator()() const::{lambda(c10::BFloat16)#1}>(at::TensorIteratorBase&)::{lambda(int)#1}>(int)",
        "elementwise direct_copy bf16",
    ),
    (
        "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float, "
        "at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(int)",
        "elementwise Mul fp32",
    ),
    (
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float"
        ", at::native::sum_functor<float, float, float>::operator()(at::TensorIterator&)::{lambda(float, "
        "float)#1}>, unsigned int, float, 4, 4> >(at::native::ReduceOp<float>)",
        "reduce sum fp32",
    ),
    (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)"
        "::TensorListMetadata<1>, at::native::LpNormFunctor<c10::BFloat16, (at::native::NormType)1, float, "
        "1, 1, 0>, float*, int>(at::native::(anonymous namespace)::TensorListMetadata<1>, float*, int)",
        "multi_tensor LpNorm bf16",
    ),
    (
        "void at::native::lpnorm_cleanup<c10::BFloat16, (at::native::NormType)1, float, true, float>(int)",
        "lpnorm_cleanup",
    ),
    ("cudnn::fusion::convert<true>(void const*, std::pair<int, bool>)", "cudnn::fusion::convert<true>"),
    ("(anonymous namespace)::kernel(float)", "kernel"),
    ("_ZN2at6native12_GLOBAL__N_111fill_kernelEPf", "fill_kernel"),
    ("_Z9my_kernelPf", "my_kernel"),
    ("nvjet_sm90_tst_256x128", "nvjet_sm90_tst_256x128"),
    ("triton_poi_fused_add_view", "triton_poi_fused_add_view"),
    ("autograd::engine::evaluate_function: MmBackward0", "MmBackward0"),
    ("aten::copy_", "aten::copy_"),
    ("<lambda>", "<lambda>"),
    ("_Zebra", "_Zebra"),
]


@pytest.mark.parametrize(("name", "shown"), _NAMES)
def test_a_name_says_what_a_person_recognises(name: str, shown: str) -> None:
    assert short(name) == shown
