// One decoding step's (token, expert) pairs, sorted by adapter and expert into segments. Semantics: kernels_cuda/routing.py.
//
// One block, and no memory but its own: a stable radix sort of the pairs by adapter * experts + expert, four bits at a
// time. Its cost grows with the pairs and with the bits of the largest key, not with the number of buckets.
#include "sizes.cuh"
#include "warp.cuh"

constexpr int PAIR_BITS = LORA_ROUTE_PAIR_BITS;
constexpr int MAX_PAIRS = 1 << PAIR_BITS;
constexpr int DIGIT_BITS = LORA_ROUTE_DIGIT_BITS, DIGITS = 1 << DIGIT_BITS;

struct RouteArgs {
    const int* experts;    // [tokens, top_k]
    const float* weights;  // [tokens, top_k], or null
    const int* adapters;   // [tokens]: rows of `directory`, or -1
    const int* directory;  // [num_adapters, 3]: row of the block table, first tile, tiles of each expert; none: not here
    uint4* segments;       // block, first tile, first entry, entries
    int* counts;           // segments, entries, tokens, tokens with an entry
    int* token;            // of each entry, like the following
    int* pair;
    float* weight;
    int* row;              // null, or of each entry: its token among those with an entry
    int* row_token;        // of each of those
    int tokens, top_k, num_experts, num_adapters;
    int first_expert, end_expert;  // no others count
};

struct BlockMemory {
    unsigned items[2][MAX_PAIRS + MAX_PAIRS / LANES];         // key << PAIR_BITS | pair
    alignas(16) unsigned short before[DIGITS][THREADS];       // items with a digit, before each thread's own
    int totals[WARPS];
};

// An item's place: consecutive shares of consecutive threads start in different banks.
DEVICE int place(int i) { return i + i / LANES; }

// The sum of the values of all threads before this one; all threads call it.
DEVICE int sum_before(int value, int* totals, int& all) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const int inclusive = sum_through(value, lane);
    if (lane == LANES - 1) totals[warp] = inclusive;
    sync_block();
    int earlier = 0;
    all = 0;
    for (int w = 0; w < WARPS; w++) {
        if (w < warp) earlier += totals[w];
        all += totals[w];
    }
    sync_block();
    return earlier + inclusive - value;
}

// before[digit][thread] from counts to their sums, all threads of one digit before the next digit.
DEVICE void sum_digits(BlockMemory& memory) {
    static_assert(DIGITS == 16, "a thread sums two vectors of eight");
    uint4* mine = reinterpret_cast<uint4*>(memory.before) + threadIdx.x * 2;
    const uint4 low = mine[0], high = mine[1];
    unsigned words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    int sum = 0, all;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += (words[i] & 0xffff) + (words[i] >> 16);
    int next = sum_before(sum, memory.totals, all);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int second = next + (words[i] & 0xffff), after = second + (words[i] >> 16);
        words[i] = next | second << 16;
        next = after;
    }
    mine[0] = {words[0], words[1], words[2], words[3]};
    mine[1] = {words[4], words[5], words[6], words[7]};
}

// One stable pass by the digit at `shift`. A thread's share is consecutive, and it moves its items in order.
DEVICE void sort_pass(BlockMemory& memory, const unsigned* from, unsigned* to, int begin, int end, int shift) {
    const int thread = threadIdx.x;
#pragma unroll
    for (int digit = 0; digit < DIGITS; digit++) memory.before[digit][thread] = 0;
    for (int i = begin; i < end; i++) memory.before[from[place(i)] >> shift & (DIGITS - 1)][thread]++;
    sync_block();
    sum_digits(memory);
    sync_block();
    for (int i = begin; i < end; i++) {
        const unsigned item = from[place(i)];
        to[place(memory.before[item >> shift & (DIGITS - 1)][thread]++)] = item;
    }
    sync_block();
}

DEVICE void write_segment(const RouteArgs& a, int segment, int key, int first, int end) {
    const int* row = a.directory + key / a.num_experts * 3;
    a.segments[segment] = {static_cast<unsigned>(row[0]),
                           static_cast<unsigned>(row[1] + key % a.num_experts * row[2]),
                           static_cast<unsigned>(first), static_cast<unsigned>(end - first)};
}

