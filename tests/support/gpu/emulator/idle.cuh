// When kernels that run beside other processes have nothing to do: they then sleep until a word that they poll changes.
//
// A kernel is idle if every warp of it either waits at a barrier or has paused SCANS times since any kernel of this
// process last changed memory; the clock, which a heartbeat stores, does not count. From then on each load notes its
// place and value, for SCANS pauses more. What all these loads still find, they would find again: see run.cpp.
#pragma once
#include <ctime>
#include "threads.cuh"

constexpr unsigned SCANS = 40;  // the poller looks at its mailbox every 32
constexpr size_t MOST_WATCHED = 1024;

struct Watched { const void* at; int size; unsigned char bytes[16]; };
struct Idle {
    unsigned activity = 0;  // counts changes
    bool watching = false;
    std::vector<Watched> watched;
    uint64 clock = 0;  // what a thread has read last
};
inline Idle idle;

inline void begin_activity() { idle.activity++, idle.watching = false; }
inline void watch_store(const void* p, const void* value, int size) {
    if (std::memcmp(p, value, size) && (size != 8 || std::memcmp(value, &idle.clock, 8))) begin_activity();
}
inline void watch_load(const void* p, int size) {
    if (!idle.watching) return;
    for (const Watched& one : idle.watched)
        if (one.at == p && one.size == size) {
            if (std::memcmp(one.bytes, p, size)) begin_activity();
            return;
        }
    if (size > 16 || idle.watched.size() == MOST_WATCHED) return begin_activity();
    idle.watched.push_back({p, size, {}});
    std::memcpy(idle.watched.back().bytes, p, size);
}
inline void count_pause() {
    if (current->activity != idle.activity) current->pauses = 0, current->activity = idle.activity;
    current->pauses++;
}
inline bool has_changed(const Watched& one) { return std::memcmp(one.bytes, one.at, one.size); }

inline uint64 live_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return idle.clock = now.tv_sec * 1000000000ull + now.tv_nsec;
}
