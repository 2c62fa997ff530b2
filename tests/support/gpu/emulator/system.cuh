// kernels_cuda/source/system.cuh for a CPU: see memory.cuh.
#pragma once

inline void in_order() { asm volatile("" ::: "memory"); }  // for other processes: the CPU keeps what the compiler leaves
inline void fence_system() {  // the next release tells of it
    current->apart = ++current->trips;
    in_order(), fence_of_system(), acquired(nullptr, true);
    if (world.races) fence_clock();
}
inline unsigned add_one(unsigned* p) {
    begin_activity();
    if (world.races) take_at_next_fence(p), leave_fenced(p);
    return (*p)++;
}
inline uint64 add_relaxed(uint64* p, uint64 value) { return add_directly(p, value); }  // for sabotages, as the next
inline uint64 add_acquire(uint64* p, uint64 value) {
    const uint64 before = add_directly(p, value);
    acquired(p, false);
    return before;
}
inline uint64 add_acq_rel(uint64* p, uint64 value) {
    const uint64 before = add_release(p, value);
    acquired(p, false);
    return before;
}
inline void store_release_system(uint64* p, uint64 value) {
    in_order();
    if (!world.modelled) {
        watch_store(p, &value, sizeof(value));
        *p = value;
        return in_order();
    }
    compare(p, sizeof(value), true, true);
    fence_of_system(), released(p, true);
    add_directly(p, value - value_of(p, false));
    interrupt();
}
inline void store_system(uint64* p, uint64 value) {  // relaxed: all see it, but learn of no other store by it
    if (!world.modelled) watch_store(p, &value, sizeof(value)), *p = value;
    else if (leave_fenced(p), once_in(2)) store(p, value, true);  // it may come behind what the thread stores next
    else compare(p, sizeof(value), true, true), add_directly(p, value - value_of(p, false));
}
inline uint64 load_newest(const uint64* p) {
    current->trips++;
    if (p == world.held.at && current->looks++ >= world.held.passes)
        for (world.held.waiting++; p == world.held.at;) yield();
    if (!world.modelled || once_in(2)) yield();
    compare_atomic(p);
    if (!world.modelled) return value_of(p, false);
    uint64 v;
    relaxed_view(p, reinterpret_cast<unsigned char*>(&v), sizeof(v));
    take_at_next_fence(p);
    return v;
}
inline uint64 load_system(const uint64* p) {  // relaxed
    if (p == world.watched.from) current->began = current->trips;
    return load_newest(p);
}
inline unsigned load_system(const unsigned* p) {
    current->trips++;
    if (!world.modelled || once_in(2)) yield();
    unsigned v;
    if (world.modelled) relaxed_view(p, reinterpret_cast<unsigned char*>(&v), sizeof(v));
    else my_view(p, reinterpret_cast<unsigned char*>(&v), sizeof(v), false);
    return v;
}
inline uint64 load_acquire_system(const uint64* p) {
    const uint64 v = load_newest(p);
    in_order(), acquired(p, true);
    return v;
}
