// Global memory as weakly ordered as a GPU's may be, in a world of several kernels; plain memory without one.
//
// Stores. What a thread stores is seen by itself; by its warp and its block from their next barrier on; by its GPU
// from a fence or release of a thread that sees it on; by other GPUs and hosts from one at system scope on. Before
// that each store may become visible at any time, in any order. What only one GPU uses is seen by all from its first
// fence on.
// Loads. `load` goes through the block's L1, which may hold what it held until the block next acquires something that
// was released since; load_constant (`.nc`) until the kernel ends. Memory that other GPUs or hosts write is, until an
// acquire at system scope that this block has seen, directly or by way of another block's release, what it was or what
// it is. Within a GPU an acquire brings what was released at the very place that it reads, by whatever way; what another
// block has stored last may be missing before.
// Order. What no value shows, a store that nothing keeps behind others' loads, is found by clocks: races.cuh.
// Copies (cp.async.bulk) of a thread may read what was written before its last copy_acquire; else NaNs.
#pragma once
#include <algorithm>
#include "races.cuh"

struct Written { unsigned char* to; unsigned char before[16]; int size; int device; };
inline std::vector<Written> written;  // to memory that several see, in order; `seen` counts these
struct PageWrite { const unsigned char *begin, *end; };
inline std::vector<PageWrite> page_writes;  // by copy engines; `copies_see` counts these

inline bool is_newer(const void* p, int size, uint64 seen) {
    for (size_t i = seen; i < page_writes.size(); i++)
        if (p < page_writes[i].end && static_cast<const unsigned char*>(p) + size > page_writes[i].begin) return true;
    return false;
}
inline bool is_shared(const void* p) { return p >= world.shared_begin && p < world.shared_end; }
inline bool overlap(const void* a, int na, const void* b, int nb) {
    const auto x = reinterpret_cast<uintptr_t>(a), y = reinterpret_cast<uintptr_t>(b);
    return x < y + nb && y < x + na;
}
inline int my_device() { return current->block->grid->device; }
inline Stores& device_stores() { return world.devices[my_device()].stores; }
inline Warp& current_warp() { return current->block->warps[current->index / 32]; }

inline void land(const Store& s, int device) {  // from here on all devices see it
    if (is_shared(s.to)) {
        Written w = {s.to, {}, s.size, device};
        std::memcpy(w.before, s.to, s.size);
        written.push_back(w);
    } else if (device >= 0) {
        const uintptr_t line = reinterpret_cast<uintptr_t>(s.to) & ~uintptr_t{15};
        LastStore& last = world.devices[device].last[line];
        last.number = ++world.devices[device].landed, last.writer = current->block->writer;
        std::memcpy(last.before.bytes, reinterpret_cast<const void*>(line), 16);
    }
    std::memcpy(s.to, s.bytes, s.size);
}
// The stores of one address keep their order: older ones of a wider level land first.
inline void land_older(Stores& level, const Store& s, int device) {
    for (size_t i = 0; i < level.size();)
        if (overlap(level[i].to, level[i].size, s.to, s.size)) {
            land(level[i], device);
            level.erase(level.begin() + static_cast<long>(i));
        } else i++;
}
inline void land_in_order(const Store s) {
    const int device = my_device();
    land_older(device_stores(), s, device), land_older(current->block->stores, s, device);
    land_older(current_warp().stores, s, device);
    land(s, device);
}
// A block's own stores go through its L1.
inline void forget_line(const Store& s) { current->block->l1.erase(reinterpret_cast<uintptr_t>(s.to) & ~uintptr_t{15}); }
inline void see_together(Stores& all, Stores& mine) {
    for (const Store& s : mine) forget_line(s);
    all.insert(all.end(), mine.begin(), mine.end());
    mine.clear();
}
inline void publish(Stores& stores) {  // to this GPU
    for (const Store& s : stores)
        if (is_shared(s.to)) device_stores().push_back(s);
        else land_older(device_stores(), s, my_device()), land(s, my_device());
    stores.clear();
}
inline void fence_of_gpu() {
    if (!world.modelled) return;
    publish(current->block->stores), publish(current_warp().stores), publish(current->stores);
}
inline void fence_of_system() {
    if (!world.modelled) return;
    fence_of_gpu();
    for (const Store& s : device_stores()) land(s, my_device());
    device_stores().clear();
}
inline void interrupt() {
    if (once_in(24)) yield();
}
inline void some_lands() {  // without anybody's doing
    Stores& mine = current->stores;
    if (mine.empty() || (mine.size() < 32 && !once_in(16))) return;
    const size_t i = mine.size() < 32 ? chance() % mine.size() : 0;
    const Store s = mine[i];
    for (size_t j = 0; j < i; j++)
        if (overlap(mine[j].to, mine[j].size, s.to, s.size)) return;
    mine.erase(mine.begin() + static_cast<long>(i));
    forget_line(s);
    land_in_order(s);
}

