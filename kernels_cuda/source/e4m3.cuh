// Rows in 8 bits: float8_e4m3fn codes, and for each row a float32 scale, the row's largest magnitude / 448. A row that is
// not finite travels as one of NaN, with a scale of 1. Both ends' hosts have the same rule, and make the same bits of it.
#pragma once
#include "warp.cuh"

// No variables: a compiler warns of those that a kernel without such rows leaves alone.
#define CODES_OF_NAN 0x7f7fu
#define LARGEST_CODE 448.0f
#define LEAST_SCALE 1.17549435e-38f
#define LARGEST_FLOAT 3.4028234e38f

#if __CUDA_ARCH__ >= 890
// Two values to codes, round to nearest even; `low` lies first in memory. None exceeds 448 but by its own rounding.
DEVICE unsigned two_codes(float low, float high) {
    unsigned short v;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(high), "f"(low));
    return v;
}
// Two codes as float16, which has them all.
DEVICE unsigned two_halves(unsigned codes) {
    unsigned v;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(v) : "h"(static_cast<unsigned short>(codes)));
    return v;
}
#else
// Below 2^-6 codes are 2^-9 apart, which is what a float's last bit is worth in sums with 2^14.
DEVICE unsigned one_code(float value) {
    const unsigned bits = __float_as_uint(value), magnitude = bits & 0x7fffffff;
    const unsigned small = __float_as_uint(__uint_as_float(magnitude) + 16384.0f) - 0x46800000;
    const unsigned rounded_up = (magnitude + 0x7ffff + (magnitude >> 20 & 1) >> 20) - (120 << 3);
    const unsigned code = magnitude < 0x3c800000 ? small : rounded_up < 0x7e ? rounded_up : 0x7e;
    return bits >> 24 & 0x80 | code;
}
DEVICE unsigned two_codes(float low, float high) { return one_code(low) | one_code(high) << 8; }
// A code's bits are those of a float16 that is 2^8 times smaller, but for the two that are no numbers.
DEVICE unsigned two_halves(unsigned codes) {
    float low, high;
    unpack<Fp16>((codes & 0x7f) << 7 | (codes & 0x7f00) << 15, low, high);
    unsigned v = pack<Fp16>(low * 256.0f, high * 256.0f) | (codes & 0x80) << 8 | (codes & 0x8000) << 16;
    if ((codes & 0x7f) == 0x7f) v |= 0x7fff;
    if ((codes & 0x7f00) == 0x7f00) v |= 0x7fff0000;
    return v;
}
#endif

template <class T> DEVICE unsigned expand_two(unsigned codes) {
    float low, high;
    unpack<Fp16>(two_halves(codes), low, high);
    return pack<T>(low, high);
}
template <> DEVICE unsigned expand_two<Fp16>(unsigned codes) { return two_halves(codes); }
template <class T> DEVICE uint4 expand_eight(const uint2& codes) {
    return {expand_two<T>(codes.x & 0xffff), expand_two<T>(codes.x >> 16), expand_two<T>(codes.y & 0xffff),
            expand_two<T>(codes.y >> 16)};
}

// A row's scale. Its codes are of its values times `inverse`.
struct RowScale {
    float scale, inverse;
    bool finite;
};

// largest: the greatest of a row's values without their signs, as integers, of which NaNs are the greatest.
template <class T> DEVICE float value_of(unsigned bits) {
    float value, none;
    unpack<T>(bits, value, none);
    return value;
}
template <> DEVICE float value_of<float>(unsigned bits) { return __uint_as_float(bits); }
template <class T> DEVICE RowScale scale_of(unsigned largest) {
    const float value = value_of<T>(largest);
    if (!(value <= LARGEST_FLOAT)) return {1.0f, 0.0f, false};
    const float exact = divide(value, LARGEST_CODE), scale = exact < LEAST_SCALE ? LEAST_SCALE : exact;
    return {scale, divide(1.0f, scale), true};
}
template <class T> DEVICE unsigned codes_of(unsigned two, const RowScale& its) {
    float low, high;
    unpack<T>(two, low, high);
    return its.finite ? two_codes(multiply(low, its.inverse), multiply(high, its.inverse)) : CODES_OF_NAN;
}

DEVICE unsigned larger(unsigned a, unsigned b) { return a > b ? a : b; }
DEVICE unsigned larger_half(unsigned most, unsigned two) { return larger(most, larger(two & 0x7fff, two >> 16 & 0x7fff)); }

// The greatest of what the threads have, for all of them.
struct MostOfWarp {
    DEVICE unsigned operator()(unsigned value) const {
        for (int by = LANES / 2; by > 0; by /= 2)
            value = larger(value, static_cast<unsigned>(shuffle(static_cast<int>(value), threadIdx.x % LANES ^ by)));
        return value;
    }
};
struct MostOfBlock {
    int* each;  // warp's, in shared memory
    DEVICE unsigned operator()(unsigned value) const {
        value = MostOfWarp()(value);
        if (threadIdx.x % LANES == 0) each[threadIdx.x / LANES] = static_cast<int>(value);
        sync_block();
        for (int warp = 0; warp < WARPS; warp++) value = larger(value, static_cast<unsigned>(each[warp]));
        sync_block();
        return value;
    }
};

// A row of 16-bit values to codes and their scale, in two passes, by `threads` of which this is `thread`; `most` is over
// the same ones.
template <class T, class Most>
DEVICE void quantise_row(const unsigned short* x, int width, unsigned char* codes, float* scale, int thread, int threads,
                         const Most& most) {
    const bool vectors = width % 8 == 0 && reinterpret_cast<uint64>(x) % 16 == 0 && reinterpret_cast<uint64>(codes) % 8 == 0;
    const int vectors_end = vectors ? width / 8 : 0, begin = 8 * vectors_end + thread;
    unsigned largest = 0;
#pragma unroll 4
    for (int i = thread; i < vectors_end; i += threads) {
        const uint4 v = load_l2(reinterpret_cast<const uint4*>(x) + i);
        largest = larger_half(larger_half(larger_half(larger_half(largest, v.x), v.y), v.z), v.w);
    }
    for (int i = begin; i < width; i += threads) largest = larger_half(largest, load_l2(x + i));
    const RowScale its = scale_of<T>(most(largest));
    if (thread == 0) store(scale, its.scale);
#pragma unroll 2
    for (int i = thread; i < vectors_end; i += threads) {
        const uint4 v = load_l2(reinterpret_cast<const uint4*>(x) + i);
        store(reinterpret_cast<uint2*>(codes) + i, uint2{codes_of<T>(v.x, its) | codes_of<T>(v.y, its) << 16,
                                                         codes_of<T>(v.z, its) | codes_of<T>(v.w, its) << 16});
    }
    for (int i = begin; i < width; i += threads) store(codes + i, static_cast<unsigned char>(codes_of<T>(load_l2(x + i), its)));
}

// The same of 32-bit values, an element at a time: no engine that is in a hurry has them.
template <class T, class Most>
DEVICE void quantise_row(const float* x, int width, unsigned char* codes, float* scale, int thread, int threads, const Most& most) {
    unsigned largest = 0;
    for (int i = thread; i < width; i += threads) largest = larger(largest, __float_as_uint(load_l2(x + i)) & 0x7fffffff);
    const RowScale its = scale_of<T>(most(largest));
    if (thread == 0) store(scale, its.scale);
    for (int i = thread; i < width; i += threads) {
        const unsigned code = its.finite ? two_codes(multiply(load_l2(x + i), its.inverse), 0.0f) : CODES_OF_NAN;
        store(codes + i, static_cast<unsigned char>(code));
    }
}
