// delta = v B: the tiles of B that a warp streams, and what it does with each.
#pragma once
#include "ring.cuh"

// A warp's expand jobs, one tile each, for up to JOB_ROWS entries.
struct ExpandWalk {
    const Args& a;
    const ShareMemory& shares;
    int left = 0;  // units of cost from the beginning of the job at hand to the share's end
    int segment = 0, row = 0, pair = 0, window = 0;
    int tile = 0, end = 0, base_tile = 0;  // a range of the pair's tiles, counted from base_tile: its first in the pages
    int rank = 0;
    Segment s = {};

    DEVICE ExpandWalk(const Args& args, const ShareMemory& its_shares) : a(args), shares(its_shares) {}

    DEVICE void start(int begin, int stop, int lane) {
        left = stop - begin;
        if (left == 0) return;
        int local;
        find_segment(a, shares, false, begin, lane, segment, local);
        s = shares.segment(a, segment);
        const int full = expand_tiles(a, a.blocks[s.block]) * job_cost(JOB_ROWS);
        row = local / full * JOB_ROWS;
        int job = local % full / cost();
        left += local % full % cost();
        enter();
#pragma unroll 1
        while (find_range() && job >= end - tile) job -= end - tile, window++;
        tile += job;
        if (left < cost()) left = 0;
    }

    DEVICE int cost() const { return job_cost(job_rows(s, row)); }

    // Goes to before the first tile for the entries from `row` on.
    DEVICE void enter() {
        pair = window = end = rank = 0;
        base_tile = s.first_tile + div_up(a.in_width, CHUNK) * a.blocks[s.block].groups();
    }

    // Finds the next range of tiles, from (pair, window) on, that is not empty; false if these entries have none.
    DEVICE bool find_range() {
        const Block& block = a.blocks[s.block];
#pragma unroll 1
        for (; pair < block.num_pairs(); pair++) {
            const Pair p = block.pair(pair);
#pragma unroll 1
            for (; window < a.num_windows; window++) {
                tile = end;
                if (tiles_of(a, p, window, tile, end)) return true;
            }
            if (p.groups) base_tile += div_up(p.out_rows, 16 * tile_blocks(p.groups));
            rank += 16 * p.groups;
            window = end = 0;
        }
        return false;
    }

    DEVICE Record next(const unsigned char*& from) {
        const Block& block = a.blocks[s.block];
        const Pair p = block.pair(pair);
        const int blocks = tile_blocks(p.groups), first = tile * 16 * blocks;
        from = p.groups ? tile_at(block, base_tile + tile) : nullptr;
        Record record;
        ExpandTile& t = record.expand;
        t.kind = EXPAND;
        t.first = s.first + row;
        t.rows = job_rows(s, row);
        t.groups = p.groups;
        t.rank = rank;
        t.row = p.out_begin + first;
        t.end = p.out_begin + p.out_rows;
        t.blocks = lesser(blocks, div_up(p.out_rows - first, 16));
        t.fragments = t.blocks * p.groups;
        advance();
        return record;
    }

    DEVICE void advance() {
        left -= cost();
        if (left == 0) return;
        if (++tile == end) next_range();
        if (left < cost()) left = 0;
    }

    DEVICE void next_range() {
        window++;
#pragma unroll 1
        while (!find_range()) {
            row += JOB_ROWS;
            if (row >= s.rows) {
                row = 0;
#pragma unroll 1
                do s = shares.segment(a, ++segment);
                while (s.rows == 0);
            }
            enter();
        }
    }
};

// The place of v: one sum per entry and rank, or `count` partial sums that are still to be added.
struct Partials {
    const float* first;
    int count;
};

