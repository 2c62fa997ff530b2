// What the stage `push-pull` times beside a client's own put (link.cu): a raw put of the same bytes, and a pull, for
// which a header is put, and the shard fetches the rows that it announces: a round trip more. Nothing serves with these.
#include "warp.cuh"
#include "system.cuh"
#include "peer.cuh"

struct PullMemory { int seen; };

DEVICE bool see(const uint64* signal, uint64 value, uint64 limit_ns) {
    const uint64 began = now_ns();
    while (load_acquire_system(signal) != value) {
        if (now_ns() - began > limit_ns) return false;
        pause(20);
    }
    confirm(signal, value);
    return true;
}

// Every thread its share, four loads under way; the same thread has the same share of every copy.
DEVICE void copy_share(unsigned char* to, const unsigned char* from, uint64 nbytes) {
    const uint64 all = nbytes / 16, step = static_cast<uint64>(gridDim.x) * THREADS;
    const uint4* source = reinterpret_cast<const uint4*>(from);
    uint4* target = reinterpret_cast<uint4*>(to);
    for (uint64 i = static_cast<uint64>(blockIdx.x) * THREADS + threadIdx.x; i < all; i += 4 * step) {
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (i + j * step < all) v[j] = load_l2(source + i + j * step);
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (i + j * step < all) store(target + i + j * step, v[j]);
    }
}

// The last block to come says so.
DEVICE void say(uint64* arrived, uint64* signal, uint64 value) {
    sync_block();
    if (threadIdx.x != 0) return;
    fence_system();
    if ((add_acq_rel(arrived, 1) + 1) % gridDim.x == 0) store_release_system(signal, value);
}

// Before what is timed, on the same stream: no kernel's own stamp, which one would take later than the other.
extern "C" __global__ void __launch_bounds__(THREADS) stamp(uint64* when) {
    if (threadIdx.x == 0) store(when, now_ns());
}

// A client's: bytes to mapped memory, then the signal.
extern "C" __global__ void __launch_bounds__(THREADS)
    raw_put(const unsigned char* from, unsigned char* to, uint64 nbytes, uint64* arrived, uint64* signal, uint64 value) {
    copy_share(to, from, nbytes);
    say(arrived, signal, value);
}

// A shard's: waits for the signal, fetches the rows unless `from` is null, and answers with them. `here` is when all
// rows were: on a signal that never comes it stays as it is, and nothing is answered.
extern "C" __global__ void __launch_bounds__(THREADS)
    take(const uint64* signal, uint64 value, const unsigned char* from, unsigned char* rows, unsigned char* answer, uint64 nbytes,
         uint64* arrived, uint64* here, uint64* reply, uint64 limit_ns) {
    SHARED_MEMORY(shared);
    PullMemory& m = *reinterpret_cast<PullMemory*>(shared);
    if (threadIdx.x == 0) m.seen = see(signal, value, limit_ns);
    sync_block();
    if (!m.seen) return;
    if (from) copy_share(rows, from, nbytes);
    sync_block();
    if (threadIdx.x == 0 && (add_acq_rel(arrived, 1) + 1) % gridDim.x == 0) store(here, now_ns());
    copy_share(answer, rows, nbytes);
    say(arrived + 1, reply, value);
}

// A client's, one block: until the answer is there. `done` is when.
extern "C" __global__ void __launch_bounds__(THREADS) await_answer(const uint64* reply, uint64 value, uint64 limit_ns, uint64* done) {
    if (threadIdx.x == 0 && see(reply, value, limit_ns)) store(done, now_ns());
}

#if NVSHMEM
// The same by NVSHMEM, one block each: a put of what lies in this PE's own copy of `slot`, and a shard that gets.
extern "C" __global__ void __launch_bounds__(THREADS) far_put(uint64 slot, uint64 nbytes, uint64 signal, uint64 value, int64 pe) {
    if (threadIdx.x == 0) fence_system();
    sync_block();
    put_block(slot, nbytes, signal, value, static_cast<int>(pe));
}

// `from`: where the client's rows lie, in its heap; null: they came with the signal. `answer` goes to the same place there.
extern "C" __global__ void __launch_bounds__(THREADS)
    far_take(const uint64* signal, uint64 value, uint64 from, unsigned char* rows, unsigned char* answer, uint64 nbytes, int64 pe,
             uint64* here, uint64 reply, uint64 limit_ns) {
    SHARED_MEMORY(shared);
    PullMemory& m = *reinterpret_cast<PullMemory*>(shared);
    if (threadIdx.x == 0) m.seen = see(signal, value, limit_ns);
    sync_block();
    if (!m.seen) return;
    if (from) {
        nvshmemx_getmem_nbi_block(rows, reinterpret_cast<void*>(from), nbytes, static_cast<int>(pe));
        nvshmem_quiet();  // a get has no signal; it has no deadline either, so nothing that serves may call it
    }
    sync_block();
    if (threadIdx.x == 0) store(here, now_ns());
    copy_share(answer, rows, nbytes);
    sync_block();
    if (threadIdx.x == 0) fence_system();
    sync_block();
    put_block(reinterpret_cast<uint64>(answer), nbytes, reply, value, static_cast<int>(pe));
}
#endif
