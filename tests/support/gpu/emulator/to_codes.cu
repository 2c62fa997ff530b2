// Rows of 16-bit values to codes and scales, a row per block: as a shard makes them of its results.
#include "rows.cuh"

struct BlockMemory { int each[WARPS]; };

extern "C" __global__ void __launch_bounds__(THREADS)
    to_codes(const unsigned short* x, unsigned char* codes, float* scales, int64 rows, int64 width) {
    SHARED_MEMORY(shared);
    const MostOfBlock most = {reinterpret_cast<BlockMemory*>(shared)->each};
    for (int row = blockIdx.x; row < static_cast<int>(rows); row += gridDim.x)
        quantise_row<Bf16>(x + row * width, static_cast<int>(width), codes + row * width, scales + row, threadIdx.x, THREADS, most);
}
