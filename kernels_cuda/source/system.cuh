// Signals from a kernel to other processors: a processor that sees the signal finds what was stored before it.
#pragma once

DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
DEVICE unsigned add_one(unsigned* p) {
    unsigned before;
    asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(p) : "memory");
    return before;
}
DEVICE uint64 add_acq_rel(uint64* p, uint64 value) {
    uint64 before;
    asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(p), "l"(value) : "memory");
    return before;
}
DEVICE void store_release_system(uint64* p, uint64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
DEVICE void store_system(uint64* p, uint64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
DEVICE uint64 load_system(const uint64* p) {
    uint64 v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
DEVICE unsigned load_system(const unsigned* p) {
    unsigned v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE uint64 load_acquire_system(const uint64* p) {
    uint64 v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
