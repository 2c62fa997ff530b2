// A client's end of a link. Mirrored by layout.py.
#pragma once
#include "codes.cuh"
#include "slot.h"

// A client's end. Kernels in CUDA graphs know its address alone, so that they survive whatever is written here.
struct alignas(128) Client {
    uint64 epoch, client, depth;
    uint64 request_slots, request_signal, request_bytes;  // in the shard's memory
    uint64 response_slots, response_signal, response_bytes;  // in this GPU's
    uint64 pushed;      // the newest step's seq
    uint64 status_seq;  // that of the step for which `status` is what it is
    uint64 budget_ns;
    uint64 arrived;  // blocks of a `put`: those for which its pass was void count in the upper half, too
    uint64 status;   // LinkStatus: why this pass gets no more deltas; its host clears it
    uint64 abort;    // where its host's watchdog says so: in host memory, which a store reaches whatever streams do
    uint64 pe;       // the shard's: see peer.cuh
    // in leader mode, else 0: where words of a pass are, the same for all links of a stage, so that these count alike
    uint64 live;    // int: whether it has steps, of which each is sent to all shards, if only a header
    uint64 failed;  // uint64: once a step failed, the newest one that had been put, behind which none is sent; else 0
};
