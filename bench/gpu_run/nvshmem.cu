// What the stage `nvshmem` runs on the device: one put with its signal, and a wait that ends by a deadline.
#include <nvshmem.h>
#include <nvshmemx.h>

static __device__ long long now_ns() {
    long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// `nbytes` to PE `peer`, then `value` to its signal. One block.
extern "C" __global__ void put(unsigned char* to, const unsigned char* from, unsigned long long nbytes,
                               unsigned long* signal, unsigned long value, int peer) {
    nvshmemx_putmem_signal_block(to, from, nbytes, signal, value, NVSHMEM_SIGNAL_SET, peer);
}

// took = ns until the signal is `value` or more; -1 if it is not within `limit_ns`. One thread; never blocks.
extern "C" __global__ void wait(unsigned long* signal, unsigned long value, long long limit_ns, long long* took) {
    const long long began = now_ns();
    while (!nvshmem_uint64_test(signal, NVSHMEM_CMP_GE, value)) {
        if (now_ns() - began > limit_ns) {
            *took = -1;
            return;
        }
    }
    *took = now_ns() - began;
}
