// y = x W^T (+ bias) for the few rows of a decode batch: the weights go from memory straight into the registers from
// which mma.sync takes them.
//
// Compiled by NVRTC, without headers, once for each of these:
//   ROW_TILES  tiles of 16 rows of W that a warp has at a time (1 or 2)
//   BATCH_TILES tiles of 8 rows of x (1, 2 or 4)
//   STAGES     how many units a warp loads ahead
//   WARPS      of a block
//   BLOCKS     that an SM is to hold
//   FP16       1: elements are fp16, 0: bf16
//
// A block has tiles of 16 x ROW_TILES x WARPS rows, each warp its own rows of them, all warps the same columns at about
// the same time: so x, which they read through the L1 cache, comes from L2 once for all of them. Blocks share all units
// (64 columns of a tile) evenly, each an equal, contiguous range. A tile in several ranges is summed by whoever ends
// last, in the order of the blocks.
//
// In mma.m16n8k16, lane 4 g + t holds columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of rows g and g + 8 of W, and the same
// columns of row g of x. Which column of memory is which column of the instruction is free as long as W and x agree.
// So a lane takes 8 columns that lie side by side, 8 t to 8 t + 7 of 32, with one load of 16 bytes: two instructions'
// worth.

#define COLUMNS 64
#define TILE_ROWS (16 * ROW_TILES * WARPS)
// Sums that a lane has.
#define SUMS (4 * ROW_TILES * BATCH_TILES)

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

struct Quad {
    u32 x, y, z, w;
};

#ifdef ON_HOST
#include "cuda_on_host.h"  // tests run the kernel on a CPU
#else

// Weights are read once: they leave the L1 cache to x.
__device__ inline Quad load_weights(const u16 *from) {
    Quad v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}

