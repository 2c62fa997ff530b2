// One step: its arguments, its jobs, and which warp does which. Legend: N entries, K input columns, R lora rank.
// Mirrored by kernels_cuda/layout.py (tiles), tables.py (blocks, segments) and launch.py (the argument list).
#pragma once
#include "warp.cuh"

constexpr int FRAGMENT_BYTES = 512;    // 16 x 16 weights, in the order in which the lanes of an MMA hold them
constexpr int TILE_BYTES = 8192;       // at most 16 fragments
constexpr int PAGE_TILES = 256;        // 2 MiB
constexpr int CHUNK = 256;             // columns of A in a tile
constexpr int CHUNKS = 2;              // chunks summed in one partial: the only split of K there is
constexpr int JOB_ROWS = 32;           // entries that share one copy of a tile
constexpr int MAX_GROUPS = 16;         // of 16 ranks, in one pair
constexpr int MAX_PAIRS = 7;

struct alignas(16) Pair { int groups, out_begin, out_rows; float scale; };  // groups: 16 ranks each; 0: zeros
struct alignas(16) Block {
    const uint64* pages;
    int groups, tiles;        // of all pairs: groups of ranks; jobs of B for up to JOB_ROWS entries, all output rows
    int out_rows, num_pairs;  // the pairs cover [0, out_rows) without gaps
    int unused[2];
    Pair pairs[MAX_PAIRS];
};
struct alignas(16) Segment { int block, first_tile, first, rows; };  // first_tile: the block's, in its pages

struct Args {
    const void* rows;        // [rows, row_width] 16-bit
    const int* in_map;       // [N] or null
    const int* out_map;      // [N] or null
    const float* weights;    // [N] or null
    const Segment* segments; // [segments]
    const Block* blocks;
    const int* counts;       // segments, entries, output rows
    void* out;               // [output rows, out_width] 16-bit
    float* partial;          // [partials, max_entries, max_rank]
    float* v;                // [max_entries, max_rank]
    float* delta;            // [max_entries, out_width], with an out_map
    int* groups;             // [max_entries]
    uint64* arrivals;
    int max_entries, max_rank, row_width, in_begin, in_width, out_width, num_windows;
    int begin0, end0, begin1, end1, begin2, end2;  // of the windows; no array, which would lie in local memory

    DEVICE int begin(int window) const { return window == 0 ? begin0 : window == 1 ? begin1 : begin2; }
    DEVICE int end(int window) const { return window == 0 ? end0 : window == 1 ? end1 : end2; }
};

DEVICE int div_up(int a, int b) { return (a + b - 1) / b; }
DEVICE int lesser(int a, int b) { return a < b ? a : b; }
DEVICE int greater(int a, int b) { return a > b ? a : b; }

// The chunks and partials that the rows' window of A meets.
struct Depth {
    int first_chunk, last_chunk, first_partial, partials;
    DEVICE explicit Depth(const Args& a)
        : first_chunk(a.in_begin / CHUNK), last_chunk(div_up(a.in_begin + a.row_width, CHUNK)),
          first_partial(first_chunk / CHUNKS), partials(div_up(last_chunk, CHUNKS) - first_partial) {}
};

// Output rows of a full tile of B: as many blocks of 16 as fit beside each other.
DEVICE int tile_blocks(int groups) { return groups == 0 ? 16 : 16 / groups; }

// The tiles of a pair's B that a window meets and that the window before it did not; false if there is none.
DEVICE bool tiles_of(const Args& a, const Pair& pair, int window, int& next, int& end) {
    const int begin = greater(a.begin(window), pair.out_begin) - pair.out_begin;
    const int stop = lesser(a.end(window), pair.out_begin + pair.out_rows) - pair.out_begin;
    if (begin >= stop) return false;
    const int tile_rows = 16 * tile_blocks(pair.groups);
    next = greater(next, begin / tile_rows);
    end = div_up(stop, tile_rows);
    return next < end;
}

DEVICE int row_blocks(const Segment& s) { return div_up(s.rows, JOB_ROWS); }

// The tiles of a block's B that the windows meet, each counted once.
DEVICE int expand_tiles(const Args& a, const Block& block) {
    if (a.num_windows == 1 && a.begin0 == 0 && a.end0 == block.out_rows) return block.tiles;
    int tiles = 0;
    for (int p = 0; p < block.num_pairs; p++) {
        const Pair pair = block.pairs[p];
        for (int w = 0, next = 0, end = 0; w < a.num_windows; w++)
            if (tiles_of(a, pair, w, next, end)) {
                tiles += end - next;
                next = end;
            }
    }
    return tiles;
}

struct Jobs { int shrink, expand; };

DEVICE Jobs jobs_of(const Args& a, int segment) {
    const Segment s = a.segments[segment];
    const Block& block = a.blocks[s.block];
    return {row_blocks(s) * block.groups * Depth(a).partials, row_blocks(s) * expand_tiles(a, block)};
}

// Jobs up to the end of each thread's share of the segments; the last entry is the total. All threads of a block
// call it.
DEVICE void count_jobs(const Args& a, int* shrink_through, int* expand_through) {
    const int thread = threadIdx.x, lane = thread % LANES, warp = thread / LANES;
    const int num = a.counts[0], share = div_up(num, THREADS);
    int shrink = 0, expand = 0;
#pragma unroll 4
    for (int i = 0; i < share; i++) {
        if (thread * share + i >= num) break;
        const Jobs jobs = jobs_of(a, thread * share + i);
        shrink += jobs.shrink, expand += jobs.expand;
    }
    shrink = sum_through(shrink, lane), expand = sum_through(expand, lane);
    shrink_through[thread] = shrink, expand_through[thread] = expand;
    sync_block();
    for (int w = 1; w <= warp; w++)
        shrink += shrink_through[w * LANES - 1], expand += expand_through[w * LANES - 1];
    sync_block();
    shrink_through[thread] = shrink, expand_through[thread] = expand;
    sync_block();
}

// The segment of a job, and the job's number within it. A whole warp calls it; the job exists.
DEVICE void find_job(const Args& a, bool shrink, const int* through, int job, int lane, int& segment, int& local) {
    const int num = a.counts[0], share = div_up(num, THREADS);
    int thread = 0;
    for (int base = 0; base < THREADS; base += LANES) thread += __popc(votes(through[base + lane] <= job));
    local = thread == 0 ? job : job - through[thread - 1];
    for (segment = thread * share;; segment += LANES) {
        const Jobs jobs = segment + lane < num ? jobs_of(a, segment + lane) : Jobs{0, 0};
        const int mine = shrink ? jobs.shrink : jobs.expand, inclusive = sum_through(mine, lane);
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

// Where a tile lies. Pages are anywhere; a tile never crosses one.
DEVICE const unsigned char* tile_at(const Block& block, int tile) {
    const uint64 page = block.pages[tile / PAGE_TILES];
    return reinterpret_cast<const unsigned char*>(page) + static_cast<int64>(tile % PAGE_TILES) * TILE_BYTES;
}

// All blocks of the grid arrive, then all go on. The grid is launched cooperatively, so all are running.
DEVICE void grid_barrier(uint64* arrivals) {
    sync_block();
    if (threadIdx.x == 0) {
        const uint64 grid = gridDim.x;
        const uint64 target = (add_release(arrivals, 1) / grid + 1) * grid;
        const uint64 deadline = now_ns() + 60'000'000'000ull;  // never, unless the grid was not cooperative
        while (load_acquire(arrivals) < target)
            if (now_ns() > deadline) stop();
    }
    sync_block();
}