// v of `rows` entries of a job, from its `first` on, as B operands for 8 entries each, every float as the sum of two 16-bit
// ones: (high, low) of group g of entries 8 b .. in to[b * groups + g]. Each lane has another float4 under way: while
// weights stream, a trip to L2 takes microseconds. Columns beyond `rows` hold stale values; their products are never stored.
template <class T>
DEVICE void stage_v(const Args& a, const Partials& sums, const ExpandTile& t, int first, int rows, uint4 (*to)[LANES], int lane) {
    const int fours = 4 * t.groups;  // of an entry
    const int64 stride = static_cast<int64>(a.max_entries) * a.max_rank / 4;
#pragma unroll 1
    for (int i = lane; i < rows * fours; i += LANES) {
        const int entry = i / fours, four = i % fours;
        const float* const v = sums.first + static_cast<int64>(t.first + first + entry) * a.max_rank + t.rank + four * 4;
        const float4* const its = reinterpret_cast<const float4*>(v);
        float4 f[FEW_PARTIALS];
#pragma unroll
        for (int p = 0; p < FEW_PARTIALS; p++) f[p] = p < sums.count ? load_l2(its + p * stride) : float4{0, 0, 0, 0};
#pragma unroll
        for (int p = 1; p < FEW_PARTIALS; p++)
            if (p < sums.count) f[0].x += f[p].x, f[0].y += f[p].y, f[0].z += f[p].z, f[0].w += f[p].w;
        const unsigned xy = pack<T>(f[0].x, f[0].y), zw = pack<T>(f[0].z, f[0].w);
        float x, y, z, w;
        unpack<T>(xy, x, y);
        unpack<T>(zw, z, w);
        to[entry / 8 * t.groups + four / 4][entry % 8 * 4 + four % 4] = {xy, zw, pack<T>(f[0].x - x, f[0].y - y),
                                                                         pack<T>(f[0].z - z, f[0].w - w)};
    }
}

// Returns an output row's column in the result, or -1 outside the windows.
DEVICE int column_of(const Args& a, int row) {
    for (int w = 0, column = 0; w < a.num_windows; column += a.end(w) - a.begin(w), w++)
        if (row >= a.begin(w) && row < a.end(w)) return column + row - a.begin(w);
    return -1;
}

template <class T> struct HalfOut {  // results, 16 bit
    using Element = unsigned short;
    static constexpr int PAIR_BYTES = 4;
    DEVICE static Element* row(const Args& a, int entry) {
        return static_cast<Element*>(a.out) + static_cast<int64>(entry) * a.out_width;
    }
    DEVICE static void one(Element* at, float value) { store(at, static_cast<Element>(pack<T>(value, 0))); }
    DEVICE static void two(Element* at, float low, float high) { store(reinterpret_cast<unsigned*>(at), pack<T>(low, high)); }
    DEVICE static void eight(Element* at, const float (&f)[8]) {
        store(reinterpret_cast<uint4*>(at), uint4{pack<T>(f[0], f[1]), pack<T>(f[2], f[3]), pack<T>(f[4], f[5]), pack<T>(f[6], f[7])});
    }
};

struct FloatOut {  // deltas, to be summed per token afterwards
    using Element = float;
    static constexpr int PAIR_BYTES = 8;
    DEVICE static Element* row(const Args& a, int entry) { return a.delta + static_cast<int64>(entry) * a.out_width; }
    DEVICE static void one(Element* at, float value) { store(at, value); }
    DEVICE static void two(Element* at, float low, float high) { store(reinterpret_cast<float2*>(at), float2{low, high}); }
    DEVICE static void eight(Element* at, const float (&f)[8]) {
        store(reinterpret_cast<float4*>(at), float4{f[0], f[1], f[2], f[3]});
        store(reinterpret_cast<float4*>(at) + 1, float4{f[4], f[5], f[6], f[7]});
    }
};

DEVICE bool aligned(const void* p, int bytes) { return reinterpret_cast<uint64>(p) % bytes == 0; }

