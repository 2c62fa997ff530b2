// Accesses that nothing orders: what PTX calls a data race, of which one is a store. The second access reports it.
//
// The model of memory.cuh shows a load that misses what it has not acquired. This one shows what no value does: a store
// that nothing keeps behind the loads of others, and what is seen in time by luck. A warp has a clock of all warps; a
// release leaves it at its place, an acquire takes what was left there, where the scopes of both hold both ends. A fence
// makes a release of each relaxed store after it, and an acquire of each relaxed load before it. Stores
// and loads of kernels are compared, without those that are atomic (two releases are to each other), of hosts, copy
// engines and network cards. Hosts are taken to know all that was released to the system and all that has ended, and
// what a host starts or writes knows that too: so an order that is none may be missed, and none that there is.
#pragma once
#include "idle.cuh"

constexpr int CELL_BYTES = 1, LINE_CELLS = 16, READERS = 4;  // rows of codes end at any byte; a fifth reader of a cell is forgotten
struct Access { int warp = -1; uint64 at = 0; bool releases = false; };
struct Cell { Access store, loads[READERS]; };
struct ShadowLine { Cell cells[LINE_CELLS]; };
struct Sync { Clock system, of_device[16]; };  // of releases that the system, and that a GPU sees
inline std::unordered_map<uintptr_t, ShadowLine> shadow;
inline std::unordered_map<const void*, Sync> syncs;
inline Clock host_clock;
inline bool warp_lives[WRITERS];
inline int next_warp;

inline void join(Clock& mine, const Clock& others) {
    for (int i = 0; i < WRITERS; i++) mine.of[i] = mine.of[i] > others.of[i] ? mine.of[i] : others.of[i];
}
inline Warp& my_clocked_warp() { return current->block->warps[current->index / 32]; }
inline int clock_device() { return current->block->grid->device; }

inline void forget_races() {
    shadow.clear(), syncs.clear(), host_clock = Clock(), next_warp = 0;
    for (bool& lives : warp_lives) lives = false;
}
// A warp's number may have been another's that has ended: its clock goes on from there.
inline void begin_clock(Warp& warp) {
    for (int tries = 0; tries < WRITERS && warp_lives[next_warp % WRITERS]; tries++) next_warp++;
    warp.number = next_warp++ % WRITERS, warp.clock = host_clock;
    warp_lives[warp.number] = true;
    warp.clock.of[warp.number]++;
}
inline void end_clock(Warp& warp) {
    join(host_clock, warp.clock);
    warp_lives[warp.number] = false;
}
inline void leave_clock(const void* p, bool system) {
    Warp& mine = my_clocked_warp();
    Sync& sync = syncs[p];
    join(sync.of_device[clock_device()], mine.clock);
    if (system) join(sync.system, mine.clock), join(host_clock, mine.clock);
    mine.clock.of[mine.number]++;
}
inline void take_clock(const void* p, bool system) {
    const auto found = syncs.find(p);
    if (found == syncs.end()) return;
    join(my_clocked_warp().clock, found->second.of_device[clock_device()]);
    if (system) join(my_clocked_warp().clock, found->second.system);
}
inline void take_at_next_fence(const void* p) {  // a relaxed load
    const auto found = syncs.find(p);
    if (found != syncs.end()) join(my_clocked_warp().found, found->second.system);
}
inline void leave_fenced(const void* p) {  // a relaxed store
    join(syncs[p].system, my_clocked_warp().fenced);
    join(syncs[p].of_device[clock_device()], my_clocked_warp().fenced);
}
inline void fence_clock() {
    Warp& mine = my_clocked_warp();
    join(mine.clock, mine.found);
    mine.fenced = mine.clock;
    mine.clock.of[mine.number]++;
}
// An atomic load of what another warp has stored as plain memory, and nothing orders.
inline void compare_atomic(const void* p) {
    const auto line = world.races ? shadow.find(reinterpret_cast<uintptr_t>(p) / LINE_CELLS) : shadow.end();
    if (line == shadow.end()) return;
    const Access& store = line->second.cells[reinterpret_cast<uintptr_t>(p) % LINE_CELLS].store;
    if (store.warp >= 0 && !store.releases && store.at > my_clocked_warp().clock.of[store.warp])
        fail("a race: an atomic load of what was stored as plain memory");
}
// Whether a host that has read a word finds there what kernels have stored (or, `read`, may write what they have read).
inline bool is_ordered(const void* word, const unsigned char* p, uint64 nbytes, bool read) {
    const Clock& known = syncs[word].system;
    const auto before = [&](const Access& a) { return a.warp < 0 || a.at <= known.of[a.warp]; };
    for (uintptr_t at = reinterpret_cast<uintptr_t>(p); at < reinterpret_cast<uintptr_t>(p) + nbytes; at++) {
        const auto line = shadow.find(at / LINE_CELLS);
        if (line == shadow.end()) continue;
        const Cell& cell = line->second.cells[at % LINE_CELLS];
        if (!before(cell.store)) return false;
        for (const Access& load : cell.loads)
            if (read && !before(load)) return false;
    }
    return true;
}
inline void meet(Clock& block) {  // at a barrier of the block
    join(block, my_clocked_warp().clock);
    my_clocked_warp().clock.of[my_clocked_warp().number]++;
}

inline void report(const void* p, const char* what) {
    static char text[160];
    const Grid& grid = *current->block->grid;
    std::snprintf(text, sizeof(text), "a race: %s, GPU %d, block %d, thread %d, %+lld bytes of what GPUs share", what, grid.device,
                  current->block->index, current->index, static_cast<long long>(static_cast<const unsigned char*>(p) - world.shared_begin));
    fail(text);
}
inline void compare(const void* p, int size, bool stores, bool releases = false) {
    if (!world.races) return;
    const Warp& mine = my_clocked_warp();
    const auto before = [&](const Access& a) { return a.warp < 0 || a.at <= mine.clock.of[a.warp]; };
    const Access now = {mine.number, mine.clock.of[mine.number], releases};
    const auto begin = reinterpret_cast<uintptr_t>(p) / CELL_BYTES, end = (reinterpret_cast<uintptr_t>(p) + size - 1) / CELL_BYTES;
    ShadowLine* line = nullptr;
    for (uintptr_t at = begin; at <= end; at++) {
        if (!line || at % LINE_CELLS == 0) line = &shadow[at / LINE_CELLS];
        Cell& cell = line->cells[at % LINE_CELLS];
        if (!before(cell.store) && !(releases && cell.store.releases)) return report(p, stores ? "a store that nothing keeps behind a store" : "a load that nothing keeps behind a store");
        Access* place = nullptr;
        for (Access& load : cell.loads) {
            if (stores && !before(load)) return report(p, "a store that nothing keeps behind a load");
            if (stores) load = Access();
            else if (load.warp == now.warp) { place = &load; break; }
            else if (!place && (load.warp < 0 || before(load))) place = &load;
        }
        if (stores) cell.store = now;
        else if (place) *place = now;
    }
}
