// v = scale * weight * x A: the tiles of A that a warp streams, and what it does with each.
#pragma once
#include "e4m3.cuh"
#include "ring.cuh"

// A warp's shrink jobs, tile by tile. A job: 16 ranks x CHUNKS chunks of K, for up to JOB_ROWS entries.
struct ShrinkWalk {
    const Args& a;
    const ShareMemory& shares;
    const Depth depth;
    const int num_chunks;
    int left;  // units of cost from the beginning of the job at hand to the share's end
    int segment = 0, row = 0, partial = 0, group = 0, chunk = 0;
    Segment s = {};

    DEVICE ShrinkWalk(const Args& args, const ShareMemory& its_shares)
        : a(args), shares(its_shares), depth(args), num_chunks(div_up(args.in_width, CHUNK)), left(0) {}

    DEVICE void start(int begin, int end, int lane) {
        left = end - begin;
        if (left == 0) return;
        int local;
        find_segment(a, shares, true, begin, lane, segment, local);
        s = shares.segment(a, segment);
        const Block& block = a.blocks[s.block];
        const int full = shrink_jobs(a, block) * job_cost(JOB_ROWS);
        row = local / full * JOB_ROWS;
        const int job = local % full / cost();
        left += local % full % cost();
        partial = job / block.groups();
        group = job % block.groups();
        begin_job();
    }

    DEVICE int cost() const { return job_cost(job_rows(s, row)); }
    DEVICE void begin_job() {
        chunk = first_chunk();
        if (left < cost()) left = 0;
    }

    DEVICE int first_chunk() const { return greater(depth.first_chunk, (depth.first_partial + partial) * CHUNKS); }
    DEVICE int last_chunk() const { return lesser(depth.last_chunk, (depth.first_partial + partial + 1) * CHUNKS); }

    DEVICE Record next(const unsigned char*& from) {
        const Block& block = a.blocks[s.block];
        const int base = (depth.first_partial + partial) * CHUNKS, length = lesser(CHUNKS, num_chunks - base);
        const int groups = block.groups();
        from = tile_at(block, s.first_tile + base * groups + group * length + chunk - base);
        Record record;
        ShrinkTile& t = record.shrink;
        t.kind = SHRINK;
        t.first = s.first + row;
        t.rows = job_rows(s, row);
        t.fragments = 2 * lesser(CHUNK / 32, div_up(a.in_width - chunk * CHUNK, 32));
        t.chunk = chunk;
        t.rank = group * 16;
        t.partial = partial;
        t.flags = (chunk == first_chunk() ? FIRST_OF_JOB : 0) | (chunk + 1 == last_chunk() ? LAST_OF_JOB : 0) |
                  (group == 0 && partial == 0 ? MARK_GROUPS | groups << GROUPS_SHIFT : 0);
        t.scale = scale(block);
        advance(groups);
        return record;
    }

    DEVICE float scale(const Block& block) const {
        int p = 0;
#pragma unroll 1
        for (int groups = block.pair(0).groups; groups <= group; groups += block.pair(p).groups) p++;
        return block.pair(p).scale;
    }

    DEVICE void advance(int groups) {
        if (++chunk < last_chunk()) return;
        left -= cost();
        if (left == 0) return;
        if (++group == groups) {
            group = 0;
            if (++partial == depth.partials) {
                partial = 0;
                row += JOB_ROWS;
                if (row >= s.rows) next_segment();
            }
        }
        begin_job();
    }

    DEVICE void next_segment() {
        row = 0;
#pragma unroll 1
        do s = shares.segment(a, ++segment);
        while (s.rows == 0 || a.blocks[s.block].groups() == 0);
    }
};

// Eight consecutive values of an aligned row from column k of the window on, zeros outside it. They stay codes, if that
// is what they are, until they are used.
DEVICE uint4 row_values(const unsigned short* row, int k, int width) {
    return row != nullptr && k >= 0 && k < width ? load_l2(reinterpret_cast<const uint4*>(row + k)) : uint4{0, 0, 0, 0};
}
DEVICE uint2 row_values(const unsigned char* row, int k, int width) {
    return row != nullptr && k >= 0 && k < width ? load_l2(reinterpret_cast<const uint2*>(row + k)) : uint2{0, 0};
}
template <class T> DEVICE uint4 as_operand(const uint4& values) { return values; }
template <class T> DEVICE uint4 as_operand(const uint2& codes) { return expand_eight<T>(codes); }
template <class Row> using Eight = decltype(row_values(static_cast<const Row*>(nullptr), 0, 0));

// The same of any row. No model has such rows: it is rolled up, and slow, to leave the hot loop short.
DEVICE uint4 unaligned_values(const unsigned short* row, int k, int width) {
    uint4 v = {0, 0, 0, 0};
#pragma unroll 1
    for (int i = k; i < k + 8 && row != nullptr; i++) {
        const unsigned half = i >= 0 && i < width ? load_l2(row + i) : 0;
        v = {v.x >> 16 | v.y << 16, v.y >> 16 | v.z << 16, v.z >> 16 | v.w << 16, v.w >> 16 | half << 16};
    }
    return v;
}

DEVICE uint2 unaligned_values(const unsigned char* row, int k, int width) {
    uint2 v = {0, 0};
#pragma unroll 1
    for (int i = k; i < k + 8 && row != nullptr; i++) {
        const unsigned code = i >= 0 && i < width ? load_l2(row + i) : 0;
        v = {v.x >> 8 | v.y << 24, v.y >> 8 | code << 24};
    }
    return v;
}

