// Probe kernels of the stage `first`: who runs beside whom, and latencies. Times are those of %globaltimer, in ns.
typedef unsigned long long word;

__device__ __forceinline__ word now() {
    word v;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v)::"memory");
    return v;
}

// Spins for `nanoseconds` with about N registers more than it needs. *began: when the last of its blocks began.
template <int N> __device__ void hold(word* began, const float* from, word nanoseconds) {
    float held[N];
#pragma unroll
    for (int i = 0; i < N; i++) held[i] = from[i];
    const word start = now();
    if (threadIdx.x == 0) atomicMax(began, start);
    do {
#pragma unroll
        for (int i = 0; i < N; i++) asm volatile("" : "+f"(held[i]));
    } while (now() - start < nanoseconds);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < N; i++) sum += held[i];
    if (sum == 12345.0f) *began = 0;  // practically never: the registers must not be optimised away
}
// named after the registers that they take together
extern "C" __global__ void hold_16(word* began, const float* from, word ns) { hold<8>(began, from, ns); }
extern "C" __global__ void hold_64(word* began, const float* from, word ns) { hold<56>(began, from, ns); }
extern "C" __global__ void hold_162(word* began, const float* from, word ns) { hold<154>(began, from, ns); }

// Gaps of more than 50 us in which this thread did not run. found: how many, the whole time, then begin and length of
// each of the first `most`.
extern "C" __global__ void gaps(word* found, word most, word nanoseconds) {
    const word start = now();
    word last = start, count = 0;
    while (last - start < nanoseconds) {
        const word next = now();
        if (next - last > 50000 && count < most) found[2 + 2 * count] = last, found[3 + 2 * count] = next - last, count++;
        last = next;
    }
    found[0] = count, found[1] = last - start;
}

// A chain of addresses, one load after the other.
extern "C" __global__ void chase(const word* at, word steps, word* out) {
    word v = 0;
    const word start = now();
    for (word i = 0; i < steps; i++) asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(at + v) : "memory");
    out[0] = now() - start, out[1] = v;
}

// A fence for the whole system after the block stored to `count` lines; as its first thread sees it.
extern "C" __global__ void fences(word* lines, word count, word rounds, word* out) {
    word spent = 0;
    for (word round = 0; round < rounds; round++) {
        for (word i = threadIdx.x; i < count; i += blockDim.x) lines[16 * i] = round;
        __syncthreads();
        const word start = now();
        asm volatile("fence.acq_rel.sys;" ::: "memory");
        spent += now() - start;
    }
    if (threadIdx.x == 0) *out = spent;
}

// A barrier of all blocks, which are resident together.
extern "C" __global__ void barriers(word* arrivals, word rounds, word* out) {
    const word start = now();
    for (word round = 1; round <= rounds; round++) {
        word seen;
        asm volatile("atom.add.release.gpu.global.u64 %0, [%1], 1;" : "=l"(seen) : "l"(arrivals) : "memory");
        do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(arrivals) : "memory");
        while (seen < round * gridDim.x);
    }
    if (blockIdx.x == 0) *out = now() - start;
}
