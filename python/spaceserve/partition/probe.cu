// Kernels that show where work runs and how it interferes. Used by tests and benchmarks, never by serving.
//
// Compiled at run time with NVRTC (spaceserve.partition.probe), or by hand:
//   nvcc -arch=sm_90 -cubin -o probe.cubin python/spaceserve/partition/probe.cu

// Physical streaming multiprocessor of the calling thread, within one process. Under MPS the number is virtual: it
// counts from 0 in every client's group.
static __device__ __forceinline__ unsigned int sm_id() {
  unsigned int id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}

// Nanoseconds on a clock that all SMs share.
static __device__ __forceinline__ unsigned long long global_ns() {
  unsigned long long ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

extern "C" {

// Each block notes its SM, start and end, and stays for min_ns. Launched with half an SM's threads and shared memory
// per block, two blocks fill an SM, so that no other kernel's block fits beside them: the occupier of the tests.
//
// sm_ids, start_ns, end_ns: one element per block. Bounded to 32 registers so that two blocks of 1,024 threads fit.
__global__ void __launch_bounds__(1024, 2)
    occupy(unsigned int* sm_ids, unsigned long long* start_ns, unsigned long long* end_ns, unsigned long long min_ns) {
  extern __shared__ unsigned char unused[];
  unsigned long long start = global_ns();
  unsigned long long now = start;
  while (now - start < min_ns) {
    __nanosleep(200);
    now = global_ns();
  }
  if (threadIdx.x == 0) {
    sm_ids[blockIdx.x] = sm_id();
    start_ns[blockIdx.x] = start;
    end_ns[blockIdx.x] = now;
  }
}

// Bandwidth-bound: every thread sums 16-byte words of src, num_words of them in all, repeats times over.
// sink: one float per thread of the grid, so that the reads cannot be removed.
__global__ void stream_read(const float4* src, unsigned long long num_words, unsigned int repeats, float* sink) {
  unsigned long long stride = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
  unsigned long long thread = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  float sum = 0.0f;
  for (unsigned int r = 0; r < repeats; ++r) {
    for (unsigned long long i = thread; i < num_words; i += stride) {
      float4 word = __ldcs(src + i);
      sum += word.x + word.y + word.z + word.w;
    }
  }
  sink[thread] = sum;
}

}  // extern "C"
