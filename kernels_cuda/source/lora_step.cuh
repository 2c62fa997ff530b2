// One LoRA step of a grid: shrink, expand, and the sum per token. Semantics: kernels_cuda/ops.py.
//
// Every warp of a persistent grid is a worker with its own ring of tiles (8 KB each). It takes a share of the step's
// tiles that costs as much as any other's, first of A, then of B. What a warp computes for an entry depends on that
// entry and its weights alone: one MMA shape, K split at fixed places, sums in a fixed order, no floating-point atomics.
//
//   shrink    partial[k][entry] = scale * weight * x[:, chunk k] A[chunk k]      copies of B begin meanwhile
//   barrier, v[entry] = partial[0] + partial[1] + ..., barrier: of a short step each reader adds them itself instead
//   expand    out[entry] = v B, or delta[entry] with an out_map
//   barrier, out[token] = the sum of delta over its entries                      with an out_map only
#pragma once
#include "combine.cuh"
#include "expand.cuh"
#include "shrink.cuh"

enum Phases { SHRINK_ONLY = 1, EXPAND_ONLY = 2, FUSED = 3 };

struct BlockMemory {
    WarpMemory warps[WARPS];
    ShareMemory shares;
};

// Keeps a ring full: A first, then B.
struct Producer {
    Ring& ring;
    ShrinkWalk shrink;
    ExpandWalk expand;

    DEVICE Producer(const Args& a, const ShareMemory& shares, Ring& its_ring) : ring(its_ring), shrink(a, shares), expand(a, shares) {}
    DEVICE void operator()() {
#pragma unroll 1
        while (!ring.full() && (shrink.left || expand.left)) {
            const unsigned char* from;
            const Record record = shrink.left ? shrink.next(from) : expand.next(from);
            ring.push(record, from);
        }
    }
};

// False if the grid gave up at a barrier; see grid_barrier. The ring is empty before and after. Row: unsigned short for
// rows of T, unsigned char for codes; results are of T.
template <class T, int PHASES, class Row = unsigned short> DEVICE bool lora_step(const Args& a, BlockMemory& memory, Ring& ring) {
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    // Neighbours on the line are of different blocks, so that a segment with many entries is spread over multiprocessors.
    const int worker = warp * gridDim.x + blockIdx.x, workers = gridDim.x * WARPS;
    int& flag = memory.warps[0].flag;
    Producer refill(a, memory.shares, ring);
    Partials v = {a.v, 1};
    add_costs(a, memory.shares);
    if (PHASES & SHRINK_ONLY) {
        const int* through = memory.shares.shrink_through;
        refill.shrink.start(cut(through, worker, workers), cut(through, worker + 1, workers), lane);
        refill();
    }
    if (PHASES & EXPAND_ONLY) {
        const int* through = memory.shares.expand_through;
        refill.expand.start(cut(through, worker, workers), cut(through, worker + 1, workers), lane);
        refill();
    }
    if (PHASES & SHRINK_ONLY) {
        const bool vectors = aligned(a.rows, 16) && a.row_width % 8 == 0 && a.in_begin % 8 == 0;
        ShrinkSums<Row> sums;
        while (!ring.empty() && ring.front().shrink.kind == SHRINK) {
            shrink_tile<T>(a, ring, sums, vectors);
            refill();
        }
        if (!grid_barrier(a.arrivals, flag)) return false;
        const int partials = Depth(a).partials;
        if (!(PHASES & EXPAND_ONLY) || partials > FEW_PARTIALS || partials * a.num_entries() > FEW_SUMS) {
            sum_partials(a);
            if (PHASES & EXPAND_ONLY && !grid_barrier(a.arrivals, flag)) return false;
        } else {
            v = {a.partial, partials};
        }
    }
    if (!(PHASES & EXPAND_ONLY)) return true;
    refill.shrink.left = 0;  // as it is by now: what follows then is compiled without the walk over A
    if (a.out_map == nullptr) {
        expand_all<T, HalfOut<T>>(a, v, ring, refill);
        return true;
    }
    expand_all<T, FloatOut>(a, v, ring, refill);
    Combine combine(a, memory.warps[warp], lane, worker, workers);
    combine.prepare();
    if (!grid_barrier(a.arrivals, flag)) return false;
    combine.template run<T>();
    return true;
}