__device__ inline Quad load_x(const u16 *from) {
    Quad v;
    asm volatile("ld.global.L1::evict_last.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}

// sum += a b: a 16 x 16, b 16 x 8, as spread over the lanes of a warp.
__device__ inline void multiply(float *sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if FP16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
#endif
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ inline float to_float(u16 bits) {
    float value;
#if FP16
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
#else
    value = __uint_as_float((u32)bits << 16);
#endif
    return value;
}

__device__ inline u16 to_element(float value) {
    u16 bits;
#if FP16
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#endif
    return bits;
}

// Without effect unless both kernels were launched for it.
__device__ inline void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ inline void wait_for_kernel_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

#endif

// Where the share of `part` of `parts` begins.
__host__ __device__ inline int share_begin(int part, int parts, int total) {
    return (int)((i64)part * total / parts);
}

// In whose share `unit` lies.
__host__ __device__ inline int share_of(int unit, int parts, int total) {
    return (int)(((i64)(unit + 1) * parts - 1) / total);
}

// One block of a persistent grid.
//   w (n, k), x (m, k), bias (n) or null, y (m, n)
//   sums (blocks, 2, WARPS, SUMS, 32), counts (n / 16 / ROW_TILES) which are zero and left zero
// n is a multiple of 16 x ROW_TILES, k of 64.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
skinny_gemm(const u16 *__restrict__ w, const u16 *x, const u16 *__restrict__ bias, u16 *y, float *sums, int *counts,
            int m, int n, int k) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int per_tile = k / COLUMNS;
    const int units = (n + TILE_ROWS - 1) / TILE_ROWS * per_tile;
    const int first = share_begin(blockIdx.x, gridDim.x, units), last = share_begin(blockIdx.x + 1, gridDim.x, units);
    const int first_tile = first / per_tile, first_chunk = first - first_tile * per_tile;
    const i64 eight_rows = (i64)8 * k;

    // Rows beyond n: other rows are read in their place, and the sums thrown away.
    const int row_end = n - 16 * ROW_TILES;
    auto row_of = [&](int tile) { return (tile * WARPS + warp) * 16 * ROW_TILES; };
    auto weights_of = [&](int tile) { return w + (i64)(min(row_of(tile), row_end) + g) * k + 8 * t; };

    Quad weights[STAGES][2][2 * ROW_TILES];
    int load_tile = first_tile, load_chunk = first_chunk;
    const u16 *from = weights_of(first_tile) + first_chunk * COLUMNS;
    auto load = [&](Quad (&stage)[2][2 * ROW_TILES]) {
#pragma unroll
        for (int r = 0; r < 2 * ROW_TILES; ++r) {
            stage[0][r] = load_weights(from + r * eight_rows);
            stage[1][r] = load_weights(from + r * eight_rows + 32);
        }
        from += COLUMNS;
        if (++load_chunk == per_tile) {
            load_chunk = 0;
            from = weights_of(++load_tile);
        }
    };

    // Weights are there before the kernel ahead has ended; x, and what it left in the workspace, are not.
    let_next_kernel_start();
#pragma unroll
    for (int s = 0; s < STAGES; ++s)
        if (first + s < last) load(weights[s]);
    wait_for_kernel_ahead();

    const u16 *x_rows[BATCH_TILES];
#pragma unroll
    for (int b = 0; b < BATCH_TILES; ++b) x_rows[b] = x + (i64)min(8 * b + g, m - 1) * k + 8 * t;

    float sum[SUMS], head[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sum[i] = head[i] = 0.f;

    auto store = [&](int tile, const float *values) {
        const int row = row_of(tile);
        if (row > row_end) return;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
            const int a = i / (4 * BATCH_TILES), b = i / 4 % BATCH_TILES;
            const int at = row + 16 * a + g + 8 * (i / 2 % 2), of = 8 * b + 2 * t + i % 2;
            if (of < m) y[(i64)of * n + at] = to_element(values[i] + (bias ? to_float(bias[at]) : 0.f));
        }
    };

    int tile = first_tile, chunk = first_chunk;
    for (int unit = first; unit < last; unit += STAGES) {
#pragma unroll
        for (int s = 0; s < STAGES; ++s) {
            if (unit + s >= last) break;
            Quad columns[2][BATCH_TILES];
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int b = 0; b < BATCH_TILES; ++b)
                    columns[half][b] = load_x(x_rows[b] + chunk * COLUMNS + 32 * half);
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int a = 0; a < ROW_TILES; ++a) {
                    const Quad &top = weights[s][half][2 * a], &bottom = weights[s][half][2 * a + 1];
#pragma unroll
                    for (int b = 0; b < BATCH_TILES; ++b) {
                        float *into = sum + 4 * (a * BATCH_TILES + b);
                        multiply(into, top.x, bottom.x, top.y, bottom.y, columns[half][b].x, columns[half][b].y);
                        multiply(into, top.z, bottom.z, top.w, bottom.w, columns[half][b].z, columns[half][b].w);
                    }
                }
            if (unit + s + STAGES < last) load(weights[s]);
            if (++chunk == per_tile) {
                if (tile * per_tile >= first) {
                    store(tile, sum);
                } else {
#pragma unroll
                    for (int i = 0; i < SUMS; ++i) head[i] = sum[i];
                }
#pragma unroll
                for (int i = 0; i < SUMS; ++i) sum[i] = 0.f;
                chunk = 0;
                ++tile;
            }
        }
    }

    // A block shares the first and the last tile of its range at most.
    auto share = [&](int shared, int ours, const float *values) {
        auto at = [&](int block) {
            const int slot = 2 * block + (share_begin(block, gridDim.x, units) / per_tile == shared ? 0 : 1);
            return sums + ((i64)slot * WARPS + warp) * SUMS * 32 + lane;
        };
        float *mine = at(blockIdx.x);
#pragma unroll
        for (int i = 0; i < SUMS; ++i) __stcg(mine + 32 * i, values[i]);
        __threadfence();
        __syncwarp();
        int others = 0;
        int *count = counts + shared * WARPS + warp;
        if (lane == 0) others = atomicAdd(count, ours);
        others = __shfl_sync(0xffffffffu, others, 0);
        if (others + ours != per_tile) return;
        __threadfence();
        float total[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) total[i] = 0.f;
        const int end = share_of((shared + 1) * per_tile - 1, gridDim.x, units);
#pragma unroll 4
        for (int block = share_of(shared * per_tile, gridDim.x, units); block <= end; ++block) {
            const float *theirs = at(block);
#pragma unroll
            for (int i = 0; i < SUMS; ++i) total[i] += __ldcg(theirs + 32 * i);
        }
        store(shared, total);
        if (lane == 0) *count = 0;  // for the next product
    };
    if (first < last) {
        const bool began_before = first_chunk > 0, ends_here = (first_tile + 1) * per_tile <= last;
        if (began_before && ends_here) share(first_tile, (first_tile + 1) * per_tile - first, head);
        if (chunk > 0) share(tile, last - max(tile * per_tile, first), sum);
    }
}
