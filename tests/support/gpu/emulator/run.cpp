// Runs kernels on this CPU; see threads.cuh. Compiled behind the kernels' source. `run` plays one kernel to its end;
// a world plays several, on several GPUs, in an order that its seed chooses, as far as it is told.
#include <unistd.h>
#include <utility>

namespace {

#ifndef STACK_BYTES
#define STACK_BYTES (256 * 1024)
#endif
constexpr size_t MAX_ARGUMENTS = 40;
std::vector<unsigned char*> stacks;  // free ones
int next_id = 1;

// All arguments are 64 bits wide: a kernel that takes fewer leaves the rest alone.
template <size_t... I> void call(const void* body, const int64* arguments, std::index_sequence<I...>) {
    reinterpret_cast<void (*)(decltype(I, int64())...)>(const_cast<void*>(body))(arguments[I]...);
}

void thread_main() {
    const Grid& grid = *current->block->grid;
    call(reinterpret_cast<const void*>(grid.body), grid.arguments.data(), std::make_index_sequence<MAX_ARGUMENTS>());
    see_together(current->block->stores, current_warp().stores);
    see_together(current->block->stores, current->stores);
    current->ended = true;
    yield();
    std::abort();
}

void prepare(Thread& thread) {
    if (stacks.empty()) {
        stacks.push_back(static_cast<unsigned char*>(std::malloc(STACK_BYTES)));
        std::memset(stacks.back(), 0xff, STACK_BYTES);
    }
    thread.memory = stacks.back();
    stacks.pop_back();
    auto top = reinterpret_cast<uintptr_t>(thread.memory + STACK_BYTES) & ~uintptr_t{63};
    auto* stack = reinterpret_cast<void**>(top);
    *--stack = nullptr;  // as after a call
    *--stack = reinterpret_cast<void*>(thread_main);
    for (int i = 0; i < 6; i++) *--stack = nullptr;
    thread.stack = stack;
}

Grid* begin(const void* kernel, int blocks, int threads, int shared_bytes, int device, const int64* arguments, int count) {
    auto* grid = new Grid{next_id++, device, blocks, threads, reinterpret_cast<void (*)(const int64*)>(const_cast<void*>(kernel)),
                          std::vector<int64>(arguments, arguments + count), {}, {}, blocks * threads};
    grid->arguments.resize(MAX_ARGUMENTS);
    grid->blocks.resize(blocks);
    grid->threads.resize(static_cast<size_t>(blocks) * threads);
    for (int b = 0; b < blocks; b++) {
        GridBlock& block = grid->blocks[b];
        const size_t nbytes = (static_cast<size_t>(shared_bytes) + 127) / 128 * 128;
        block.grid = grid, block.index = b;
        block.shared = static_cast<unsigned char*>(std::aligned_alloc(128, nbytes + 128));
        std::memset(block.shared, 0xff, nbytes);
        block.warps.resize((threads + 31) / 32);
        if (world.races)
            for (Warp& warp : block.warps) begin_clock(warp);
        block.seen = device < 0 ? 0 : world.devices[device].released;
        block.writer = (grid->id * blocks + b) % WRITERS;
        if (device >= 0) std::fill_n(block.clock.of, WRITERS, world.devices[device].landed);
        for (int t = 0; t < threads; t++) {
            Thread& thread = grid->threads[static_cast<size_t>(b) * threads + t];
            thread.index = t, thread.block = &block, thread.ended = false, thread.waits = nullptr, thread.wakes = 0;
            for (auto& load : thread.relaxed) load = {nullptr, written.size()};
            thread.copies_see = 0, thread.paused = false, thread.trips = thread.apart = thread.pauses = thread.activity = 0;
            prepare(thread);
        }
    }
    world.grids.push_back(grid);
    return grid;
}

void end(Grid* grid) {
    for (Thread& thread : grid->threads) stacks.push_back(thread.memory);
    for (GridBlock& block : grid->blocks) {
        if (world.races)
            for (Warp& warp : block.warps) end_clock(warp);
        copies.erase(std::remove_if(copies.begin(), copies.end(), [&](const Copy& c) { return c.block == &block; }), copies.end());
        std::free(block.shared);
    }
    world.grids.erase(std::find(world.grids.begin(), world.grids.end(), grid));
    delete grid;
}

bool can_run(const Thread& thread) {
    return !thread.ended && (!thread.waits || thread.waits->round != thread.round) && thread.wakes <= world.now;
}

bool run_thread(Thread& thread) {
    if (!can_run(thread)) return false;
    thread.waits = nullptr, thread.paused = false;
    current = &thread;
    switch_stack(&scheduler_stack, thread.stack);
    if (thread.ended) thread.block->grid->running--;
    return true;
}

// When the first of those that sleep wakes; 0 if none sleeps.
uint64 first_to_wake() {
    uint64 first = 0;
    for (Grid* grid : world.grids)
        for (Thread& thread : grid->threads)
            if (!thread.ended && thread.wakes > world.now && thread.wakes != ~0ull && (!first || thread.wakes < first)) first = thread.wakes;
    return first;
}

// What the end of a kernel makes visible.
void land_all(Grid* grid) {
    current = &grid->threads[0];
    for (GridBlock& block : grid->blocks) publish(block.stores);
    fence_of_system();
    acquired(nullptr, true), released(nullptr);
}

}  // namespace

