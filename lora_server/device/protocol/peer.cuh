// Memory of the other end: mapped, or beyond a network. In NVSHMEM's world (-DNVSHMEM=1) an address is that of this PE's
// own heap, where a put's source lies too; `pe` says which is meant, HERE that it is mapped already and in no heap.
// Without it everything is mapped, and `pe` unused.
#pragma once

#if NVSHMEM
#include "nvshmem.cuh"
constexpr int HERE = -1;

// Null where there is no way but a put.
DEVICE unsigned char* mapped(uint64 address, int pe) {
    if (pe == HERE) return reinterpret_cast<unsigned char*>(address);
    return static_cast<unsigned char*>(nvshmem_ptr(reinterpret_cast<void*>(address), pe));
}
// A signal came: what was put before it is visible from here on, also where a network brought both. NVSHMEM's manual,
// Point-To-Point Synchronization: its test and wait functions, not loads, observe remote updates in the initiator's order.
DEVICE void confirm(const uint64* signal, uint64 word) {
    nvshmem_uint64_test(reinterpret_cast<uint64_t*>(const_cast<uint64*>(signal)), NVSHMEM_CMP_GE, word);
}
// This PE's `slot` to its peer's, then the signal; all threads of a block, or of a warp, call it. There is no wait for it:
// the answer to a step, or the next one, is its completion.
DEVICE void put_block(uint64 slot, uint64 nbytes, uint64 signal, uint64 value, int pe) {
    nvshmemx_putmem_signal_nbi_block(reinterpret_cast<void*>(slot), reinterpret_cast<void*>(slot), nbytes,
                                     reinterpret_cast<uint64_t*>(signal), value, NVSHMEM_SIGNAL_SET, pe);
}
DEVICE void put_warp(uint64 slot, uint64 nbytes, uint64 signal, uint64 value, int pe) {
    nvshmemx_putmem_signal_nbi_warp(reinterpret_cast<void*>(slot), reinterpret_cast<void*>(slot), nbytes,
                                    reinterpret_cast<uint64_t*>(signal), value, NVSHMEM_SIGNAL_SET, pe);
}
#else
DEVICE unsigned char* mapped(uint64 address, int) { return reinterpret_cast<unsigned char*>(address); }
DEVICE void confirm(const uint64*, uint64) {}
DEVICE void put_block(uint64, uint64, uint64, uint64, int) {}
DEVICE void put_warp(uint64, uint64, uint64, uint64, int) {}
#endif

// Where to write what the other end is to have.
DEVICE unsigned char* writable(uint64 address, int pe) {
    unsigned char* const far = mapped(address, pe);
    return far ? far : reinterpret_cast<unsigned char*>(address);
}