// The tokens that have an entry, counted in their order; `number` has room for all tokens.
DEVICE void number_tokens(const RouteArgs& a, BlockMemory& memory, const unsigned* items, int* number, int entries) {
    const int thread = threadIdx.x, share = (a.tokens + THREADS - 1) / THREADS;
    const int begin = share * thread, end = begin + share < a.tokens ? begin + share : a.tokens;
    sync_block();
    for (int t = thread; t < a.tokens; t += THREADS) number[t] = 0;
    sync_block();
    for (int i = thread; i < entries; i += THREADS) number[(items[place(i)] & (MAX_PAIRS - 1)) / a.top_k] = 1;
    sync_block();
    int mine = 0, all;
    for (int t = begin; t < end; t++) mine += number[t];
    int next = sum_before(mine, memory.totals, all);
    for (int t = begin; t < end; t++)
        if (number[t]) a.row_token[next] = t, number[t] = next++;
    sync_block();
    for (int i = thread; i < entries; i += THREADS)
        a.row[i] = number[(items[place(i)] & (MAX_PAIRS - 1)) / a.top_k];
    if (thread == 0) a.counts[3] = all;
}

DEVICE void route_pairs(const RouteArgs& a, BlockMemory& memory) {
    const int thread = threadIdx.x, pairs = a.tokens * a.top_k;
    const int nobody = a.num_adapters * a.num_experts;  // the key of pairs without an adapter: they sort last
    unsigned *items = memory.items[0], *others = memory.items[1];
    for (int pair = thread; pair < pairs; pair += THREADS) {
        const int adapter = a.adapters[pair / a.top_k], expert = a.experts[pair];
        const bool live = adapter >= 0 && adapter < a.num_adapters && expert >= a.first_expert &&
                          expert < a.end_expert && a.directory[adapter * 3 + 2] > 0;
        const int key = live ? adapter * a.num_experts + expert : nobody;
        items[place(pair)] = static_cast<unsigned>(key) << PAIR_BITS | pair;
    }
    const int share = (pairs + THREADS - 1) / THREADS;
    const int begin = share * thread, end = begin + share < pairs ? begin + share : pairs;
    sync_block();
    for (int shift = PAIR_BITS; shift < 32 && nobody >> (shift - PAIR_BITS); shift += DIGIT_BITS) {
        sort_pass(memory, items, others, begin, end, shift);
        unsigned* const sorted = others;
        others = items;
        items = sorted;
    }

    int starts = 0, live = 0;
    for (int i = begin; i < end; i++) {
        const int key = items[place(i)] >> PAIR_BITS;
        if (key == nobody) break;
        live++;
        starts += i == 0 || static_cast<int>(items[place(i - 1)] >> PAIR_BITS) != key;
    }
    int all;
    int segment = sum_before(live << 16 | starts, memory.totals, all) & 0xffff;
    const int segments = all & 0xffff, entries = all >> 16;
    int* const first = reinterpret_cast<int*>(others);
    for (int i = begin; i < begin + live; i++)
        if (i == 0 || items[place(i - 1)] >> PAIR_BITS != items[place(i)] >> PAIR_BITS) first[segment++] = i;
    sync_block();

    for (int s = thread; s < segments; s += THREADS)
        write_segment(a, s, items[place(first[s])] >> PAIR_BITS, first[s], s + 1 < segments ? first[s + 1] : entries);
    for (int i = thread; i < entries; i += THREADS) {
        const int pair = items[place(i)] & (MAX_PAIRS - 1);
        a.token[i] = pair / a.top_k;
        a.pair[i] = pair;
        if (a.weights) a.weight[i] = a.weights[pair];
    }
    if (thread == 0) a.counts[0] = segments, a.counts[1] = entries, a.counts[2] = a.tokens;
    if (a.row) number_tokens(a, memory, items, reinterpret_cast<int*>(others), entries);
}

// Arguments are all 64 bits wide. Grid: one block. Shared memory: sizeof(BlockMemory).
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    route(const int* experts, const float* weights, const int* adapters, const int* directory, uint4* segments,
          int* counts, int* token, int* pair, float* weight, int* row, int* row_token, int64 tokens, int64 top_k,
          int64 num_experts, int64 num_adapters, int64 first_expert, int64 end_expert) {
    SHARED_MEMORY(shared);
    const RouteArgs a = {experts,     weights,          adapters,          directory,         segments,
                         counts,      token,            pair,              weight,            row,
                         row_token,   int(tokens),      int(top_k),        int(num_experts),  int(num_adapters),
                         int(first_expert), int(end_expert)};
    route_pairs(a, *reinterpret_cast<BlockMemory*>(shared));
}
