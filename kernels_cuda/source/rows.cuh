// How the rows of a step travel: `rows` says which of those that lie `stride` bytes apart; row_bytes is what one has there.
#pragma once
#include "copy.cuh"
#include "e4m3.cuh"

// As they are, in `Unit`s that row_bytes, stride and addresses are multiples of.
template <class Unit> struct AsItIs {
    DEVICE static int scales(int) { return 0; }
    DEVICE static int bytes(int row_bytes) { return row_bytes; }
    DEVICE static void copy(unsigned char* to, float*, const unsigned char* from, const int* rows, int num_rows, int row_bytes,
                            int64 stride) {
        copy_rows<Unit>(to, from, rows, num_rows, row_bytes, stride);
    }
};

// Or as codes of values of T, with a scale for each row. A row per warp, which needs the largest of it first.
template <class T> struct AsCodes {
    DEVICE static int scales(int num_rows) { return num_rows; }
    DEVICE static int bytes(int row_bytes) { return row_bytes / 2; }
    DEVICE static void copy(unsigned char* to, float* scales, const unsigned char* from, const int* rows, int num_rows,
                            int row_bytes, int64 stride) {
        const int width = row_bytes / 2, warps = gridDim.x * WARPS;
        for (int row = blockIdx.x * WARPS + threadIdx.x / LANES; row < num_rows; row += warps)
            quantise_row<T>(reinterpret_cast<const unsigned short*>(from + load_l2(rows + row) * stride), width,
                            to + static_cast<int64>(row) * width, scales + row, threadIdx.x % LANES, LANES, MostOfWarp());
    }
};
