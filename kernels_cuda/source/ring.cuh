// A warp's own ring of tiles: it begins copies STAGES tiles ahead of its arithmetic, and waits for no other warp. It
// lives as long as its kernel, through all of its steps: a barrier that is live must not be initialised again.
#pragma once
#include "shares.cuh"

struct alignas(16) ShrinkTile { int kind, first, rows, fragments, chunk, rank, partial, flags; float scale; };
struct alignas(16) ExpandTile { int kind, first, rows, fragments, groups, rank, row, end, blocks; };
union alignas(16) Record { ShrinkTile shrink; ExpandTile expand; };

enum Kind { SHRINK, EXPAND };
enum ShrinkFlags { FIRST_OF_JOB = 1, LAST_OF_JOB = 2, MARK_GROUPS = 4, GROUPS_SHIFT = 8 };

struct WarpMemory {
    alignas(128) unsigned char tiles[STAGES][TILE_BYTES];
    uint4 v[MAX_GROUPS][LANES];
    Record records[STAGES];
    CopyBarrier barriers[STAGES];
    int flag;  // of the first warp's: see grid_barrier
};

struct Ring {
    WarpMemory& memory;
    const int lane;
    unsigned begun = 0, done = 0;

    DEVICE Ring(WarpMemory& warp_memory, int warp_lane) : memory(warp_memory), lane(warp_lane) {
        if (lane == 0)
            for (int stage = 0; stage < STAGES; stage++) copy_init(&memory.barriers[stage]);
        sync_warp();
    }
    DEVICE bool full() const { return begun - done == STAGES; }
    DEVICE bool empty() const { return begun == done; }
    DEVICE void push(const Record& record, const unsigned char* from) {
        const unsigned stage = begun++ % STAGES;
        if (lane == 0) memory.records[stage] = record;
        copy_begin(memory.tiles[stage], from, record.shrink.fragments * FRAGMENT_BYTES, &memory.barriers[stage], lane);
        sync_warp();
    }
    DEVICE const Record& front() const { return memory.records[done % STAGES]; }
    DEVICE const uint4* wait() {
        const unsigned stage = done % STAGES;
        copy_wait(&memory.barriers[stage], (done / STAGES) % 2, full());
        return reinterpret_cast<const uint4*>(memory.tiles[stage]) + lane;
    }
    DEVICE void drain() {  // no copy may arrive after the kernel's end
        while (!empty()) {
            wait();
            pop();
        }
    }
    DEVICE void pop() {  // all lanes have read the tile
        sync_warp();
        done++;
    }
};
