// Instead of computing, every warp writes down the tiles of its shares.
#include "lora_step.cu"

constexpr int MOST_TILES = 4096;  // of one warp, in one phase

struct Listing {};

template <class Walk> void list(Walk& walk, Record* to, int& count) {
    for (count = 0; walk.left; count++) {
        if (count == MOST_TILES) stop();
        const unsigned char* from;
        to[count] = walk.next(from);
    }
}

// out: records [workers, phases, MOST_TILES]; groups: how many [workers, phases]
template <> bool lora_step<Listing, FUSED>(const Args& a, BlockMemory& memory, Ring&) {
    const int lane = threadIdx.x % LANES, worker = threadIdx.x / LANES * gridDim.x + blockIdx.x, workers = gridDim.x * WARPS;
    ShrinkWalk shrink(a, memory.shares);
    ExpandWalk expand(a, memory.shares);
    add_costs(a, memory.shares);
    const int *shrinks = memory.shares.shrink_through, *expands = memory.shares.expand_through;
    shrink.start(cut(shrinks, worker, workers), cut(shrinks, worker + 1, workers), lane);
    expand.start(cut(expands, worker, workers), cut(expands, worker + 1, workers), lane);
    if (lane) return true;
    Record* to = static_cast<Record*>(a.out) + worker * 2 * MOST_TILES;
    list(shrink, to, a.groups[worker * 2]);
    list(expand, to + MOST_TILES, a.groups[worker * 2 + 1]);
    return true;
}

KERNEL(list_shares, Listing, FUSED)
