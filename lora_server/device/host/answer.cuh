// Answers: rows and header into the client's response slot, then its signal.
#pragma once
#include "request.cuh"

// k, here and below: the poller's copy of a link, in shared memory.
DEVICE uint64 response_slot(const Link& k, uint64 seq) { return k.response_slots + seq % k.depth * k.response_bytes; }

// The header of an answer, of which `text` bytes or rows follow.
DEVICE void fill_response(lora_response& r, int status, const Link& k, uint64 seq, uint64 payload) {
    r.magic = LORA_RESPONSE_MAGIC, r.version = LORA_SLOT_VERSION, r.status = status;
    r.client = static_cast<uint32_t>(k.client), r.epoch = static_cast<uint32_t>(k.epoch), r.seq = seq;
    r.slot = r.dtype = r.num_rows = r.width = 0;
    r.payload_bytes = payload, r.received_ns = r.started_ns = r.done_ns = 0;
}

// The character of a text that names a handle: its digits, from the first # on.
DEVICE char with_handle(const char* text, int at, int first, unsigned handle) {
    if (text[at] != '#') return text[at];
    for (int place = at - first; place < 9; place++) handle /= 10;
    return static_cast<char>('0' + handle % 10);
}

// A typed error as the answer to `seq`; a whole warp calls it, with shared memory for the header.
DEVICE void answer_refusal(const Link& k, uint64 seq, int refusal, unsigned handle, lora_response& header, int lane) {
    const char* text = text_of(refusal);
    int length = 0, digits = 0;
    while (text[length]) length++;
    while (digits < length && text[digits] != '#') digits++;
    if (lane == 0) fill_response(header, LORA_FAILED, k, seq, length);
    sync_warp();
    const uint64 slot = response_slot(k, seq), signal = k.response_signal, word = LORA_SIGNAL(k.epoch, seq);
    const int pe = static_cast<int>(k.pe);
    unsigned char* to = writable(slot, pe);
    if (lane < static_cast<int>(sizeof(lora_response) / 8))
        store(reinterpret_cast<uint64*>(to) + lane, reinterpret_cast<const uint64*>(&header)[lane]);
    unsigned chars = 0;
    for (int i = 0; i < 4; i++)
        if (lane * 4 + i < length) chars |= static_cast<unsigned>(static_cast<unsigned char>(with_handle(text, lane * 4 + i, digits, handle))) << (8 * i);
    store(reinterpret_cast<unsigned*>(to + LORA_HEADER_BYTES) + lane, chars);
    sync_warp();
    uint64* const far = reinterpret_cast<uint64*>(mapped(signal, pe));
    if (far) {
        if (lane == 0) store_release_system(far, word);
        return;
    }
    if (lane == 0) fence_system();
    sync_warp();
    put_warp(slot, 2 * LORA_HEADER_BYTES, signal, word, pe);
}

// Block 0's, before it arrives: the last block to come has no header to wait for.
DEVICE void write_header(const Order& order) {
    uint64* to = reinterpret_cast<uint64*>(writable(order.slot, static_cast<int>(order.pe)));
    constexpr int WORDS = sizeof(lora_response) / 8;
    if (threadIdx.x < WORDS)
        store(to + threadIdx.x, threadIdx.x == WORDS - 1 ? now_ns() : reinterpret_cast<const uint64*>(order.header)[threadIdx.x]);
}

// A step's results, of which any block has stored any, to codes and scales in its answer, a row per block. False if the
// grid gave up; all threads of a block call it.
template <class T> DEVICE bool store_codes(const Serve& s, const Order& order, BlockMemory& memory) {
    if (!grid_barrier(s.arrivals, memory.warps[0].flag)) return false;
    const MostOfBlock most = {memory.shares.shrink_through};
    for (int row = blockIdx.x; row < order.num_out_rows; row += gridDim.x) {
        const int64 at = static_cast<int64>(row) * order.out_width;
        quantise_row<T>(static_cast<const unsigned short*>(s.results) + at, order.out_width,
                        reinterpret_cast<unsigned char*>(order.out) + at, reinterpret_cast<float*>(order.answer_scales) + row,
                        threadIdx.x, THREADS, most);
    }
    return true;
}

// Every block has stored its rows; then the client hears of it, and the poller. Where the signal is mapped the last
// block to come says so. Beyond a network block 0 waits for the others and puts all: puts of two blocks are not
// ordered, and a client may have two answers on their way. Arrivals of one turn after the other: no block is a turn
// ahead, since all met at the step's barriers. All threads of a block call it.
DEVICE void send_answer(Serve& s, const Order& order, uint64 turn, int& flag) {
    uint64* const far = reinterpret_cast<uint64*>(mapped(order.signal, static_cast<int>(order.pe)));
    if (blockIdx.x == 0) write_header(order);
    sync_block();
    if (threadIdx.x == 0) {
        if (!far) fence_system();  // else the signal's release hands on what the arrivals have acquired
        const uint64 grid = gridDim.x, before = add_acq_rel(&s.sent, 1), target = (before / grid + 1) * grid;
        flag = far ? before + 1 == target : blockIdx.x == 0;
        while (!far && flag && load_acquire(&s.sent) < target)
            if (load_acquire(s.arrivals + 1)) flag = 0;
        if (flag && far) store_release_system(far, order.signal_value);
    }
    sync_block();
    if (!flag) return;
    if (!far) put_block(order.slot, order.nbytes, order.signal, order.signal_value, static_cast<int>(order.pe));
    if (threadIdx.x == 0) store_release(&s.done, turn);
}
