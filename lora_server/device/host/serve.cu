// The shard's kernel: it polls, checks, computes and answers without a host, until it is told to leave or is idle.
//
// One block per multiprocessor, WARPS warps that compute and one that serves; of those that
// serve the first block's alone has work: the poller. All state lies in global memory, so that the kernel may end after
// any turn and be launched again. A turn is a step: the poller writes its order and stores `turn`; all blocks compute
// it; the last to store its rows answers and stores `done`.
#include "lora_step.cuh"
#include "system.cuh"
#include "poller.cuh"

struct ServeMemory {
    BlockMemory compute;
    Order order;
    Args args;
    int live;
    PollerMemory poller;
};

DEVICE bool wait_for_turn(Serve& s, uint64 turn, uint64 launch) {
    for (unsigned looks = 1;; looks++) {
        if (load_acquire(&s.turn) >= turn) return true;
        pause(20);
        if (looks % RARELY) continue;
        if (load_acquire(s.arrivals + 1)) return false;
        if (load_acquire(&s.left) == launch) return load_acquire(&s.turn) >= turn;
    }
}

DEVICE Args arguments_of(const Serve& s, const Order& o, const Order* where, uint64 turn) {
    void* const out = o.scales ? s.results : reinterpret_cast<void*>(o.out);
    return {reinterpret_cast<const void*>(o.rows), reinterpret_cast<const int*>(o.in_map), reinterpret_cast<const int*>(o.out_map),
            reinterpret_cast<const float*>(o.weights), reinterpret_cast<const Segment*>(o.segments), s.blocks,
            &where->num_segments, out, turn % 2 ? s.other_partial : s.partial, s.v, s.delta, s.groups, s.arrivals,
            s.max_entries, s.max_rank, o.row_width, o.in_begin, o.in_width, o.out_width, o.num_windows,
            o.begin0, o.end0, o.begin1, o.end1, o.begin2, o.end2,
            reinterpret_cast<const float*>(o.scales)};
}

template <class T, class Row> DEVICE void work(Serve& s, ServeMemory& m, uint64 launch) {
    const int thread = threadIdx.x;
    Ring ring(m.compute.warps[thread / LANES], thread % LANES);
#pragma unroll 1
    for (uint64 turn = load_l2(&s.done) + 1;; turn++) {
        if (thread == 0) m.live = wait_for_turn(s, turn, launch);
        sync_block();
        if (!m.live) break;
        const Order* order = s.orders + turn % ORDERS;
        if (thread < static_cast<int>(sizeof(Order) / 16))
            reinterpret_cast<uint4*>(&m.order)[thread] = load_l2(reinterpret_cast<const uint4*>(order) + thread);
        copy_acquire();
        sync_block();
        if (thread == 0) m.args = arguments_of(s, m.order, order, turn);
        sync_block();
        if (!lora_step<T, FUSED, Row>(m.args, m.compute, ring)) break;
        if (sizeof(Row) == 1 && !store_codes<T>(s, m.order, m.compute)) break;
        send_answer(s, m.order, turn, m.compute.warps[0].flag);
    }
    ring.drain();
}

// Grid: at most one block per multiprocessor. Not cooperative: such a launch does not begin while a client's kernel is on one of
// its multiprocessors (seen on an H200), and that kernel may wait for this one. Block: THREADS + LANES. Shared memory: sizeof(ServeMemory).
// `launch` is another number each time. Row: see lora_step.
#define SERVE(NAME, T, Row)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS + LANES, 1) NAME(Serve* serve, uint64 launch) {            \
        SHARED_MEMORY(shared);                                                                                      \
        ServeMemory& m = *reinterpret_cast<ServeMemory*>(shared);                                                   \
        if (threadIdx.x < THREADS) {                                                                                \
            work<T, Row>(*serve, m, launch);                                                                            \
        } else if (blockIdx.x == 0) {                                                                               \
            Poller(*serve, m.poller, threadIdx.x - THREADS).run(launch);                                            \
        }                                                                                                           \
    }

#if WIRE_E4M3
SERVE(serve_e4m3_bfloat16, Bf16, unsigned char)
SERVE(serve_e4m3_float16, Fp16, unsigned char)
#else
SERVE(serve_bfloat16, Bf16, unsigned short)
SERVE(serve_float16, Fp16, unsigned short)
#endif
