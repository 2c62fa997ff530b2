// kernels_cuda/source/ptx.cuh for an x86-64 CPU: the kernels' own C++ runs, each GPU thread on a stack of its own.
//
// Threads take turns and yield where a GPU thread would wait, so every barrier, shuffle, MMA and spin of the whole
// grid is played; memory that a GPU would find undefined (shared memory, tiles not yet copied) holds NaNs. With
// COPY_LATE a copy happens when it is waited for, else when it is begun: a kernel must be right either way.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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
struct GridBlock { unsigned char* shared; Exchange all; std::vector<Exchange> warps; };
struct Thread { void* stack; std::vector<unsigned char> memory; int index, block_index; GridBlock* block; bool ended; };
struct Index { int x; };

inline Thread* current;
inline void* scheduler_stack;
inline Index gridDim;
inline int block_threads;
#define threadIdx (Index{current->index})
#define blockIdx (Index{current->block_index})

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

// Waits until all `count` threads have come; the last one runs `act` for them all.
template <class Act> inline void collective(Exchange& exchange, int count, Act act) {
    const uint64 round = exchange.round;
    if (++exchange.arrived == count) {
        act();
        exchange.arrived = 0;
        exchange.round++;
        return;
    }
    while (exchange.round == round) yield();
}
inline int lane_index() { return current->index % 32; }
inline Exchange& my_warp() { return current->block->warps[current->index / 32]; }

inline void sync_warp() { collective(my_warp(), 32, [] {}); }
inline void sync_block() { collective(current->block->all, block_threads, [] {}); }

template <class Act> inline uint64 warp_exchange(uint64 value, Act act) {
    Exchange& e = my_warp();
    e.sent[lane_index()] = value;
    collective(e, 32, [&] { act(e); });
    const uint64 result = e.received[lane_index()];
    sync_warp();
    return result;
}
inline int shuffle(int value, int lane) {
    return static_cast<int>(warp_exchange(static_cast<unsigned>(value), [=](Exchange& e) {
        for (int i = 0; i < 32; i++) e.received[i] = e.sent[lane];
    }));
}
inline int shuffle_up(int value, int by) {
    return static_cast<int>(warp_exchange(static_cast<unsigned>(value), [=](Exchange& e) {
        for (int i = 0; i < 32; i++) e.received[i] = e.sent[i < by ? i : i - by];
    }));
}
inline unsigned votes(bool flag) {
    return static_cast<unsigned>(warp_exchange(flag, [](Exchange& e) {
        uint64 mask = 0;
        for (int i = 0; i < 32; i++) mask |= e.sent[i] << i;
        for (int i = 0; i < 32; i++) e.received[i] = mask;
    }));
}
inline int first_bit(unsigned mask) { return __builtin_ctz(mask); }
inline int __popc(unsigned mask) { return __builtin_popcount(mask); }

template <class V> inline V aligned_load(const void* p) {
    if (reinterpret_cast<uintptr_t>(p) % sizeof(V)) std::fprintf(stderr, "misaligned load of %zu bytes\n", sizeof(V)), std::abort();
    return *static_cast<const V*>(p);
}
inline uint4 load_constant(const void* p) { return aligned_load<uint4>(p); }
inline float4 load_l2(const float* p) { return aligned_load<float4>(p); }
inline float load_l2_one(const float* p) { return *p; }
inline int load_l2(const int* p) { return *p; }
inline uint64 add_release(uint64* p, uint64 value) {
    const uint64 before = *p;
    *p += value;
    return before;
}
inline uint64 load_acquire(const uint64* p) {
    yield();
    return *p;
}
inline uint64 now_ns() { return 0; }
inline void stop() { std::abort(); }

