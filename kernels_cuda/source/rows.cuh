// Copies of a step's rows onto the wire. Source rows lie `stride` bytes apart and have row_bytes each; `rows` says which.
#pragma once
#include "copy.cuh"
#include "e4m3.cuh"

// Copies rows unchanged, in units of `Unit`; row_bytes, stride and addresses are multiples of it.
template <class Unit> struct AsItIs {
    DEVICE static int scales(int) { return 0; }
    DEVICE static int bytes(int row_bytes) { return row_bytes; }
    DEVICE static void copy(unsigned char* to, float*, const unsigned char* from, const int* rows, int num_rows, int row_bytes,
                            int64 stride) {
        copy_rows<Unit>(to, from, rows, num_rows, row_bytes, stride);
    }
};

// The type that a value of T has in memory.
template <class T> struct Stored { using Type = unsigned short; };
template <> struct Stored<float> { using Type = float; };

// Copies rows as 8-bit codes of values of T, with a scale for each row. One warp per row: it needs the row's maximum first.
template <class T> struct AsCodes {
    using Value = typename Stored<T>::Type;
    DEVICE static int scales(int num_rows) { return num_rows; }
    DEVICE static int bytes(int row_bytes) { return row_bytes / static_cast<int>(sizeof(Value)); }
    DEVICE static void copy(unsigned char* to, float* scales, const unsigned char* from, const int* rows, int num_rows,
                            int row_bytes, int64 stride) {
        const int width = bytes(row_bytes), warps = gridDim.x * WARPS;
        for (int row = blockIdx.x * WARPS + threadIdx.x / LANES; row < num_rows; row += warps)
            quantise_row<T>(reinterpret_cast<const Value*>(from + load_l2(rows + row) * stride), width,
                            to + static_cast<int64>(row) * width, scales + row, threadIdx.x % LANES, LANES, MostOfWarp());
    }
};
