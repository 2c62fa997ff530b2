// A client's kernels, for CUDA graphs: put a step; wait for its answer, and add its rows. Their arguments never change:
// what does (seq, epoch, addresses, how long to wait) lies in the link's state block. `put` says in a word of its step's
// which seq it sent, or 0, and by that word the step's answer is awaited: several steps may be in flight. A pass in
// which something failed goes on without deltas: `put` sends nothing, `add` adds nothing, until the host has seen why;
// answers to what was sent are awaited still, so that their slots are free for the next pass.
#include "rows.cuh"
#include "system.cuh"
#include "client.cuh"
#include "peer.cuh"

struct Put {
    Client* link;
    uint64* sent;                // its seq goes here, or 0 if nothing is sent
    const lora_request* header;  // all of it that does not change from step to step
    const unsigned char* x;      // activations: rows of row_bytes, stride apart
    const int* counts;           // segments, entries, tokens, tokens with an entry: see route.cu
    const uint4* segments;       // handle, expert, first, entries
    const int* rows;             // which rows of x travel
    const int* map;              // entry -> its row there (in_map), or its token (out_map)
    const float* weights;        // or null: a row per token; otherwise a row per entry, summed per token with these
    int row_bytes;  // of x
    int64 stride;
};

struct LinkMemory {
    alignas(16) lora_request header;
    int flag;
};

DEVICE uint64 whole(uint64 offset, uint64 to) { return (offset + to - 1) / to * to; }

DEVICE void fill_header(lora_request& h, const Put& p, const Client& k, uint64 seq, int segments, int entries, int tokens, uint64 nbytes) {
    const int rows = p.weights ? entries : tokens;
    h.client = static_cast<uint32_t>(load(&k.client)), h.epoch = static_cast<uint32_t>(load(&k.epoch));
    h.seq = seq, h.slot = static_cast<uint32_t>(seq % load(&k.depth));
    h.num_rows = rows, h.num_entries = entries, h.num_segments = segments;
    h.num_out_rows = p.weights ? tokens : entries;
    h.payload_bytes = nbytes - LORA_HEADER_BYTES;
    h.budget_us = load(&k.budget_ns) / 1000, h.pushed_ns = now_ns();
}

constexpr uint64 A_VOID_BLOCK = 1ull << 32;

// Once all blocks have stored their part one of them says so: the last, or beyond a network block 0, which puts it all,
// since puts of two blocks are not ordered, and this step's comes before the next one's. Nothing is said where a block
// found its pass void, which another link's kernel may say while these read it.
DEVICE void signal(Client& k, uint64* sent, LinkMemory& m, uint64 slot, uint64 nbytes, uint64 seq, bool is_void) {
    const int pe = static_cast<int>(load(&k.pe));
    const uint64 signal = load(&k.request_signal), word = LORA_SIGNAL(load(&k.epoch), seq);
    uint64* const far = reinterpret_cast<uint64*>(mapped(signal, pe));
    sync_block();
    if (threadIdx.x == 0) {
        if (!far) fence_system();  // else the signal's release hands on what the arrivals have acquired
        const uint64 one = is_void ? A_VOID_BLOCK + 1 : 1;
        uint64 arrived = add_acq_rel(&k.arrived, one) + one;
        while (!far && blockIdx.x == 0 && arrived % A_VOID_BLOCK < gridDim.x) arrived = load_acquire(&k.arrived);
        const bool ends = far ? arrived % A_VOID_BLOCK == gridDim.x : blockIdx.x == 0;
        m.flag = ends && arrived < A_VOID_BLOCK;
        if (ends) store(&k.arrived, 0ull), store(sent, m.flag ? seq : 0);
        if (m.flag) store(&k.pushed, seq);
        if (m.flag && far) store_release_system(far, word);
    }
    sync_block();
    if (m.flag && !far) put_block(slot, nbytes, signal, word, pe);
}

// Whether its pass goes on without deltas from this step on: what had been sent on a link when a step on it failed is
// sent on the others of its stage, too.
DEVICE bool is_void(uint64 status, uint64 failed, uint64 seq) {
    const uint64 newest = failed ? load_acquire(reinterpret_cast<const uint64*>(failed)) : 0;
    return status || (newest && seq > newest);
}

// The same for a whole block, of which one thread looks: another link's kernel may write the word meanwhile.
DEVICE bool is_void(uint64 status, uint64 failed, uint64 seq, int& flag) {
    if (!failed) return status;
    if (threadIdx.x == 0) flag = is_void(status, failed, seq);
    sync_block();
    return flag;
}

