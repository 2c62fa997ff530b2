// The instructions that C++ has no name for, one function each; nothing here knows what a LoRA is.
// No header is included, so that NVRTC needs none. BULK_COPY: 1 from sm_90 on, 0 for any GPU from sm_80 on.
#pragma once

#define DEVICE __device__ __forceinline__
#define SHARED_MEMORY(name) extern __shared__ __align__(128) unsigned char name[]

using uint64 = unsigned long long;
using int64 = long long;

struct Bf16 {};
struct Fp16 {};

DEVICE void sync_warp() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }
// All loads above have been issued. Without this the compiler would delay some until a load below completed, to save
// registers.
DEVICE void all_begun() { sync_warp(); }
// A barrier of the warps that compute; a kernel may have one more warp, which polls.
DEVICE void sync_block() { asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory"); }
DEVICE int shuffle(int value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
DEVICE int shuffle_up(int value, int by) { return __shfl_up_sync(0xffffffffu, value, by); }
DEVICE unsigned votes(bool flag) { return __ballot_sync(0xffffffffu, flag); }
DEVICE int first_bit(unsigned mask) { return __ffs(static_cast<int>(mask)) - 1; }

// Three ways to global memory, none of them `.nc`, which may find what lay there before another processor's last write.
// Through this SM's L1, for what changes rarely: it finds what was there at the block's last acquire, or later.
template <class V> DEVICE V load(const V* p) { return *p; }
template <class V> DEVICE void store(V* p, const V& value) { *p = value; }

// From L2, for what other processors write while this kernel runs.
DEVICE uint4 load_l2(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
DEVICE float4 load_l2(const float4* p) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
    return v;
}
DEVICE float load_l2(const float* p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
}
DEVICE int load_l2(const int* p) {
    int v;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
DEVICE unsigned load_l2(const unsigned* p) {
    unsigned v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

DEVICE uint64 load_l2(const uint64* p) {
    uint64 v;
    asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(v) : "l"(p));
    return v;
}
DEVICE unsigned short load_l2(const unsigned short* p) {
    unsigned short v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}
DEVICE unsigned char load_l2(const unsigned char* p) {
    unsigned short v;
    asm volatile("ld.global.cg.u8 %0, [%1];" : "=h"(v) : "l"(p));
    return static_cast<unsigned char>(v);
}
DEVICE uint2 load_l2(const uint2* p) {
    uint2 v;
    asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

DEVICE uint64 add_release(uint64* p, uint64 value) {
    uint64 before;
    asm volatile("atom.add.release.gpu.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(p), "l"(value) : "memory");
    return before;
}
DEVICE void store_release(uint64* p, uint64 value) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
DEVICE uint64 load_acquire(const uint64* p) {
    uint64 v;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
DEVICE uint64 now_ns() {
    uint64 v;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
    return v;
}
DEVICE void pause(unsigned ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }
DEVICE void stop() { asm volatile("trap;"); }

// As IEEE has them: never one with another operation, and with denormals.
DEVICE float divide(float a, float b) {
    float v;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
    return v;
}
DEVICE float multiply(float a, float b) {
    float v;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
    return v;
}

// Two floats to two 16-bit ones, round to nearest even; `low` lies first in memory.
template <class T> DEVICE unsigned pack(float low, float high);
template <> DEVICE unsigned pack<Bf16>(float low, float high) {
    unsigned v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}
template <> DEVICE unsigned pack<Fp16>(float low, float high) {
    unsigned v;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}
template <class T> DEVICE void unpack(unsigned v, float& low, float& high);
template <> DEVICE void unpack<Bf16>(unsigned v, float& low, float& high) {
    low = __uint_as_float(v << 16);
    high = __uint_as_float(v & 0xffff0000u);
}
template <> DEVICE void unpack<Fp16>(unsigned v, float& low, float& high) {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(low), "=f"(high) : "r"(v));
}

// c[16 x 8] += a[16 x 16] b[16 x 8], fp32 accumulation. Volatile: never moved to where some lanes alone come.
template <class T> DEVICE void mma(float (&c)[4], const uint4& a, unsigned b0, unsigned b1);
template <> DEVICE void mma<Bf16>(float (&c)[4], const uint4& a, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
template <> DEVICE void mma<Fp16>(float (&c)[4], const uint4& a, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// A warp's copies into its ring of STAGES tiles. Every lane calls each function; one begin per wait, in order.
// `full`: whether STAGES copies are under way, this one included.
// `bytes` is a multiple of 512, or 0: then nothing is copied, and the wait still completes.
struct alignas(8) CopyBarrier { uint64 word; };

DEVICE unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

#if BULK_COPY
// Copies that this thread begins from here on see every write that the thread has seen, and land after earlier writes to
// their destination. Two narrow fences, because one for all memory would also wait for the thread's stores to global memory.
DEVICE void copy_acquire() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void copy_init(CopyBarrier* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // copies arrive at it
}
DEVICE void copy_begin(void* tile, const void* from, int bytes, CopyBarrier* barrier, int lane) {
    if (lane != 0) return;
    const unsigned at = shared_address(barrier);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
    if (bytes == 0) return;
    uint64 once;  // weights are read once: they must not push rows, v and deltas out of L2
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        ::"r"(shared_address(tile)), "l"(from), "r"(bytes), "r"(at), "l"(once) : "memory");
}
DEVICE void copy_wait(CopyBarrier* barrier, unsigned parity, bool) {
    asm volatile(
        "{.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}
#else
DEVICE void copy_acquire() {}
DEVICE void copy_init(CopyBarrier*) {}
DEVICE void copy_begin(void* tile, const void* from, int bytes, CopyBarrier*, int lane) {
    for (int at = lane * 16; at < bytes; at += 512)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(tile) + at),
                     "l"(static_cast<const unsigned char*>(from) + at) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
}
DEVICE void copy_wait(CopyBarrier*, unsigned, bool full) {
    if (full)
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
    else
        asm volatile("cp.async.wait_group 0;" ::: "memory");
    sync_warp();
}
#endif
