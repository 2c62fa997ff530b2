// Divides a step's jobs among the warps, in shares of equal cost. Mirrored by kernels_cuda/shares.py.
//
// The jobs of a phase lie one behind the other on a line, each as long as it costs. The line is cut into one share
// per warp, all equally long, and a job belongs to the share in which its last unit lies.
#pragma once
#include "cost.cuh"
#include "step.cuh"

// Of a step, in shared memory. through: the costs up to the end of each thread's part of the segments; the last is the
// total. A step of at most THREADS segments keeps them in `few`, to avoid a trip to L2 at each look.
struct ShareMemory {
    int shrink_through[THREADS], expand_through[THREADS];
    Segment few[THREADS];
    int num;

    DEVICE bool are_few() const { return num <= THREADS; }
    DEVICE Segment segment(const Args& a, int i) const { return are_few() ? few[i] : a.segment(i); }
};

// The tiles of a block's B that the windows meet, each counted once.
DEVICE int expand_tiles(const Args& a, const Block& block) {
    if (a.num_windows == 1 && a.begin0 == 0 && a.end0 == block.out_rows()) return block.tiles();
    int tiles = 0;
#pragma unroll 1
    for (int p = 0; p < block.num_pairs(); p++) {
        const Pair pair = block.pair(p);
#pragma unroll 1
        for (int w = 0, next = 0, end = 0; w < a.num_windows; w++)
            if (tiles_of(a, pair, w, next, end)) {
                tiles += end - next;
                next = end;
            }
    }
    return tiles;
}

// Jobs for each JOB_ROWS entries of a segment.
DEVICE int shrink_jobs(const Args& a, const Block& block) { return block.groups() * Depth(a).partials; }

DEVICE int job_rows(const Segment& s, int row) { return lesser(s.rows - row, JOB_ROWS); }

struct Costs { int shrink, expand; };

DEVICE Costs costs_of(const Args& a, const Segment& s) {
    const Block& block = a.blocks[s.block];
    const int rest = s.rows % JOB_ROWS, cost = s.rows / JOB_ROWS * job_cost(JOB_ROWS) + (rest ? job_cost(rest) : 0);
    return {shrink_jobs(a, block) * cost, expand_tiles(a, block) * cost};
}

// Finds the step's segments, and sums their costs. All threads of a block call it.
DEVICE void add_costs(const Args& a, ShareMemory& m) {
    constexpr int AT_ONCE = 4;  // loads under way: a step has thousands of segments, and each warp waits for this
    const int thread = threadIdx.x, lane = thread % LANES, warp = thread / LANES;
    int *const shrink_through = m.shrink_through, *const expand_through = m.expand_through;
    const int num = a.num_segments();
    if (thread == 0) m.num = num;
    const int part = div_up(num, THREADS), end = lesser(num, (thread + 1) * part);
    int shrink = 0, expand = 0;
#pragma unroll 1
    for (int first = thread * part; first < end; first += AT_ONCE) {
        Segment segments[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) segments[i] = a.segment(lesser(first + i, end - 1));
        if (num <= THREADS) m.few[thread] = segments[0];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const Costs costs = costs_of(a, segments[i]);
            if (first + i < end) shrink += costs.shrink, expand += costs.expand;
        }
    }
    shrink = sum_through(shrink, lane), expand = sum_through(expand, lane);
    shrink_through[thread] = shrink, expand_through[thread] = expand;
    sync_block();
#pragma unroll 1
    for (int w = 1; w <= warp; w++)
        shrink += shrink_through[w * LANES - 1], expand += expand_through[w * LANES - 1];
    sync_block();
    shrink_through[thread] = shrink, expand_through[thread] = expand;
    sync_block();
}

// Returns where a worker's share of the line begins; it ends where the next worker's begins.
DEVICE int cut(const int* through, int worker, int workers) {
    return static_cast<int>(static_cast<int64>(through[THREADS - 1]) * worker / workers);
}

// Finds the segment in which a unit of the line lies, and its place there. A whole warp calls it; the unit must exist.
DEVICE void find_segment(const Args& a, const ShareMemory& m, bool shrink, int unit, int lane, int& segment, int& local) {
    const int* const through = shrink ? m.shrink_through : m.expand_through;
    const int num = m.num, part = div_up(num, THREADS);
    int thread = 0;
#pragma unroll 1
    for (int base = 0; base < THREADS; base += LANES) thread += __popc(votes(through[base + lane] <= unit));
    local = thread == 0 ? unit : unit - through[thread - 1];
    if (m.are_few()) {
        segment = thread;
        return;
    }
#pragma unroll 1
    for (segment = thread * part;; segment += LANES) {
        const Costs costs = segment + lane < num ? costs_of(a, a.segment(segment + lane)) : Costs{0, 0};
        const int mine = shrink ? costs.shrink : costs.expand, inclusive = sum_through(mine, lane);
        const unsigned beyond = votes(inclusive > local);
        if (beyond) {
            const int found = first_bit(beyond);
            local -= shuffle(inclusive - mine, found);
            segment += found;
            return;
        }
        local -= shuffle(inclusive, LANES - 1);
    }
}
