// kernels_cuda/source/ptx.cuh for an x86-64 CPU: the kernels' own C++ runs, each GPU thread on a stack of its own.
//
// Every barrier, shuffle, MMA and spin of the whole grid is played; memory that a GPU would find undefined (shared
// memory, tiles not yet copied) holds NaNs. Without a world a copy with COPY_LATE happens when it is waited for, else
// when it is begun: a kernel must be right either way. In a world it happens at any time between the two.
#pragma once
#include "memory.cuh"

inline void pause(unsigned ns) {
    if (!world.modelled) {
        current->paused = true, count_pause();
        return yield();
    }
    current->wakes = world.now + ns;
    yield();
}
inline uint64 now_ns() { return world.live ? live_ns() : world.modelled ? world.now : 0; }
inline void stop() { fail("a kernel stopped the GPU"); }

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
inline unsigned __float_as_uint(float f) { return as_bits(f); }
inline float __uint_as_float(unsigned bits) { return as_float(bits); }
inline float divide(float a, float b) { return a / b; }
inline float multiply(float a, float b) { return a * b; }
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
    collective(e, 32, [] {});
}

struct alignas(8) CopyBarrier { uint64 word; };
struct Copy { CopyBarrier* barrier; void* to; const void* from; int bytes; GridBlock* block; uint64 sees; };
inline std::vector<Copy> copies;
inline bool copy_late;

inline void copy_acquire() { current->copies_see = page_writes.size(); }
inline void copy_init(CopyBarrier* barrier) {  // shared memory begins as NaNs
    if (world.modelled && barrier->word != ~0ull) fail("a live barrier is initialised again");
    barrier->word = 0;  // copies that have completed
}
inline void complete(const Copy& copy) {
    if (is_newer(copy.from, copy.bytes, copy.sees)) std::memset(copy.to, 0xff, copy.bytes);
    else std::memcpy(copy.to, copy.from, copy.bytes);
    copy.barrier->word++;
}
inline void copy_begin(void* tile, const void* from, int bytes, CopyBarrier* barrier, int lane) {
    if (bytes % 512 || reinterpret_cast<uintptr_t>(from) % 512) fail("a misaligned copy");
    if (lane != 0) return;
    std::memset(tile, 0xff, 8192);
    copies.push_back({barrier, tile, from, bytes, current->block, current->copies_see});
    if (world.modelled ? once_in(2) : !copy_late) complete(copies.back()), copies.pop_back();
}
inline void copy_wait(CopyBarrier* barrier, unsigned parity, bool) {
    collective(my_warp(), 32, [] {});
    if (lane_index() == 0)
        for (size_t i = 0; i < copies.size(); i++)
            if (copies[i].barrier == barrier) {
                complete(copies[i]);
                copies.erase(copies.begin() + static_cast<long>(i));
                break;
            }
    collective(my_warp(), 32, [] {});
    if (barrier->word % 2 != (parity + 1) % 2) fail("a wait with nothing to wait for");
}
