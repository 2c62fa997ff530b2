// As much of NVSHMEM as the protocol uses, for a CPU: PEs are devices, their heaps lie side by side in one mapping.
//
// Mapped, as between GPUs that see each other, or a network: then puts arrive late, in pieces and in any order, each
// signal behind its own put and behind the signals of earlier puts of its block, but no further; now and then all of a
// block's stay away for long. What the network brought is seen for sure only after a test that came out true: a card's
// writes to data and signal may take different ways, so without one it stays unseen for as long as a step takes.
#pragma once
#include <utility>
#include "memory.cuh"

constexpr int NVSHMEM_CMP_GE = 3, NVSHMEM_SIGNAL_SET = 9;
constexpr uint64 PIECE = 64;

struct NetworkPut {
    unsigned char* to;
    const unsigned char* from;
    uint64 nbytes;
    std::vector<uint64> left;  // pieces
    unsigned char* signal;
    uint64 value;
    int from_pe, to_pe, queue;
    Clock clock;  // of the thread that put it
};
inline std::vector<NetworkPut> network_puts;
inline Stores arrived[16];  // at a PE, and not seen for sure
inline uint64 heap_bytes;
inline bool network;
inline int live_pe;  // of this process, in a world of several
inline unsigned char* live_heap;  // its own
inline std::unordered_map<const void*, uint64> newest_put;  // value of each signal
inline int stalled = -1;  // a queue whose puts do not move for a while, as long as several steps take

inline int my_pe() { return world.live ? live_pe : my_device(); }
inline unsigned char* at_pe(void* p, int pe) {
    return static_cast<unsigned char*>(p) + (pe - my_pe()) * static_cast<int64>(heap_bytes);
}
inline bool is_in_heap(void* p) { return !world.live || (p >= live_heap && p < live_heap + heap_bytes); }
inline void* nvshmem_ptr(void* p, int pe) { return !is_in_heap(p) || (network && pe != my_pe()) ? nullptr : at_pe(p, pe); }

inline void see_arrived(int pe) {
    for (const Store& s : arrived[pe]) land(s, -2);
    arrived[pe].clear();
}
inline int nvshmem_uint64_test(uint64_t* p, int, uint64 value) {
    const bool is = value_of(reinterpret_cast<uint64*>(p), false) >= value;
    if (is) see_arrived(my_device()), acquired(p, true);
    return is;
}
inline void begin_put(void* to, void* from, uint64 nbytes, uint64_t* signal, uint64 value, int pe) {
    if (!is_in_heap(to) || (signal && !is_in_heap(signal))) return fail("a put that does not go to the heap");
    if (world.live) {
        std::memcpy(at_pe(to, pe), from, nbytes);
        return store_release_system(reinterpret_cast<uint64*>(at_pe(signal, pe)), value);
    }
    NetworkPut put = {at_pe(to, pe), static_cast<unsigned char*>(from), nbytes, {}, signal ? at_pe(signal, pe) : nullptr, value, my_device(), pe,
                      my_device() * 64 + current->block->index, current_warp().clock};
    if (signal && std::exchange(newest_put[put.signal], value) == value) return fail("a signal is put twice");
    compare(from, static_cast<int>(nbytes), false);
    if (world.races) current_warp().clock.of[current_warp().number]++;
    for (uint64 at = 0; at < nbytes; at += PIECE) put.left.push_back(at);
    network_puts.push_back(put);
}
inline void nvshmemx_putmem_signal_nbi_block(void* to, void* from, uint64 nbytes, uint64_t* signal, uint64 value, int, int pe) {
    if (current->index == 0) begin_put(to, from, nbytes, signal, value, pe);
    sync_block();
}
inline void nvshmemx_putmem_signal_nbi_warp(void* to, void* from, uint64 nbytes, uint64_t* signal, uint64 value, int, int pe) {
    if (lane_index() == 0) begin_put(to, from, nbytes, signal, value, pe);
    sync_warp();
}
// For a bench: what is fetched arrives as what is put does, and is seen for sure once all that the block began is done.
inline void nvshmemx_getmem_nbi_block(void* to, void* from, uint64 nbytes, int pe) {
    if (current->index == 0) {
        if (!is_in_heap(from)) fail("a get that does not come from the heap");
        NetworkPut get = {static_cast<unsigned char*>(to), static_cast<unsigned char*>(at_pe(from, pe)), nbytes, {}, nullptr, 0,
                          my_device(), my_device(), my_device() * 64 + current->block->index, current_warp().clock};
        for (uint64 at = 0; at < nbytes; at += PIECE) get.left.push_back(at);
        network_puts.push_back(get);
    }
    sync_block();
}
inline void nvshmem_quiet() {
    const auto mine = [](const NetworkPut& put) { return put.queue == my_device() * 64 + current->block->index; };
    while (std::any_of(network_puts.begin(), network_puts.end(), mine)) yield();
    see_arrived(my_device()), acquired(nullptr, true);
}

// For a sabotage: without `putmem_signal` nothing orders the two.
inline void nvshmemx_putmem_nbi_block(void* to, void* from, uint64 nbytes, int pe) {
    if (current->index == 0) begin_put(to, from, nbytes, nullptr, 0, pe);
    sync_block();
}
inline void nvshmemx_signal_op(uint64_t* signal, uint64 value, int, int pe) { begin_put(nullptr, nullptr, 0, signal, value, pe); }

inline void bring_piece(NetworkPut& put) {
    const size_t which = chance() % put.left.size();
    const uint64 begin = put.left[which], end = std::min(put.nbytes, begin + PIECE);
    put.left.erase(put.left.begin() + static_cast<long>(which));
    for (uint64 at = begin; at < end; at += 16) {
        Store s = {put.to + at, {}, static_cast<int>(std::min<uint64>(16, end - at))};
        std::memcpy(s.bytes, put.from + at, s.size);  // what has left the GPU by now
        arrived[put.to_pe].push_back(s);
    }
}
inline void pass_network() {
    for (int pe = 0; pe < 16; pe++)
        if (!arrived[pe].empty() && once_in(512)) see_arrived(pe);
    if (network_puts.empty() || once_in(2)) return;
    const size_t which = chance() % network_puts.size();
    NetworkPut& put = network_puts[which];
    if (once_in(stalled < 0 ? 64 : 4096)) stalled = stalled < 0 ? put.queue : -1;
    if (put.queue == stalled) return;
    if (!put.left.empty()) return bring_piece(put);
    for (size_t i = 0; i < which; i++)
        if (network_puts[i].queue == put.queue && network_puts[i].signal && put.signal) return;
    if (put.signal) {
        Store s = {put.signal, {}, 8};
        std::memcpy(s.bytes, &put.value, 8);
        land(s, -2);
        join(syncs[put.signal].system, put.clock), join(host_clock, put.clock);
    }
    network_puts.erase(network_puts.begin() + static_cast<long>(which));
}