extern "C" int run(const void* kernel, int grid, int late, int shared_bytes, const int64* arguments, int count) {
    if (count > static_cast<int>(MAX_ARGUMENTS)) return -1;
    copy_late = late;
    world = World();
    Grid* one = begin(kernel, grid, THREADS, shared_bytes, 0, arguments, count);
    while (one->running)
        for (Thread& thread : one->threads) run_thread(thread);
    end(one);
    return copies.empty() ? 0 : -2;
}

namespace {

bool is_idle(Grid* grid) {
    for (size_t first = 0; first < grid->threads.size(); first += 32) {
        bool waits = true, pauses = false;
        for (size_t t = first; t < first + 32; t++) {
            const Thread& thread = grid->threads[t];
            pauses |= !thread.ended && thread.activity == idle.activity && thread.pauses >= SCANS;
            waits &= !can_run(thread);
        }
        if (!waits && !pauses) return false;
    }
    return true;
}

// Until a word that they poll changes, or for as long as a heartbeat may be late.
void park(Grid* grid) {
    constexpr uint64 MOST_NS = 60'000'000;
    constexpr unsigned LEAST_US = 50, MOST_US = 1500;
    const uint64 until = live_ns() + MOST_NS;
    for (unsigned us = LEAST_US; live_ns() < until; us = std::min(us + us / 8, MOST_US)) {
        if (std::any_of(idle.watched.begin(), idle.watched.end(), has_changed)) return begin_activity();
        usleep(us);
    }
    for (Thread& thread : grid->threads) thread.pauses = std::min(thread.pauses, SCANS - 2);  // a scan or two
}

void rest(Grid* grid) {
    if (!is_idle(grid)) return;
    if (idle.watching) return park(grid);
    idle.watching = true, idle.watched.clear();
    for (Thread& thread : grid->threads) thread.pauses = 0;
}

}  // namespace

// Beside other processes, which share memory with it; where all only look whether to go on it sleeps. It stops for good
// after `rounds`, unless that is 0: a process that is about to be killed.
extern "C" int run_live(const void* kernel, int grid, int threads, int shared_bytes, const int64* arguments, int count, int rounds) {
    copy_late = false;
    world = World(), world.live = true, failure = nullptr;
    begin_activity();
    Grid* one = begin(kernel, grid, threads, shared_bytes, 0, arguments, count);
    for (int round = 1; one->running; round++) {
        bool works = false;
        for (Thread& thread : one->threads)
            if (run_thread(thread)) works |= !thread.paused;
        if (!works) usleep(50);
        if (round % 64 == 0) rest(one);
        if (round == rounds) return 1;
    }
    end(one);
    return failure ? -3 : copies.empty() ? 0 : -2;
}

