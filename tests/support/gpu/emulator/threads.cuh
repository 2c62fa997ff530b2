// GPU threads on a CPU: each has a stack of its own, and they take turns. run.cpp decides which is next, and how time passes.
//
// A thread yields where a GPU thread would wait, and a lone kernel's threads nowhere else. In a world of several
// kernels seeds choose: a thread may yield at any access to memory, so that others come between any two of them.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <vector>

#define DEVICE inline
#define __global__
#define __launch_bounds__(...)
#define SHARED_MEMORY(name) unsigned char* name = current->block->shared

using uint64 = unsigned long long;
using int64 = long long;
struct Bf16 {};
struct Fp16 {};
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

struct Exchange {  // one collective operation of a group of threads
    int arrived = 0;
    uint64 round = 0;
    uint64 sent[32];
    uint64 received[32];
    void* operands[32][4];
};
struct Store { unsigned char* to; unsigned char bytes[16]; int size; };  // that some threads do not see yet
using Stores = std::vector<Store>;
struct Line { unsigned char bytes[16]; };
constexpr int WRITERS = 64;  // blocks that live at a time, at most
struct Clock { uint64 of[WRITERS] = {}; };  // how many of the GPU's stores, for those of each block

struct Warp { Exchange exchange; Stores stores; int number = 0; Clock clock, fenced, found; };  // of other warps: see races.cuh
struct Grid;
struct GridBlock {
    Grid* grid;
    int index;
    unsigned char* shared;
    Exchange all;
    std::vector<Warp> warps;
    Stores stores;
    std::unordered_map<uintptr_t, Line> l1;
    uint64 seen = 0;  // how far this block has seen what others wrote: see memory.cuh
    std::unordered_map<const void*, uint64> heard;  // the newest release that it has acquired at each place
    int writer = 0;
    Clock clock;  // what it has seen of other blocks
    Clock met;    // what its warps knew at its barriers
};
struct Thread {
    void* stack;
    unsigned char* memory;
    int index;
    GridBlock* block;
    const Exchange* waits;  // until its round is over
    uint64 round, wakes;    // at this time
    bool ended;
    bool paused;            // the last time it ran it only looked whether to go on
    Stores stores;
    uint64 copies_see;      // what an asynchronous copy of this thread may read: see memory.cuh
    unsigned trips, apart;  // to memory, as if each load were waited for: see all_begun
    unsigned began;         // how many there had been before it looked at `watched.from`: see system.cuh
    struct { const void* at; size_t written; } relaxed[4];  // the last loads, and what was written then: see memory.cuh
    unsigned pauses, activity;  // how often it has paused since that number: see idle.cuh
    unsigned looks;         // at `held.at`
};
struct Index { int x; };
struct Release { uint64 number = 0, seen = 0; Clock clock; };  // the newest at a place; what it tells: see memory.cuh
struct LastStore { uint64 number; int writer; Line before; };
struct Device {
    Stores stores;
    std::unordered_map<const void*, Release> releases;
    uint64 released = 0, landed = 0;
    std::unordered_map<uintptr_t, LastStore> last;  // of each line of its own memory
};
struct Grid {
    int id, device, num_blocks, num_threads;
    void (*body)(const int64*);
    std::vector<int64> arguments;
    std::vector<GridBlock> blocks;
    std::vector<Thread> threads;
    int running;
};
struct World {
    bool modelled = false;  // memory, and the order of threads; without, a store is seen at once and threads take turns
    bool races = false;     // are looked for: see races.cuh
    bool live = false;      // beside other processes: time is the machine's
    uint64 random = 1, now = 1;
    std::vector<Grid*> grids;
    Device devices[16];
    unsigned char *shared_begin = nullptr, *shared_end = nullptr;  // memory that several devices, and hosts, see
    struct {
        const uint64 *from, *to;
        unsigned trips;
    } watched = {};  // a thread's trips from its last relaxed load of one word on, once it releases the other
    struct { const void* at; unsigned passes, waiting; } held = {};  // a thread that has looked at a word that often waits before it looks again
};

