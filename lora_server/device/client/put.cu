// One step of a client into a shard's memory: tables, rows, then the signal. One one-sided put.
//
// The host has written the header, and the tables too unless `counts` is given: then a step was routed on this GPU
// (kernels_cuda/routing.py), and what only the GPU knows is added here. Rows go to `to`, a mirror in GPU memory, or
// behind the tables in the slot, which is host memory that both processes map. The last block to finish stores the
// signal with a release at system scope: a reader of the signal finds the rest in place.
#include "rows.cuh"
#include "system.cuh"
#include "slot.h"

struct Put {
    const unsigned char* from;  // activations: rows of row_bytes, stride apart
    const int* rows;            // which of them
    unsigned char* to;          // or null: the slot's own rows
    unsigned char* slot;        // the request
    const int* counts;          // or null; segments, entries, tokens, tokens with an entry
    const uint4* segments;
    const int* map;             // entry -> its token among those with an entry
    const unsigned* weights;    // or null: a row per token; otherwise one per entry, summed with these weights
    unsigned* finished;         // blocks; 0 before and after
    uint64* signal;
    uint64 value;
    int num_rows, row_bytes;    // num_rows: unless counts are given
    int64 stride;
    float* scales;              // of rows that become codes; or null: in the slot, before its own rows
};

struct BlockMemory {};  // none is shared

DEVICE int aligned_to(int offset, int to) { return (offset + to - 1) / to * to; }

// Where the parts of a request lie: slot.py, request_offsets.
struct Parts {
    int map, weights, scales, rows;  // a step has one map, in or out
    DEVICE Parts(int segments, int entries, bool weighted, int num_scales)
        : map(LORA_HEADER_BYTES + segments * static_cast<int>(sizeof(lora_segment))),
          weights(aligned_to(map + 4 * entries, 16)),
          scales(aligned_to(weighted ? weights + 4 * entries : weights, 16)),
          rows(aligned_to(scales + 4 * num_scales, LORA_ALIGN)) {}
};

DEVICE void write_header(const Put& p, int segments, int entries, int tokens, const Parts& at, int row_bytes) {
    lora_request& header = *reinterpret_cast<lora_request*>(p.slot);
    const int rows = p.weights ? entries : tokens;
    header.num_segments = segments;
    header.num_entries = entries;
    header.num_rows = rows;
    header.num_out_rows = p.weights ? tokens : entries;
    header.payload_bytes = static_cast<uint64_t>(at.rows - LORA_HEADER_BYTES) + static_cast<uint64_t>(rows) * row_bytes;
}

DEVICE void signal_when_all_are_done(const Put& p) {
    sync_block();
    if (threadIdx.x != 0) return;
    fence_system();
    if (add_one(p.finished) != gridDim.x - 1) return;
    *p.finished = 0;
    fence_system();
    store_release_system(p.signal, p.value);
}

template <class Way> DEVICE void put(const Put& p) {
    const int thread = blockIdx.x * THREADS + threadIdx.x, threads = gridDim.x * THREADS;
    unsigned char* to = p.to;
    float* scales = p.scales;
    int num_rows = p.num_rows;
    if (p.counts) {
        const int segments = p.counts[0], entries = p.counts[1], tokens = p.counts[3];
        num_rows = p.weights ? entries : tokens;
        const Parts at(segments, entries, p.weights, Way::scales(num_rows));
        if (thread == 0) write_header(p, segments, entries, tokens, at, Way::bytes(p.row_bytes));
        copy_units<uint4>(p.slot + LORA_HEADER_BYTES, p.segments, segments, thread, threads);
        copy_units<int>(p.slot + at.map, p.map, entries, thread, threads);
        if (p.weights) copy_units<int>(p.slot + at.weights, p.weights, entries, thread, threads);
        if (!to) to = p.slot + at.rows;
        if (!scales) scales = reinterpret_cast<float*>(p.slot + at.scales);
    }
    Way::copy(to, scales, p.from, p.rows, num_rows, p.row_bytes, p.stride);
    signal_when_all_are_done(p);
}

#define PUT(name, Way)                                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        name(const unsigned char* from, const int* rows, unsigned char* to, unsigned char* slot, const int* counts,    \
             const uint4* segments, const int* map, const unsigned* weights, unsigned* finished, uint64* signal,       \
             uint64 value, int64 num_rows, int64 row_bytes, int64 stride, float* scales) {                             \
        put<Way>({from, rows, to, slot, counts, segments, map, weights, finished, signal, value,                      \
                   static_cast<int>(num_rows), static_cast<int>(row_bytes), stride, scales});                          \
    }

PUT(put_vectors, AsItIs<uint4>)
PUT(put_halves, AsItIs<unsigned short>)
PUT(put_e4m3_bfloat16, AsCodes<Bf16>)
PUT(put_e4m3_float16, AsCodes<Fp16>)
PUT(put_e4m3_float32, AsCodes<float>)