template <class Way> DEVICE void put(const Put& p, LinkMemory& m) {
    Client& k = *p.link;
    const int thread = blockIdx.x * THREADS + threadIdx.x, threads = gridDim.x * THREADS;
    // Nothing depends on what comes before it: one trip to memory, not four.
    const int segments = load_l2(p.counts), entries = load_l2(p.counts + 1), tokens = load_l2(p.counts + 3);
    const uint64 status = load_l2(&k.status), seq = load_l2(&k.pushed) + 1, live = load(&k.live), failed = load(&k.failed);
    const uint64 slots = load(&k.request_slots), depth = load(&k.depth), slot_bytes = load(&k.request_bytes), pe = load(&k.pe);
    all_begun();
    if ((live ? load_l2(reinterpret_cast<const int*>(live)) : entries) == 0) {
        if (thread == 0) store(p.sent, 0ull);
        return;
    }
    if (is_void(status, failed, seq, m.flag)) {
        signal(k, p.sent, m, 0, 0, seq, true);
        return;
    }
    const uint64 place = slots + seq % depth * slot_bytes;
    unsigned char* slot = writable(place, static_cast<int>(pe));
    const uint64 map_at = LORA_HEADER_BYTES + 16ull * segments, weights_at = whole(map_at + 4ull * entries, 16);
    const int num_rows = p.weights ? entries : tokens;
    const uint64 scales_at = whole(p.weights ? weights_at + 4ull * entries : weights_at, 16);
    const uint64 rows_at = whole(scales_at + 4ull * Way::scales(num_rows), LORA_ALIGN);
    const uint64 nbytes = rows_at + static_cast<uint64>(num_rows) * Way::bytes(p.row_bytes);
    // Rows begin at the first warp; what else there is of a short step is other warps', which wait beside them.
    if (blockIdx.x == gridDim.x - 1) {
        if (threadIdx.x < sizeof(lora_request) / 8)
            reinterpret_cast<uint2*>(&m.header)[threadIdx.x] = load_l2(reinterpret_cast<const uint2*>(p.header) + threadIdx.x);
        sync_block();
        if (threadIdx.x == 0) fill_header(m.header, p, k, seq, segments, entries, tokens, nbytes);
        sync_block();
        if (threadIdx.x < sizeof(lora_request) / 8)
            store(reinterpret_cast<uint2*>(slot) + threadIdx.x, reinterpret_cast<const uint2*>(&m.header)[threadIdx.x]);
    }
    const auto from = [=](int eighths) { return (thread + threads - eighths * threads / 8) % threads; };
    copy_units<uint4>(slot + LORA_HEADER_BYTES, p.segments, segments, from(4), threads);
    copy_units<int>(slot + map_at, p.map, entries, from(5), threads);
    if (p.weights) copy_units<float>(slot + weights_at, p.weights, entries, from(6), threads);
    Way::copy(slot + rows_at, reinterpret_cast<float*>(slot + scales_at), p.x, p.rows, num_rows, p.row_bytes, p.stride);
    signal(k, p.sent, m, place, nbytes, seq, false);
}

#define PUT(NAME, Way)                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                            \
        NAME(Client* link, uint64* sent, const lora_request* header, const unsigned char* x, const int* counts,      \
             const uint4* segments, const int* rows, const int* map, const float* weights, int64 row_bytes,          \
             int64 stride) {                                                                                         \
        SHARED_MEMORY(shared);                                                                                       \
        put<Way>({link, sent, header, x, counts, segments, rows, map, weights, static_cast<int>(row_bytes), stride},       \
                  *reinterpret_cast<LinkMemory*>(shared));                                                           \
    }

PUT(link_put_vectors, AsItIs<uint4>)
PUT(link_put_halves, AsItIs<unsigned short>)
PUT(link_put_e4m3_bfloat16, AsCodes<Bf16>)
PUT(link_put_e4m3_float16, AsCodes<Fp16>)

#if NVSHMEM
// A step that another kernel, and its host, have left in this PE's own slot, to a peer beyond a network. One block.
extern "C" __global__ void __launch_bounds__(THREADS) link_send(Client* link, uint64 seq) {
    const Client& k = *link;
    const uint64 place = load(&k.request_slots) + seq % load(&k.depth) * load(&k.request_bytes);
    const uint64 payload = load_l2(reinterpret_cast<const uint64*>(place + offsetof(lora_request, payload_bytes)));
    if (threadIdx.x == 0) fence_system();
    sync_block();
    put_block(place, LORA_HEADER_BYTES + payload, load(&k.request_signal), LORA_SIGNAL(load(&k.epoch), seq),
              static_cast<int>(load(&k.pe)));
}
#endif

