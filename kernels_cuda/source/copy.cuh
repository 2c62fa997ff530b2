// Copies by threads. A lane has AT_ONCE loads under way before its first store: the compiler may not move a load past a
// store that could change what it reads, so one after the other each 16 bytes would take a round trip to memory.
#pragma once
#include "warp.cuh"

constexpr int AT_ONCE = 8;

template <class Unit> DEVICE void copy_units(void* to, const void* from, int count, int thread, int threads) {
#pragma unroll 1
    for (int first = thread; first < count; first += AT_ONCE * threads) {
        Unit some[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            some[i] = load_l2(static_cast<const Unit*>(from) + (first + i * threads < count ? first + i * threads : first));
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + i * threads < count) store(static_cast<Unit*>(to) + first + i * threads, some[i]);
    }
}

// Copies rows of row_bytes, `stride` bytes apart, one behind the other: `rows` says which. row_bytes, stride and addresses
// are multiples of `Unit`. A warp takes a piece of a row at a time, so that one row keeps several warps busy.
template <class Unit>
DEVICE void copy_rows(unsigned char* to, const unsigned char* from, const int* rows, int num_rows, int row_bytes, int64 stride) {
    constexpr int PIECE = AT_ONCE * LANES;
    const int units = row_bytes / static_cast<int>(sizeof(Unit)), pieces = (units + PIECE - 1) / PIECE;
    const int all = num_rows * pieces, warps = gridDim.x * WARPS;
#pragma unroll 1
    for (int share = blockIdx.x * WARPS + threadIdx.x / LANES; share < all; share += warps) {
        const int row = share / pieces, first = share % pieces * PIECE, rest = units - first;
        const Unit* source = reinterpret_cast<const Unit*>(from + load_l2(rows + row) * stride) + first;
        Unit* target = reinterpret_cast<Unit*>(to + static_cast<int64>(row) * row_bytes) + first;
        copy_units<Unit>(target, source, rest < PIECE ? rest : PIECE, threadIdx.x % LANES, LANES);
    }
}
