// out[u] = the sum of delta[i] over the entries i with out_map[i] = u, in the order of i.
#pragma once
#include "ring.cuh"

constexpr int SLAB = 128;  // columns that a warp sums at a time
constexpr int EACH = 16;   // entries that a lane looks at at a time
enum : unsigned { MOST_COMBINED = STAGES * TILE_BYTES / sizeof(unsigned short) };  // entries of a step; see `list`

// A warp's shares of (output row, slab of columns). The list of a row's entries lies where its tiles were.
struct Combine {
    const Args& a;
    unsigned short* const list;
    const int lane, slabs;
    int begin, end, row = -1, length = 0;

    DEVICE Combine(const Args& args, WarpMemory& memory, int lane_, int worker, int workers)
        : a(args), list(reinterpret_cast<unsigned short*>(memory.tiles)), lane(lane_), slabs(div_up(args.out_width, SLAB)) {
        const int64 all = static_cast<int64>(a.num_out_rows()) * slabs;
        begin = static_cast<int>(all * worker / workers);
        end = static_cast<int>(all * (worker + 1) / workers);
    }

    // Before the barrier: the search for the first row's entries overlaps with other warps' tiles.
    DEVICE void prepare() {
        if (begin < end) find_entries(begin / slabs);
    }

    template <class T> DEVICE void run() {
        for (int share = begin; share < end; share++) {
            if (share / slabs != row) find_entries(share / slabs);
            sum<T>(share % slabs * SLAB + lane * 4);
        }
    }

    DEVICE void find_entries(int wanted) {
        row = wanted, length = 0;
        sync_warp();
        const int entries = a.num_entries();
        for (int base = 0; base < entries; base += EACH * LANES) {
            const int first = base + lane * EACH;  // this lane's run of entries
            int to[EACH], mine = 0;
#pragma unroll
            for (int i = 0; i < EACH; i++) to[i] = first + i < entries ? load_l2(a.out_map + first + i) : -1;
#pragma unroll
            for (int i = 0; i < EACH; i++) mine += to[i] == row;
            if (!votes(mine > 0)) continue;
            const int inclusive = sum_through(mine, lane);
            int at = length + inclusive - mine;
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (to[i] == row) list[at++] = static_cast<unsigned short>(first + i);
            length += shuffle(inclusive, LANES - 1);
        }
        sync_warp();
    }

    template <class T> DEVICE void sum(int column) {
        if (column >= a.out_width) return;
        const bool whole = a.out_width % 4 == 0;
        float4 total = {0, 0, 0, 0};
#pragma unroll 4
        for (int i = 0; i < length; i++) {
            const float* at = a.delta + static_cast<int64>(list[i]) * a.out_width + column;
            const float4 d = whole ? load_l2(reinterpret_cast<const float4*>(at)) : some(at, a.out_width - column);
            total.x += d.x, total.y += d.y, total.z += d.z, total.w += d.w;
        }
        unsigned short* out = static_cast<unsigned short*>(a.out) + static_cast<int64>(row) * a.out_width + column;
        const uint2 packed = {pack<T>(total.x, total.y), pack<T>(total.z, total.w)};
        if (whole && reinterpret_cast<uint64>(out) % 8 == 0) {
            store(reinterpret_cast<uint2*>(out), packed);
            return;
        }
        const unsigned short halves[4] = {static_cast<unsigned short>(packed.x), static_cast<unsigned short>(packed.x >> 16),
                                          static_cast<unsigned short>(packed.y), static_cast<unsigned short>(packed.y >> 16)};
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (column + i < a.out_width) store(out + i, halves[i]);
    }

    DEVICE static float4 some(const float* at, int count) {
        return {load_l2(at), count > 1 ? load_l2(at + 1) : 0, count > 2 ? load_l2(at + 2) : 0,
                count > 3 ? load_l2(at + 3) : 0};
    }
};