extern "C" void world_begin(uint64 seed, unsigned char* shared, uint64 shared_bytes) {
    while (!world.grids.empty()) end(world.grids.back());
    world = World();
    forget_races();
    world.modelled = world.races = true, world.random = seed * 0x9e3779b97f4a7c15ull + 1;
    world.shared_begin = shared, world.shared_end = shared + shared_bytes;
    written.clear(), page_writes.clear(), failure = nullptr;
    for (int i = 0; i < 8; i++) chance();
}
#if NVSHMEM
extern "C" void world_heaps(uint64 nbytes, int over_network) {  // of each PE, side by side
    heap_bytes = nbytes, network = over_network;
    network_puts.clear(), newest_put.clear(), stalled = -1;
    for (Stores& stores : arrived) stores.clear();
}
extern "C" void live_world(int pe, unsigned char* heap, uint64 nbytes, int over_network) {
    live_pe = pe, live_heap = heap, heap_bytes = nbytes, network = over_network;
}
extern "C" int world_in_flight() {
    size_t all = network_puts.size();
    for (const Stores& stores : arrived) all += stores.size();
    return static_cast<int>(all);
}
extern "C" void world_confirm(int pe) { see_arrived(pe); }
#endif
extern "C" int world_launch(const void* kernel, int blocks, int threads, int shared_bytes, int device, const int64* arguments, int count) {
    return begin(kernel, blocks, threads, shared_bytes, device, arguments, count)->id;
}
extern "C" int world_running(int id) {
    for (Grid* grid : world.grids)
        if (grid->id == id) return 1;
    return 0;
}
extern "C" int world_alive(int id, int block) {  // threads of a block
    int alive = 0;
    for (Grid* grid : world.grids)
        if (grid->id == id)
            for (Thread& thread : grid->threads) alive += thread.block->index == block && !thread.ended;
    return alive;
}
// Runs so many turns of a block, or less if a kernel ends; -1 if no thread will ever go on.
extern "C" int world_run(int turns) {
    static unsigned slow;
    int idle = 0;
    for (int turn = 0; turn < turns && !world.grids.empty() && !failure; turn++) {
        if (turn % 64 == 0) slow = chance();
        const unsigned which = chance() % world.grids.size();
        if (which == slow % world.grids.size() && slow & 0x100 && chance() % 8) continue;
        Grid* grid = world.grids[which];
        const int block = chance() % grid->num_blocks, first = chance() % grid->num_threads;
        const unsigned behind = slow & 0x200 && chance() % 16 ? 1u << (slow >> 10) % 4 : 0;
        const unsigned slower = behind | (once_in(4) ? chance() : 0);  // warps
        bool any = false;
        for (int t = 0; t < grid->num_threads; t++) {
            const int thread = (first + t) % grid->num_threads;
            if (!(slower >> thread / 32 & 1)) any |= run_thread(grid->threads[static_cast<size_t>(block) * grid->num_threads + thread]);
        }
        world.now += 10 + chance() % 32;
#if NVSHMEM
        pass_network();
#endif
        if (grid->running == 0) {
            land_all(grid);
            end(grid);
            return 1;
        }
        idle = any ? 0 : idle + 1;
        if (idle < 64) continue;
        const uint64 wakes = first_to_wake();
        if (wakes) world.now = wakes;
        else if (idle > 4096) return -1;
    }
    return failure ? -1 : 0;
}
// A process dies: what it has stored arrives or does not.
extern "C" void world_kill(int id) {
    for (Grid* grid : std::vector<Grid*>(world.grids)) {
        if (grid->id != id) continue;
        for (Thread& thread : grid->threads) {
            current = &thread;
            Stores lost = thread.stores;
            lost.insert(lost.end(), thread.block->stores.begin(), thread.block->stores.end());
            thread.block->stores.clear(), thread.stores.clear();
            for (const Store& s : lost)
                if (once_in(2)) land_in_order(s);
        }
        end(grid);
    }
}
// A block that does not go on, until it is thawed.
extern "C" void world_freeze(int id, int block, int thaws) {
    for (Grid* grid : world.grids)
        if (grid->id == id)
            for (Thread& thread : grid->threads)
                if (thread.block->index == block) thread.wakes = thaws ? 0 : ~0ull;
}
extern "C" void world_hold(const void* word, unsigned passes) {
    world.held = {word, passes, 0};
    for (Grid* grid : world.grids)
        for (Thread& thread : grid->threads) thread.looks = 0;
}
extern "C" int world_held() { return static_cast<int>(world.held.waiting); }
extern "C" void world_write(unsigned char* to, const unsigned char* from, uint64 nbytes) {  // a host, in order
    for (uint64 i = 0; i < nbytes; i += 8) {
        Store s = {to + i, {}, static_cast<int>(std::min<uint64>(8, nbytes - i))};
        std::memcpy(s.bytes, from + i, s.size);
        land(s, -1);
    }
    if (world.races && nbytes <= 8) join(syncs[to].system, host_clock);
}
extern "C" void world_copy_pages(unsigned char* to, const unsigned char* from, uint64 nbytes) {  // a copy engine
    std::memcpy(to, from, nbytes);
    page_writes.push_back({to, to + nbytes});
}
extern "C" unsigned world_trips() { return world.watched.trips; }
extern "C" void world_watch(const uint64* from, const uint64* to) { world.watched = {from, to, 0}; }
// What a host finds that has read a word: see races.cuh.
extern "C" int world_ordered(const void* word, const unsigned char* p, uint64 nbytes, int read) { return is_ordered(word, p, nbytes, read); }
extern "C" uint64 world_now() { return world.now; }
extern "C" void world_pass(uint64 ns) { world.now += ns; }
extern "C" const char* world_failure() { return failure; }
extern "C" int shared_bytes() { return static_cast<int>(sizeof(BlockMemory)); }
