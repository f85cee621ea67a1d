// What skinny_gemm/kernel.cu needs of CUDA, on a CPU: the lanes of a warp are threads that meet at a barrier. For tests.
//
// mma.m16n8k16 after the PTX manual's tables of which lane holds which element.

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __restrict__
#define __launch_bounds__(...)

struct Dim {
    int x;
};

struct Warp {
    std::barrier<> meet{32};
    u32 a[32][4], b[32][2];
    int value[32];
};

static thread_local Dim threadIdx, blockIdx, gridDim;
static thread_local Warp *warp_of_lane;

using std::max;
using std::min;

inline Quad load_weights(const u16 *from) {
    Quad v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

inline Quad load_x(const u16 *from) { return load_weights(from); }

inline float to_float(u16 bits) {
#if FP16
    const int sign = bits >> 15, exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value = exponent == 31  ? (fraction ? NAN : INFINITY)
                  : exponent == 0 ? std::ldexp((float)fraction, -24)
                                  : std::ldexp((float)(fraction + 1024), exponent - 25);
    return sign ? -value : value;
#else
    const u32 wide = (u32)bits << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
#endif
}

// To the nearest of both neighbours, ties to even; finite and normal values only.
inline u16 to_element(float value) {
#if FP16
    u16 best = 0;
    float distance = INFINITY;
    const int exponent = std::max(0, std::min(30, (value == 0 ? 0 : std::ilogb(value)) + 15));
    for (int bits = (exponent << 10) - (exponent > 0); bits <= ((exponent + 1) << 10); ++bits) {
        const float off = std::fabs(to_float((u16)bits) - std::fabs(value));
        if (off < distance || (off == distance && bits % 2 == 0)) best = (u16)bits, distance = off;
    }
    return best | (std::signbit(value) ? 0x8000 : 0);
#else
    u32 bits;
    std::memcpy(&bits, &value, sizeof bits);
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}

inline float element(u32 pair, int which) { return to_float((u16)(pair >> 16 * which)); }

inline void multiply(float *sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    Warp &warp = *warp_of_lane;
    const int lane = threadIdx.x % 32, group = lane / 4, in_group = lane % 4;
    const u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    std::copy(a, a + 4, warp.a[lane]);
    std::copy(b, b + 2, warp.b[lane]);
    warp.meet.arrive_and_wait();
    for (int i = 0; i < 4; ++i) {
        const int row = group + 8 * (i / 2), column = 2 * in_group + i % 2;
        for (int k = 0; k < 16; ++k) {
            const int holder = k % 8 / 2;
            const float left = element(warp.a[row % 8 * 4 + holder][row / 8 + 2 * (k / 8)], k % 2);
            sum[i] += left * element(warp.b[column * 4 + holder][k / 8], k % 2);
        }
    }
    warp.meet.arrive_and_wait();
}

inline void let_next_kernel_start() {}
inline void wait_for_kernel_ahead() {}
inline void __threadfence() {}
inline void __syncwarp() { warp_of_lane->meet.arrive_and_wait(); }
inline void __stcg(float *to, float value) { *to = value; }
inline float __ldcg(const float *from) { return *from; }

inline int atomicAdd(int *to, int value) {
    const int before = *to;
    *to += value;
    return before;
}

inline int __shfl_sync(u32, int value, int from) {
    Warp &warp = *warp_of_lane;
    warp.value[threadIdx.x % 32] = value;
    warp.meet.arrive_and_wait();
    const int found = warp.value[from];
    warp.meet.arrive_and_wait();
    return found;
}

// A grid whose warps run one after another, blocks from the last to the first: any order must do.
template <typename Kernel, typename... Arguments>
void run_grid(Kernel kernel, int blocks, int warps, Arguments... arguments) {
    for (int block = blocks - 1; block >= 0; --block) {
        for (int warp = 0; warp < warps; ++warp) {
            Warp state;
            std::vector<std::thread> lanes;
            for (int lane = 0; lane < 32; ++lane) {
                lanes.emplace_back([=, &state] {
                    threadIdx.x = warp * 32 + lane, blockIdx.x = block, gridDim.x = blocks;
                    warp_of_lane = &state;
                    kernel(arguments...);
                });
            }
            for (auto &lane : lanes) lane.join();
        }
    }
}
