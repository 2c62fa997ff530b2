// Numbers of threads and warps in a block, and sums over them.
#pragma once
#include "ptx.cuh"

constexpr int LANES = 32;
constexpr int THREADS = WARPS * LANES;
enum : unsigned { RARELY = 16 };  // of looks at what is waited for, whether to give up: each other load makes all later

// The sum of a warp's values up to this lane's own; all lanes call it.
DEVICE int sum_through(int value, int lane) {
    for (int by = 1; by < LANES; by *= 2) {
        const int other = shuffle_up(value, by);
        if (lane >= by) value += other;
    }
    return value;
}