inline World world;
inline Thread* current;
inline void* scheduler_stack;
inline const char* failure;  // why a world cannot go on
#define gridDim (Index{current->block->grid->num_blocks})
#define threadIdx (Index{current->index})
#define blockIdx (Index{current->block->index})

inline unsigned chance() {  // xorshift
    world.random ^= world.random << 13, world.random ^= world.random >> 7, world.random ^= world.random << 17;
    return static_cast<unsigned>(world.random >> 32);
}
inline bool once_in(unsigned times) { return world.modelled && chance() % times == 0; }

extern "C" void switch_stack(void** save, void* load);
asm(R"(
.text
.globl switch_stack
switch_stack:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");


inline void yield() { switch_stack(&current->stack, scheduler_stack); }
inline void fail(const char* why) {
    std::fprintf(stderr, "%s\n", why);
    if (!world.modelled) std::abort();
    failure = why;
    for (;;) yield();
}

// Waits until all `count` threads have come; the last one runs `act` for them all.
template <class Act> inline void collective(Exchange& exchange, int count, Act act) {
    const uint64 round = exchange.round;
    if (++exchange.arrived == count) {
        act();
        exchange.arrived = 0;
        exchange.round++;
        return;
    }
    current->waits = &exchange, current->round = round;
    while (exchange.round == round) yield();
}
inline int lane_index() { return current->index % 32; }
inline Exchange& my_warp() { return current->block->warps[current->index / 32].exchange; }

inline void see_together(Stores& all, Stores& mine);
inline void meet(Clock& block);
inline void join(Clock& mine, const Clock& others);
inline void sync_warp() {
    if (world.modelled) see_together(current->block->warps[current->index / 32].stores, current->stores);
    collective(my_warp(), 32, [] {});
}
// What was loaded since the last one was under way together: one trip.
inline void all_begun() {
    if (current->trips > current->apart) current->trips = current->apart + 1;
    current->apart = current->trips;
    sync_warp();
}
inline void sync_block() {  // of the warps that compute
    if (world.modelled) {
        see_together(current->block->stores, current->block->warps[current->index / 32].stores);
        see_together(current->block->stores, current->stores);
    }
    if (world.races) meet(current->block->met);
    collective(current->block->all, WARPS * 32, [] {});
    if (world.races) join(current->block->warps[current->index / 32].clock, current->block->met);
}

template <class Act> inline uint64 warp_exchange(uint64 value, Act act) {
    Exchange& e = my_warp();
    e.sent[lane_index()] = value;
    collective(e, 32, [&] { act(e); });
    const uint64 result = e.received[lane_index()];
    collective(e, 32, [] {});
    return result;
}
inline int shuffle(int value, int lane) {
    Exchange& e = my_warp();
    e.sent[lane_index()] = static_cast<unsigned>(value);
    collective(e, 32, [] {});
    const uint64 result = e.sent[lane];  // each lane's own
    sync_warp();
    return static_cast<int>(result);
}
inline int shuffle_up(int value, int by) {
    return static_cast<int>(warp_exchange(static_cast<unsigned>(value), [=](Exchange& e) {
        for (int i = 0; i < 32; i++) e.received[i] = e.sent[i < by ? i : i - by];
    }));
}
inline unsigned votes(bool flag) {
    current->apart = current->trips;  // what they are about was waited for
    return static_cast<unsigned>(warp_exchange(flag, [](Exchange& e) {
        uint64 mask = 0;
        for (int i = 0; i < 32; i++) mask |= e.sent[i] << i;
        for (int i = 0; i < 32; i++) e.received[i] = mask;
    }));
}
inline int first_bit(unsigned mask) { return __builtin_ctz(mask); }
inline int __popc(unsigned mask) { return __builtin_popcount(mask); }