inline void overlay(const Stores& stores, const void* p, unsigned char* bytes, int size) {
    for (const Store& s : stores) {
        if (!overlap(s.to, s.size, p, size)) continue;
        const auto* at = static_cast<const unsigned char*>(p);
        for (int i = 0; i < size; i++)
            if (at + i >= s.to && at + i < s.to + s.size) bytes[i] = s.bytes[at + i - s.to];
    }
}
// What another block has stored last, and this one has not acquired, it may not see.
inline void forget_last(const void* p, unsigned char* bytes, int size) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(p), line = at & ~uintptr_t{15};
    const auto& all = world.devices[my_device()].last;
    const auto found = all.find(line);
    if (found == all.end()) return;
    const LastStore& last = found->second;
    const GridBlock& mine = *current->block;
    if (last.writer != mine.writer && last.number > mine.clock.of[last.writer] && once_in(2))
        std::memcpy(bytes, last.before.bytes + (at - line), size);
}
inline void my_view(const void* p, unsigned char* bytes, int size, bool stale) {
    std::memcpy(bytes, p, size);
    if (!world.modelled) return watch_load(p, size);
    if (stale && !is_shared(p)) forget_last(p, bytes, size);
    const size_t oldest = std::max<size_t>(current->block->seen, written.size() < 256 ? 0 : written.size() - 256);
    if (stale && is_shared(p))
        for (size_t i = written.size(); i-- > oldest;)
            if (written[i].device != my_device() && overlap(written[i].to, written[i].size, p, size) && once_in(2)) {
                Stores was(1);
                was[0].to = written[i].to, was[0].size = written[i].size;
                std::memcpy(was[0].bytes, written[i].before, written[i].size);
                overlay(was, p, bytes, size);
            }
    overlay(device_stores(), p, bytes, size), overlay(current->block->stores, p, bytes, size);
    overlay(current_warp().stores, p, bytes, size), overlay(current->stores, p, bytes, size);
}

// A relaxed load finds what is there, or what was when the thread made one of its last relaxed loads of other places: it
// may have been made before them, but not before what the block has acquired.
inline void relaxed_view(const void* p, unsigned char* bytes, int size) {
    my_view(p, bytes, size, false);
    auto& last = current->relaxed;
    size_t since = written.size();
    for (const auto& load : last) {
        since = std::min(since, load.written);
        if (load.at == p || !once_in(2)) break;
    }
    since = is_shared(p) ? std::max<size_t>(since, current->block->seen) : written.size();
    for (size_t i = written.size(); i-- > since;)
        if (written[i].device != my_device() && overlap(written[i].to, written[i].size, p, size)) {
            Stores was(1);
            was[0].to = written[i].to, was[0].size = written[i].size;
            std::memcpy(was[0].bytes, written[i].before, written[i].size);
            overlay(was, p, bytes, size);
        }
    if (last[0].at != p) std::copy_backward(last, last + 3, last + 4);
    last[0] = {p, since};
}