inline float as_float(unsigned bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline unsigned as_bits(float f) {
    unsigned bits;
    std::memcpy(&bits, &f, 4);
    return bits;
}
template <class T> unsigned narrow(float f);
template <> inline unsigned narrow<Bf16>(float f) {
    if (std::isnan(f)) return 0x7fff;
    const unsigned bits = as_bits(f);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
template <> inline unsigned narrow<Fp16>(float f) {
    const _Float16 half = static_cast<_Float16>(f);
    unsigned short bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}
template <class T> float widen(unsigned bits);
template <> inline float widen<Bf16>(unsigned bits) { return as_float(bits << 16); }
template <> inline float widen<Fp16>(unsigned bits) {
    const unsigned short half_bits = static_cast<unsigned short>(bits);
    _Float16 half;
    std::memcpy(&half, &half_bits, 2);
    return static_cast<float>(half);
}
template <class T> inline unsigned pack(float low, float high) { return narrow<T>(low) | narrow<T>(high) << 16; }
template <class T> inline void unpack(unsigned v, float& low, float& high) {
    low = widen<T>(v & 0xffff);
    high = widen<T>(v >> 16);
}

// The PTX manual's fragment layouts of mma.m16n8k16, element by element.
template <class T> inline void mma(float (&c)[4], const uint4& a, unsigned b0, unsigned b1) {
    Exchange& e = my_warp();
    unsigned b[2] = {b0, b1};
    e.operands[lane_index()][0] = c;
    e.operands[lane_index()][1] = const_cast<uint4*>(&a);
    e.operands[lane_index()][2] = b;
    collective(e, 32, [&] {
        float left[16][16], right[16][8];
        for (int lane = 0; lane < 32; lane++) {
            const unsigned* words = static_cast<const unsigned*>(e.operands[lane][1]);
            const unsigned* values = static_cast<const unsigned*>(e.operands[lane][2]);
            for (int i = 0; i < 8; i++) {
                const int row = lane / 4 + (i / 2 % 2) * 8, k = lane % 4 * 2 + i % 2 + (i / 4) * 8;
                left[row][k] = widen<T>(words[i / 2] >> (i % 2 * 16) & 0xffff);
            }
            for (int i = 0; i < 4; i++)
                right[lane % 4 * 2 + i % 2 + (i / 2) * 8][lane / 4] = widen<T>(values[i / 2] >> (i % 2 * 16) & 0xffff);
        }
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                const int row = lane / 4 + (i / 2) * 8, column = lane % 4 * 2 + i % 2;
                float& sum = static_cast<float*>(e.operands[lane][0])[i];
                for (int k = 0; k < 16; k++) sum += left[row][k] * right[k][column];
            }
    });
    sync_warp();
}

struct alignas(8) CopyBarrier { uint64 word; };
struct Copy { CopyBarrier* barrier; void* to; const void* from; int bytes; };
inline std::vector<Copy> copies;
inline bool copy_late;

inline void copy_init(CopyBarrier* barrier) { barrier->word = 0; }  // copies that have completed
inline void complete(const Copy& copy) {
    std::memcpy(copy.to, copy.from, copy.bytes);
    copy.barrier->word++;
}
inline void copy_begin(void* tile, const void* from, int bytes, CopyBarrier* barrier, int lane) {
    if (bytes % 512 || reinterpret_cast<uintptr_t>(from) % 512) std::abort();
    if (lane != 0) return;
    std::memset(tile, 0xff, 8192);
    copies.push_back({barrier, tile, from, bytes});
    if (!copy_late) complete(copies.back()), copies.pop_back();
}
inline void copy_wait(CopyBarrier* barrier, unsigned parity, bool) {
    sync_warp();
    if (lane_index() == 0)
        for (size_t i = 0; i < copies.size(); i++)
            if (copies[i].barrier == barrier) {
                complete(copies[i]);
                copies.erase(copies.begin() + static_cast<long>(i));
                break;
            }
    sync_warp();
    if (barrier->word % 2 != (parity + 1) % 2) std::fprintf(stderr, "a wait with nothing to wait for\n"), std::abort();
}
