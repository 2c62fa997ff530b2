// One LoRA step in one launch: shrink, expand, and the sum per token. Semantics: kernels_cuda/ops.py.
//
// Every warp of a persistent grid is a worker with its own ring of tiles (8 KB each). It takes a share of the step's
// tiles that costs as much as any other's, first of A, then of B. What a warp computes for an entry depends on that
// entry and its weights alone: one MMA shape, K split at fixed places, sums in a fixed order, no floating-point atomics.
//
//   shrink    partial[k][entry] = scale * weight * x[:, chunk k] A[chunk k]      copies of B begin meanwhile
//   barrier, v[entry] = partial[0] + partial[1] + ..., barrier
//   expand    out[entry] = v B, or delta[entry] with an out_map
//   barrier, out[token] = the sum of delta over its entries                      with an out_map only
#include "combine.cuh"
#include "expand.cuh"
#include "shrink.cuh"

enum Phases { SHRINK_ONLY = 1, EXPAND_ONLY = 2, FUSED = 3 };

struct BlockMemory {
    WarpMemory warps[WARPS];
    int shrink_through[THREADS], expand_through[THREADS];
};

// Keeps a ring full: A first, then B.
struct Producer {
    Ring& ring;
    ShrinkWalk shrink;
    ExpandWalk expand;

    DEVICE Producer(const Args& a, Ring& its_ring) : ring(its_ring), shrink(a), expand(a) {}
    DEVICE void operator()() {
#pragma unroll 1
        while (!ring.full() && (shrink.left || expand.left)) {
            const unsigned char* from;
            const Record record = shrink.left ? shrink.next(from) : expand.next(from);
            ring.push(record, from);
        }
    }
};

template <class T, int PHASES> DEVICE void lora_step(const Args& a, BlockMemory& memory) {
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int worker = blockIdx.x * WARPS + warp, workers = gridDim.x * WARPS;
    Ring ring(memory.warps[warp], lane);
    Producer refill(a, ring);
    add_costs(a, memory.shrink_through, memory.expand_through);
    if (PHASES & SHRINK_ONLY) {
        const int* through = memory.shrink_through;
        refill.shrink.start(cut(through, worker, workers), cut(through, worker + 1, workers), through, lane);
        refill();
    }
    if (PHASES & EXPAND_ONLY) {
        const int* through = memory.expand_through;
        refill.expand.start(cut(through, worker, workers), cut(through, worker + 1, workers), through, lane);
        refill();
    }
    if (PHASES & SHRINK_ONLY) {
        const bool vectors = aligned(a.rows, 16) && a.row_width % 8 == 0 && a.in_begin % 8 == 0;
        ShrinkSums sums;
        while (!ring.empty() && ring.front().shrink.kind == SHRINK) {
            shrink_tile<T>(a, ring, sums, vectors);
            refill();
        }
        grid_barrier(a.arrivals);
        sum_partials(a);
        if (PHASES & EXPAND_ONLY) grid_barrier(a.arrivals);
    }
    if (!(PHASES & EXPAND_ONLY)) return;
    refill.shrink.left = 0;  // as it is by now: what follows then is compiled without the walk over A
    if (a.out_map == nullptr) {
        expand_all<T, HalfOut<T>>(a, ring, refill);
        return;
    }
    expand_all<T, FloatOut>(a, ring, refill);
    Combine combine(a, memory.warps[warp], lane, worker, workers);
    combine.prepare();
    grid_barrier(a.arrivals);
    combine.template run<T>();
}

// Arguments are all 64 bits wide. Grid: any, launched cooperatively. Shared memory: sizeof(BlockMemory).
#define KERNEL(NAME, T, PHASES)                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                           \
        NAME(const void* rows, const int* in_map, const int* out_map, const float* weights, const Segment* segments,   \
             const Block* blocks, const int* counts, void* out, float* partial, float* v, float* delta, int* groups,   \
             uint64* arrivals, int64 max_entries, int64 max_rank, int64 row_width, int64 in_begin, int64 in_width,     \
             int64 out_width, int64 num_windows, int64 begin0, int64 end0, int64 begin1, int64 end1, int64 begin2,     \
             int64 end2) {                                                                                             \
        SHARED_MEMORY(shared);                                                                                         \
        const Args a = {rows, in_map, out_map, weights, segments, blocks, counts, out, partial, v, delta, groups,      \
                        arrivals, int(max_entries), int(max_rank), int(row_width), int(in_begin), int(in_width),       \
                        int(out_width), int(num_windows), int(begin0), int(end0), int(begin1), int(end1),              \
                        int(begin2), int(end2)};                                                                       \
        lora_step<T, PHASES>(a, *reinterpret_cast<BlockMemory*>(shared));                                              \
    }

KERNEL(lora_step_bfloat16, Bf16, FUSED)
KERNEL(lora_step_float16, Fp16, FUSED)
KERNEL(shrink_bfloat16, Bf16, SHRINK_ONLY)
KERNEL(shrink_float16, Fp16, SHRINK_ONLY)
KERNEL(expand_bfloat16, Bf16, EXPAND_ONLY)
KERNEL(expand_float16, Fp16, EXPAND_ONLY)