DEVICE int status_of_answer(const Client& k, uint64 seq) {
    const uint64* slot = reinterpret_cast<const uint64*>(load(&k.response_slots) + seq % load(&k.depth) * load(&k.response_bytes));
    const uint64 first = load_l2(slot), second = load_l2(slot + 1), its_seq = load_l2(slot + 2);
    const bool ours = static_cast<unsigned>(first) == LORA_RESPONSE_MAGIC && (first >> 32 & 0xffff) == LORA_SLOT_VERSION &&
                      static_cast<unsigned>(second) == static_cast<unsigned>(load(&k.client)) &&
                      second >> 32 == load(&k.epoch) && its_seq == seq;
    if (!ours) return LINK_BROKEN;
    return first >> 48 == LORA_OK ? LINK_OK : LINK_FAILED;
}

// Why the pass is void from here on; of several blocks that say so the last is heard.
DEVICE void make_void(Client& k, uint64 seq, int status) {
    store_release(&k.status_seq, seq);
    store_release(&k.status, static_cast<uint64>(status));
    uint64* const failed = reinterpret_cast<uint64*>(load(&k.failed));
    if (failed) store_release(failed, load_l2(&k.pushed));
}

DEVICE bool is_signalled(uint64 word, uint64 epoch, uint64 seq) {
    return LORA_SIGNAL_EPOCH(word) == (epoch & 0xffff) && LORA_SIGNAL_SEQ(word) >= seq;
}

// One thread's wait, which looks without acquiring: each acquire empties the L1 of its multiprocessor, where a shard of the
// same GPU may compute. LINK_OK where the answer to `seq` is there, and its rows are to be added. Of a link that is broken
// nothing comes any more.
DEVICE int wait_for(Client& k, uint64 seq) {
    const uint64 epoch = load(&k.epoch), began = now_ns(), budget = load(&k.budget_ns);
    const int status = static_cast<int>(load_acquire(&k.status));
    const uint64* const signal = reinterpret_cast<const uint64*>(load(&k.response_signal));
    const uint64* const abort = reinterpret_cast<const uint64*>(load(&k.abort));
    if (status != LINK_OK && status != LINK_FAILED) return status;
    int result = LINK_OK;
    for (unsigned looks = 1; result == LINK_OK; looks++) {
        if (is_signalled(load_system(signal), epoch, seq)) {
            confirm(signal, load_acquire_system(signal));
            result = status_of_answer(k, seq);
            break;
        }
        pause(20);
        if (looks % RARELY) continue;
        if (load_system(abort)) result = LINK_ABORTED;
        else if (now_ns() - began > budget) result = LINK_TIMEOUT;
    }
    if (result != LINK_OK && (status == LINK_OK || result != LINK_FAILED)) make_void(k, seq, result);
    return status == LINK_OK ? result : status;
}

// One warp, of which one thread has work: a shard on the same GPU needs the rest of it.
extern "C" __global__ void __launch_bounds__(THREADS) link_wait(Client* link, const uint64* sent) {
    const uint64 seq = load_l2(sent);
    if (threadIdx.x == 0 && seq) wait_for(*link, seq);
}

template <class T> DEVICE unsigned sum_of_two(unsigned a, unsigned b) {
    float low, high, more_low, more_high;
    unpack<T>(a, low, high);
    unpack<T>(b, more_low, more_high);
    return pack<T>(low + more_low, high + more_high);
}
template <class T> DEVICE uint4 sum_of_two(const uint4& a, const uint4& b) {
    return {sum_of_two<T>(a.x, b.x), sum_of_two<T>(a.y, b.y), sum_of_two<T>(a.z, b.z), sum_of_two<T>(a.w, b.w)};
}

// y[rows[i], columns] += row i of an answer, which has `width` columns: `count` of them from `skip` on. y begins at its
// own; its rows lie `stride` bytes apart.
struct Sums {
    unsigned char* y;
    const int* rows;
    int num_rows, count, width, skip;
    int64 stride;
};