// Lane (token, quad) holds columns 32 j + 8 quad .. + 7 of the chunk in values[j]: two fragments' worth of B operand.
template <class Row>
DEVICE void load_chunk(Eight<Row> (&values)[8], const Row* row, int k, int width, bool vectors) {
    if (vectors) {
#pragma unroll
        for (int j = 0; j < 8; j++) values[j] = row_values(row, k + j * 32, width);
        return;
    }
#pragma unroll 1
    for (int j = 0; j < 8; j++) {
#pragma unroll
        for (int i = 0; i < 7; i++) values[i] = values[i + 1];
        values[7] = unaligned_values(row, k + j * 32, width);
    }
}

// The sums of one job: ranks token and token + 8, entries 2 quad and 2 quad + 1 of every 8.
template <class Row> struct ShrinkSums {
    float c[JOB_ROWS / 8][4];
    const Row* row[JOB_ROWS / 8];  // of entry `token` of every 8, null beyond the job's

    DEVICE void start(const Args& a, const ShrinkTile& t, int token) {
#pragma unroll
        for (int b = 0; b < JOB_ROWS / 8; b++) {
            c[b][0] = c[b][1] = c[b][2] = c[b][3] = 0;
            row[b] = nullptr;
            const int entry = b * 8 + token;
            if (entry >= t.rows) continue;
            const int64 from = a.in_map ? load_l2(a.in_map + t.first + entry) : t.first + entry;
            row[b] = static_cast<const Row*>(a.rows) + from * a.row_width;
        }
    }

    // A row's scale goes where the routing weight does: no code is multiplied by it.
    DEVICE static float weight(const Args& a, int entry) {
        const float its = a.weights ? load_l2(a.weights + entry) : 1.0f;
        if (sizeof(Row) > 1) return its;
        return its * load_l2(a.scales + (a.in_map ? load_l2(a.in_map + entry) : entry));
    }

    DEVICE void write(const Args& a, const ShrinkTile& t, int token, int quad) const {
        float* partial = a.partial + static_cast<int64>(t.partial) * a.max_entries * a.max_rank + t.rank + token;
#pragma unroll
        for (int b = 0; b < JOB_ROWS / 8; b++)
#pragma unroll
            for (int side = 0; side < 2; side++) {
                const int entry = b * 8 + quad * 2 + side;
                if (entry >= t.rows) continue;
                const float scale = t.scale * weight(a, t.first + entry);
                float* at = partial + static_cast<int64>(t.first + entry) * a.max_rank;
                store(at, c[b][side] * scale);
                store(at + 8, c[b][2 + side] * scale);
            }
    }
};

template <class T, class Row>
DEVICE void shrink_tile(const Args& a, Ring& ring, ShrinkSums<Row>& sums, bool vectors) {
    const ShrinkTile t = ring.front().shrink;
    const int token = ring.lane / 4, quad = ring.lane % 4;
    if (t.flags & FIRST_OF_JOB) sums.start(a, t, token);
    const int k = t.chunk * CHUNK - a.in_begin + quad * 8;
    Eight<Row> x[8];  // of one band of 8 entries; each value makes room for the next band's as soon as it has been used
    load_chunk<Row>(x, sums.row[0], k, a.row_width, vectors);  // on its way while the tile is
    const uint4* fragments = ring.wait();
#pragma unroll
    for (int b = 0; b < JOB_ROWS / 8; b++) {
        if (b * 8 >= t.rows) break;
        const bool more = b + 1 < JOB_ROWS / 8 && (b + 1) * 8 < t.rows;
        const Row* next = more && vectors ? sums.row[b + 1] : nullptr;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (2 * j >= t.fragments) break;
            const uint4 values = as_operand<T>(x[j]);
            mma<T>(sums.c[b], fragments[2 * j * LANES], values.x, values.y);
            mma<T>(sums.c[b], fragments[(2 * j + 1) * LANES], values.z, values.w);
            x[j] = row_values(next, k + j * 32, a.row_width);
        }
        if (more && !vectors) load_chunk<Row>(x, sums.row[b + 1], k, a.row_width, false);
    }
    ring.pop();
    if (t.flags & MARK_GROUPS && ring.lane < t.rows) store(a.groups + t.first + ring.lane, t.flags >> GROUPS_SHIFT);
    if (t.flags & LAST_OF_JOB) sums.write(a, t, token, quad);
}

// v = the sum of its partials, in their order, for all entries; after a grid barrier.
DEVICE void sum_partials(const Args& a) {
    constexpr int AT_ONCE = 8;  // loads under way
    const int partials = Depth(a).partials, vectors = a.max_rank / 4, all = a.num_entries() * vectors;
    const int64 stride = static_cast<int64>(a.max_entries) * a.max_rank;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < all; i += gridDim.x * THREADS) {
        if (i % vectors * 4 >= load_l2(a.groups + i / vectors) * 16) continue;
        float4 sum = load_l2(reinterpret_cast<const float4*>(a.partial) + i);
#pragma unroll 1
        for (int first = 1; first < partials; first += AT_ONCE) {
            float4 more[AT_ONCE];
#pragma unroll
            for (int p = 0; p < AT_ONCE; p++)
                more[p] = load_l2(reinterpret_cast<const float4*>(a.partial + lesser(first + p, partials - 1) * stride) + i);
#pragma unroll
            for (int p = 0; p < AT_ONCE; p++)
                if (first + p < partials) sum.x += more[p].x, sum.y += more[p].y, sum.z += more[p].z, sum.w += more[p].w;
        }
        store(reinterpret_cast<float4*>(a.v) + i, sum);
    }
}