template <class V> inline void check_alignment(const void* p) {
    if (reinterpret_cast<uintptr_t>(p) % (sizeof(V) > 16 ? 16 : sizeof(V) & -sizeof(V))) fail("a misaligned access");
}
template <class V> inline V load_l2(const V* p) {
    check_alignment<V>(p);
    current->trips++;
    if (!world.modelled) {
        watch_load(p, sizeof(V));
        return *p;
    }
    interrupt();
    compare(p, sizeof(V), false);
    V v;
    my_view(p, reinterpret_cast<unsigned char*>(&v), sizeof(V), true);
    return v;
}
template <class V> inline V through_l1(const V* p, bool constant) {
    check_alignment<V>(p);
    if (!world.modelled) {
        current->trips++;
        return *p;
    }
    interrupt();
    compare(p, sizeof(V), false);
    V v;
    const auto at = reinterpret_cast<uintptr_t>(p), line = at & ~uintptr_t{15};
    static_assert(sizeof(V) <= 16, "within a line of the model's L1");
    auto& l1 = current->block->l1;
    const uintptr_t key = line | constant;
    auto found = l1.find(key);
    if (found == l1.end()) {
        current->trips++;
        found = l1.emplace(key, Line()).first;
        my_view(reinterpret_cast<const void*>(line), found->second.bytes, 16, true);
    }
    std::memcpy(&v, found->second.bytes + (at - line), sizeof(V));
    return v;
}
template <class V> inline V load(const V* p) { return through_l1(p, false); }
template <class V> inline V load_constant(const V* p) { return through_l1(p, true); }

template <class V> inline void store(V* p, const V& value, bool releases = false) {
    check_alignment<V>(p);
    if (!world.modelled) {
        watch_store(p, &value, sizeof(V));
        *p = value;
        return;
    }
    static_assert(sizeof(V) <= 16, "one instruction");
    Store s = {reinterpret_cast<unsigned char*>(p), {}, sizeof(V)};
    std::memcpy(s.bytes, &value, sizeof(V));
    compare(p, sizeof(V), true, releases);
    current->stores.push_back(s);
    forget_line(s);
    some_lands();
    interrupt();
}

inline void forget_l1() {
    auto& l1 = current->block->l1;
    for (auto at = l1.begin(); at != l1.end();) at = at->first % 16 ? std::next(at) : l1.erase(at);
}
inline uint64 value_of(const uint64* p, bool stale) {
    uint64 v;
    my_view(p, reinterpret_cast<unsigned char*>(&v), 8, stale);
    return v;
}
// What was released at a place comes with the acquire that reads it there, and with no other.
inline void acquired(const void* p, bool system) {
    if (!world.modelled) return;
    if (world.races && p) take_clock(p, system);
    const Release& release = world.devices[my_device()].releases[p];
    uint64 &seen = current->block->seen, &heard = current->block->heard[p];
    if (system || heard != release.number) forget_l1();
    heard = release.number;
    seen = std::max(seen, system ? written.size() : release.seen);
    for (int i = 0; i < WRITERS; i++) {
        uint64& mine = current->block->clock.of[i];
        mine = std::max(mine, release.clock.of[i]);
    }
}
inline void released(const void* p, bool system = false) {
    if (world.races && p) leave_clock(p, system);
    Device& device = world.devices[my_device()];
    Release& release = device.releases[p];
    release.number++, release.seen = std::max(release.seen, current->block->seen);
    device.released = std::max(device.released, release.seen);
    GridBlock& block = *current->block;
    block.clock.of[block.writer] = device.landed;
    for (int i = 0; i < WRITERS; i++) release.clock.of[i] = std::max(release.clock.of[i], block.clock.of[i]);
}

// At the scope of one GPU.
inline uint64 load_acquire(const uint64* p) {
    current->trips++;
    if (!world.modelled || once_in(2)) yield();
    compare_atomic(p);
    const uint64 v = value_of(p, true);
    acquired(p, false);
    return v;
}
inline void store_release(uint64* p, uint64 value) {
    if (p == world.watched.to) world.watched.trips = ++current->trips - current->began;
    fence_of_gpu(), released(p);
    store(p, value, true);
    fence_of_gpu();
}
inline uint64 add_directly(uint64* p, uint64 value) {
    const uint64 before = value_of(p, false);
    begin_activity();
    Store s = {reinterpret_cast<unsigned char*>(p), {}, 8};
    const uint64 after = before + value;
    std::memcpy(s.bytes, &after, 8);
    land_in_order(s);
    return before;
}
inline uint64 add_release(uint64* p, uint64 value) {
    if (!world.modelled) {
        const uint64 before = *p;
        begin_activity();
        *p += value;
        return before;
    }
    fence_of_gpu(), released(p);
    return add_directly(p, value);
}
