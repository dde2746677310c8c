// The kernels that the tests of reading machine code read, compiled by nvcc 13.0:
//   nvcc -cubin -gencode arch=compute_80,code=sm_86 -o kernels.cubin kernels.cu
//   nvcc -fatbin --compress-mode=speed -gencode arch=compute_80,code=compute_80 -o ptx.fatbin kernels.cu
//   nvcc -fatbin --compress-mode=size -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 \
//     -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_100f,code=sm_100f \
//     -gencode arch=compute_80,code=compute_80 -o kernels.fatbin kernels.cu
__constant__ float scale[10];

extern "C" __global__ void plain(float *x) { x[threadIdx.x] *= scale[0]; }

extern "C" __global__ void __launch_bounds__(256) bounded(float *x) {
  __shared__ float row[256];
  row[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = row[255 - threadIdx.x];
}

extern "C" __global__ void spilling(float *x, int at) {
  float kept[64];
#pragma unroll 1
  for (int i = 0; i < 64; i++) kept[i ^ at] = x[i];
  x[0] = kept[at + 1];
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ float row[1024];
  row[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = row[1023 - threadIdx.x];
#endif
}