// `count` (2, 4, 6 or 8) consecutive output rows of one entry, from `row` on; those at `end` or beyond are padding.
template <class Out> DEVICE void store_rows(const Args& a, int entry, int row, int count, int end, float (&f)[8]) {
    typename Out::Element* out = Out::row(a, entry);
    const int column = column_of(a, row);
    const bool together = column >= 0 && row + count <= end && column_of(a, row + count - 1) == column + count - 1;
    if (together && count == 8 && aligned(out + column, 16)) {
        Out::eight(out + column, f);
    } else if (together && aligned(out + column, Out::PAIR_BYTES)) {
#pragma unroll
        for (int i = 0; i < 8; i += 2)
            if (i < count) Out::two(out + column + i, f[i], f[i + 1]);
    } else {  // at the edge of a window; rolled up, since it is rare: the next value is always the first
#pragma unroll 1
        for (int i = row; i < lesser(row + count, end); i++) {
            const int at = column_of(a, i);
            if (at >= 0) Out::one(out + at, f[0]);
#pragma unroll
            for (int j = 0; j < 7; j++) f[j] = f[j + 1];
        }
    }
}

// A tile for entries 8 b .. 8 b + 7, in bands of up to 4 blocks of 16 output rows. Lane (line, quad) ends with
// 2 * (blocks of the band) consecutive rows of entries 2 quad and 2 quad + 1: packing puts the rows of B so.
template <class T, class Out>
DEVICE void expand_entries(const Args& a, const ExpandTile& t, const uint4* fragments, const uint4 (*v_operand)[LANES],
                           int b, int lane) {
    const int line = lane / 4, entry = b * 8 + lane % 4 * 2;
    for (int band = 0; band < t.blocks; band += 4) {
        const int blocks = lesser(4, t.blocks - band);
        float c[4][4] = {};
        const uint4* weights = fragments + band * t.groups * LANES;
#pragma unroll 2
        for (int g = 0; g < t.groups; g++) {
            const uint4 v = v_operand[g][lane];
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (i < blocks) {
                    const uint4 w = weights[(i * t.groups + g) * LANES];
                    mma<T>(c[i], w, v.x, v.y);
                    mma<T>(c[i], w, v.z, v.w);
                }
        }
        float f[8] = {c[0][0], c[0][2], c[1][0], c[1][2], c[2][0], c[2][2], c[3][0], c[3][2]};
        const int row = t.row + band * 16 + line * 2 * blocks;
#pragma unroll 1
        for (int side = 0; side < 2 && entry + side < t.rows; side++) {
            store_rows<Out>(a, t.first + entry + side, row, 2 * blocks, t.end, f);
#pragma unroll
            for (int i = 0; i < 8; i++) f[i] = c[i / 2][i % 2 * 2 + 1];
        }
    }
}

// Computes all tiles of B that are left. v stays staged from tile to tile, if that of all the job's entries fits.
template <class T, class Out, class Producer>
DEVICE void expand_all(const Args& a, const Partials& sums, Ring& ring, Producer& refill) {
    uint4(*v)[LANES] = ring.memory.v;
    int first = -1, rank = -1;
    while (!ring.empty()) {
        const ExpandTile t = ring.front().expand;
        const int eights = div_up(t.rows, 8);
        const bool fits = t.groups * eights <= MAX_GROUPS;
        if (fits && t.groups > 0 && (t.first != first || t.rank != rank)) {
            sync_warp();
            stage_v<T>(a, sums, t, 0, t.rows, v, ring.lane);
            sync_warp();
        }
        first = fits ? t.first : -1, rank = fits && t.groups > 0 ? t.rank : -1;
        const uint4* fragments = ring.wait();
        for (int b = 0; b < eights; b++) {
            if (!fits) {
                sync_warp();
                stage_v<T>(a, sums, t, b * 8, lesser(t.rows - b * 8, 8), v, ring.lane);
                sync_warp();
            }
            expand_entries<T, Out>(a, t, fragments, fits ? v + b * t.groups : v, b, ring.lane);
        }
        ring.pop();
        refill();
    }
}
