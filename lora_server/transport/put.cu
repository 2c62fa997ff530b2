// Rows of a client's activations into the memory of a shard's GPU, then the step's signal: one one-sided put.
//
// to[i] = from[rows[i]], `width` units of Unit each. The last block to finish stores `value` to `signal`, which
// lies in host memory that both processes map, with a release at system scope: whoever reads it there finds
// the rows in place. `finished` is this client's counter, 0 before and after.
template <class Unit>
__device__ void put(const Unit* from, const long long* rows, Unit* to, long long num_rows, long long width,
                    unsigned* finished, unsigned long long* signal, unsigned long long value) {
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < num_rows * width; i += step)
        to[i] = from[rows[i / width] * width + i % width];
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence_system();
    if (atomicAdd(finished, 1) != gridDim.x - 1) return;
    *finished = 0;
    __threadfence_system();
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(signal), "l"(value) : "memory");
}

// Addresses are multiples of 16 and so is a row's size: 16 bytes at a time.
extern "C" __global__ void put_vectors(const uint4* from, const long long* rows, uint4* to, long long num_rows,
                                       long long width, unsigned* finished, unsigned long long* signal,
                                       unsigned long long value) {
    put(from, rows, to, num_rows, width, finished, signal, value);
}

// Anything else: 2 bytes at a time.
extern "C" __global__ void put_halves(const unsigned short* from, const long long* rows, unsigned short* to,
                                      long long num_rows, long long width, unsigned* finished,
                                      unsigned long long* signal, unsigned long long value) {
    put(from, rows, to, num_rows, width, finished, signal, value);
}
