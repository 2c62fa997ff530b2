// One step: its arguments, its tables, and where its tiles lie. Legend: N entries, K input columns, R lora rank.
// Mirrored by kernels_cuda/layout.py (tiles), tables.py (blocks, segments) and launch.py (the argument list); sizes.cuh is
// made of sizes.py.
#pragma once
#include "sizes.cuh"
#include "warp.cuh"

constexpr int FRAGMENT_BYTES = LORA_FRAGMENT_BYTES;  // 16 x 16 weights, in the order in which the lanes of an MMA hold them
constexpr int TILE_BYTES = LORA_TILE_BYTES;          // at most 16 fragments
constexpr int PAGE_TILES = LORA_PAGE_TILES;          // 2 MiB
constexpr int CHUNK = LORA_CHUNK;                    // columns of A in a tile
constexpr int CHUNKS = LORA_CHUNKS;                  // chunks summed in one partial: the only split of K there is
constexpr int JOB_ROWS = LORA_JOB_ROWS;              // entries that share one copy of a tile
constexpr int MAX_GROUPS = 16;                       // of 16 ranks, in one pair
constexpr int MAX_PAIRS = LORA_MAX_PAIRS;

struct alignas(16) Pair { int groups, out_begin, out_rows; float scale; };  // groups: 16 ranks each; 0: zeros
struct alignas(16) Block {
    const uint64* its_pages;
    int its_groups, its_tiles;        // of all pairs: groups of ranks; jobs of B for up to JOB_ROWS entries, all output rows
    int its_out_rows, its_num_pairs;  // the pairs cover [0, out_rows) without gaps
    int unused[2];
    Pair its_pairs[MAX_PAIRS];

    DEVICE const uint64* pages() const { return load(&its_pages); }
    DEVICE int groups() const { return load(&its_groups); }
    DEVICE int tiles() const { return load(&its_tiles); }
    DEVICE int out_rows() const { return load(&its_out_rows); }
    DEVICE int num_pairs() const { return load(&its_num_pairs); }
    DEVICE Pair pair(int i) const { return load(&its_pairs[i]); }
};
struct alignas(16) Segment { int block, first_tile, first, rows; };  // first_tile: the block's, in its pages

struct Args {
    const void* rows;        // [rows, row_width] 16-bit, or codes of 8: see e4m3.cuh
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
    const float* scales;     // [rows] of codes

    DEVICE int num_segments() const { return load_l2(counts); }
    DEVICE int num_entries() const { return load_l2(counts + 1); }
    DEVICE int num_out_rows() const { return load_l2(counts + 2); }
    DEVICE Segment segment(int i) const {
        const uint4 s = load_l2(reinterpret_cast<const uint4*>(segments + i));
        return {static_cast<int>(s.x), static_cast<int>(s.y), static_cast<int>(s.z), static_cast<int>(s.w)};
    }
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

// Up to so many partials an entry, and so many in all, each reader adds them itself: the sum and a barrier of the grid take
// longer (docs/kernels.md). The order of the sums is the same.
constexpr int FEW_PARTIALS = 8, FEW_SUMS = 2048;

// Output rows of a full tile of B: as many blocks of 16 as fit beside each other.
DEVICE int tile_blocks(int groups) { return groups == 0 ? 16 : 16 / groups; }

// Finds the tiles of a pair's B that a window meets and that the window before it did not; false if there is none.
DEVICE bool tiles_of(const Args& a, const Pair& pair, int window, int& next, int& end) {
    const int begin = greater(a.begin(window), pair.out_begin) - pair.out_begin;
    const int stop = lesser(a.end(window), pair.out_begin + pair.out_rows) - pair.out_begin;
    if (begin >= stop) return false;
    const int tile_rows = 16 * tile_blocks(pair.groups);
    next = greater(next, begin / tile_rows);
    end = div_up(stop, tile_rows);
    return next < end;
}

// The address of a tile. Pages are anywhere; a tile never crosses one.
DEVICE const unsigned char* tile_at(const Block& block, int tile) {
    const uint64 page = load(block.pages() + tile / PAGE_TILES);
    return reinterpret_cast<const unsigned char*>(page) + static_cast<int64>(tile % PAGE_TILES) * TILE_BYTES;
}

constexpr uint64 PATIENCE_NS = 2'000'000'000;  // of a barrier: all blocks are at the same step

// All blocks of the grid arrive, then all go on. All of them run once the blocks of other kernels have left. Returns false
// if a block did not arrive in time, or gave up before: then no block goes on, and arrivals[1] says so. `flag` is the
// block's.
DEVICE bool grid_barrier(uint64* arrivals, int& flag) {
    sync_block();
    if (threadIdx.x == 0) {
        const uint64 grid = gridDim.x;
        const uint64 target = (add_release(arrivals, 1) / grid + 1) * grid;
        const uint64 deadline = now_ns() + PATIENCE_NS;
        flag = 1;
        unsigned looks = 0;
        while (load_acquire(arrivals) < target) {
            if (++looks % RARELY) continue;
            if (now_ns() > deadline) store_release(arrivals + 1, 1);
            if (load_acquire(arrivals + 1)) {
                flag = 0;
                break;
            }
        }
    }
    sync_block();
    return flag;
}