// In `Unit`s that all of them are multiples of; a warp takes a piece of a row at a time.
template <class T, class Unit> DEVICE void add_rows(const Sums& s, const unsigned char* answer) {
    constexpr int ADDED_AT_ONCE = 4, PIECE = ADDED_AT_ONCE * LANES;
    const int units = 2 * s.count / static_cast<int>(sizeof(Unit)), pieces = (units + PIECE - 1) / PIECE;
    const int all = s.num_rows * pieces, warps = gridDim.x * WARPS;
#pragma unroll 1
    for (int share = blockIdx.x * WARPS + threadIdx.x / LANES; share < all; share += warps) {
        const int row = share / pieces, first = share % pieces * PIECE + threadIdx.x % LANES;
        const Unit* from = reinterpret_cast<const Unit*>(answer + 2 * static_cast<int64>(row) * s.width);
        Unit* to = reinterpret_cast<Unit*>(s.y + load_l2(s.rows + row) * s.stride);
        Unit delta[ADDED_AT_ONCE], sum[ADDED_AT_ONCE];
#pragma unroll
        for (int i = 0; i < ADDED_AT_ONCE; i++) {
            const int at = first + i * LANES < units ? first + i * LANES : units - 1;
            delta[i] = load_l2(from + at), sum[i] = load_l2(to + at);
        }
#pragma unroll
        for (int i = 0; i < ADDED_AT_ONCE; i++)
            if (first + i * LANES < units) store(to + first + i * LANES, sum_of_two<T>(sum[i], delta[i]));
    }
}

// An answer's rows as values of T,
template <class T> struct Halves {
    DEVICE static void add(const Sums& s, const unsigned char* slot) {
        const unsigned char* answer = slot + LORA_HEADER_BYTES + 2 * s.skip;
        const uint64 sizes = reinterpret_cast<uint64>(s.y) | reinterpret_cast<uint64>(answer) | s.stride | 2 * s.width | 2 * s.count;
        if (sizes % sizeof(uint4) == 0) add_rows<T, uint4>(s, answer);
        else add_rows<T, unsigned>(s, answer);
    }
};
// or as codes behind a scale each; two columns at a time, a row per warp.
template <class T> struct Codes {
    DEVICE static void add(const Sums& s, const unsigned char* slot) {
        const float* scales = reinterpret_cast<const float*>(slot + LORA_HEADER_BYTES);
        const unsigned char* answer = slot + whole(LORA_HEADER_BYTES + 4ull * s.num_rows, LORA_ALIGN) + s.skip;
        for (int row = blockIdx.x * WARPS + threadIdx.x / LANES; row < s.num_rows; row += gridDim.x * WARPS) {
            const unsigned short* from = reinterpret_cast<const unsigned short*>(answer + static_cast<int64>(row) * s.width);
            unsigned* to = reinterpret_cast<unsigned*>(s.y + load_l2(s.rows + row) * s.stride);
            const float scale = load_l2(scales + row);
#pragma unroll 4
            for (int i = threadIdx.x % LANES; i < s.count / 2; i += LANES) {
                float low, high;
                unpack<Fp16>(two_halves(load_l2(from + i)), low, high);
                store(to + i, sum_of_two<T>(load_l2(to + i), pack<T>(multiply(low, scale), multiply(high, scale))));
            }
        }
    }
};

// Each block looks for the answer; it is there already, because link_wait ran first. When all these blocks waited instead, a
// shard on the same GPU took fifty times as long for a step (seen on an H200). An even number of columns from an even one on.
template <class Answer> DEVICE void add(Client& k, const uint64* sent, const int* counts, bool by_token, Sums s, int& flag) {
    const uint64 seq = load_l2(sent), failed = load(&k.failed);
    const int entries = load_l2(counts + 1), tokens = load_l2(counts + 3);
    const uint64 slots = load(&k.response_slots), depth = load(&k.depth), slot_bytes = load(&k.response_bytes);
    all_begun();
    if (seq == 0) return;
    if (threadIdx.x == 0) flag = wait_for(k, seq) != LINK_OK || is_void(LINK_OK, failed, ~0ull);
    sync_block();
    if (flag || entries == 0) return;
    s.num_rows = by_token ? tokens : entries;
    Answer::add(s, reinterpret_cast<const unsigned char*>(slots + seq % depth * slot_bytes));
}

// width: columns of the answer, all windows side by side; the one here is `count` from `skip` on, and `column` of y.
#define ADD(NAME, T, Answer)                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                            \
        NAME(Client* link, const uint64* sent, const int* counts, const int* rows, int64 by_token, unsigned char* y, \
             int64 stride, int64 width, int64 column, int64 count, int64 skip) {                                     \
        SHARED_MEMORY(shared);                                                                                       \
        add<Answer<T>>(*link, sent, counts, by_token,                                                                \
                       {y + 2 * column, rows, 0, static_cast<int>(count), static_cast<int>(width), static_cast<int>(skip), stride}, \
                       reinterpret_cast<LinkMemory*>(shared)->flag);                                                 \
    }

ADD(link_add_bfloat16, Bf16, Halves)
ADD(link_add_float16, Fp16, Halves)
ADD(link_add_e4m3_bfloat16, Bf16, Codes)
ADD(link_add_e4m3_float16, Fp16, Codes)
