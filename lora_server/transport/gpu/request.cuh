// What a client wrote is copied once, then checked, then used: the rules of shard/request.py, in their order. A warp
// does it together. Every check that fails has a name here, and a sentence for the client.
#pragma once
#include "peer.cuh"
#include "protocol.cuh"

enum Refusal { NOTHING_WRONG, BAD_HEADER, BAD_SITE, BAD_COUNTS, BAD_WINDOWS, BAD_SIZE, BAD_SEGMENTS, BAD_MAP,
               UNKNOWN_ADAPTER, MISPLACED, BAD_DTYPE, TOO_LATE, DRAINING, NOT_HELD, BAD_WIRE, BAD_SCALE };

// code\nmessage, as in write_failure of shard/request.py; at most 127 characters.
DEVICE const char* text_of(int refusal) {
    switch (refusal) {
        case BAD_HEADER: return "protocol\ngot another header than that of this client, epoch, seq and version, no class, or too many segments";
        case BAD_SITE: return "protocol\ngot a layer or projection beyond the model's, or a dtype that is none";
        case BAD_COUNTS: return "protocol\ngot more rows, entries or segments than fit a step, or counts that do not agree; see --max-step-rows";
        case BAD_WINDOWS: return "protocol\ngot an input or output window outside the site, or windows out of order";
        case BAD_SIZE: return "protocol\ngot another payload size than the header's counts give, or one beyond the slot";
        case BAD_SEGMENTS: return "protocol\ngot segments with gaps, without entries, or of an expert that the site does not have";
        case BAD_MAP: return "protocol\ngot a map that points outside the rows";
        case UNKNOWN_ADAPTER: return "unknown_adapter\nthe step names an adapter that is not here; was it removed?";
        case MISPLACED: return "protocol\nan expert of the step is not on this shard; placements differ, join again";
        case BAD_DTYPE: return "protocol\ngot rows of another dtype than this server's; start it with the engine's --dtype";
        case TOO_LATE: return "step_timeout\nthe weights were not loaded before the client's deadline; wait longer, or prefetch";
        case DRAINING: return "shard_unavailable\nthe shard is draining; the next request joins another, or waits";
        case NOT_HELD: return "permission_denied\nthe step names an adapter that its client does not hold; acquire it first";
        case BAD_WIRE: return "protocol\ngot rows of another wire than this server's (--wire): both ends must be of a version that knows it; join again";
        case BAD_SCALE: return "protocol\ngot the scale of a row that is negative, or not finite";
        default: return "step\nrefused";
    }
}

DEVICE uint64 rounded(uint64 offset, uint64 to) { return (offset + to - 1) / to * to; }

// Where the parts of a request lie: request_offsets of wire/slot.py.
struct RequestParts {
    uint64 segments, in_map, out_map, weights, scales, rows, end;
    DEVICE RequestParts(const lora_request& h, int element_bytes) {
        const uint64 in = h.flags & LORA_HAS_IN_MAP ? 4ull * h.num_entries : 0, out = h.flags & LORA_HAS_OUT_MAP ? 4ull * h.num_entries : 0;
        segments = LORA_HEADER_BYTES;
        in_map = segments + 16ull * h.num_segments;
        out_map = rounded(in_map + in, 16);
        weights = rounded(out_map + out, 16);
        scales = rounded(weights + out, 16);
        rows = rounded(scales + (h.dtype == LORA_E4M3 ? 4ull * h.num_rows : 0), LORA_ALIGN);
        end = rows + static_cast<uint64>(h.num_rows) * (h.in_end - h.in_begin) * element_bytes;
    }
};

DEVICE int element_bytes(const lora_request& h) { return h.dtype == LORA_FLOAT32 ? 4 : h.dtype == LORA_E4M3 ? 1 : 2; }

DEVICE int check_header(const lora_request& h, uint64 client, uint64 epoch, uint64 seq, int most) {
    const bool good = h.magic == LORA_REQUEST_MAGIC && h.version == LORA_SLOT_VERSION && h.num_windows >= 1 &&
                      h.num_windows <= 3 && h.client == client && h.epoch == epoch && h.seq == seq &&
                      h.step_class <= LORA_PREFILL && h.num_segments <= static_cast<unsigned>(most);
    return good ? NOTHING_WRONG : BAD_HEADER;
}

// Whether rows travel as codes, or as they are, is the server's to say.
DEVICE bool is_of_wire(const Serve& s, const lora_request& h) { return (h.dtype == LORA_E4M3) == (s.dtype == LORA_E4M3); }

DEVICE int check_counts(const Serve& s, const lora_request& h, uint64 slot_bytes) {
    if (h.layer >= static_cast<unsigned>(s.num_layers) || h.projection >= static_cast<unsigned>(s.num_projections) ||
        h.dtype > LORA_E4M3)
        return BAD_SITE;
    if (!is_of_wire(s, h)) return BAD_WIRE;
    const unsigned most = s.max_entries;
    if (h.num_entries > most || h.num_rows > most || h.num_out_rows > most) return BAD_COUNTS;
    if (h.num_segments > h.num_entries || (h.num_entries && !h.num_segments)) return BAD_COUNTS;
    const Site site = load(s.sites + h.layer * s.num_projections + h.projection);
    if (!(h.in_begin < h.in_end && h.in_end <= static_cast<unsigned>(site.in_width))) return BAD_WINDOWS;
    unsigned previous = 0;
    for (unsigned w = 0; w < h.num_windows; w++) {
        const unsigned begin = h.out_windows[2 * w], end = h.out_windows[2 * w + 1];
        if (!(previous <= begin && begin < end && end <= static_cast<unsigned>(site.out_width))) return BAD_WINDOWS;
        previous = end;
    }
    if (!(h.flags & LORA_HAS_IN_MAP) && h.num_rows != h.num_entries) return BAD_COUNTS;
    if (!(h.flags & LORA_HAS_OUT_MAP) && h.num_out_rows != h.num_entries) return BAD_COUNTS;
    const RequestParts at(h, element_bytes(h));
    if (at.end > slot_bytes || h.payload_bytes != at.end - LORA_HEADER_BYTES) return BAD_SIZE;
    return NOTHING_WRONG;
}

DEVICE uint4 segment_of(const unsigned char* tables, int i) {
    return load_l2(reinterpret_cast<const uint4*>(tables + LORA_HEADER_BYTES) + i);
}

// handle, expert, first, entries of each follow each other; the whole warp calls it.
DEVICE int check_segments(const Serve& s, const lora_request& h, const unsigned char* tables, int lane) {
    const unsigned experts = load(s.sites + h.layer * s.num_projections + h.projection).experts, num = h.num_segments;
    bool wrong = num == 0 && h.num_entries != 0;
#pragma unroll 4
    for (unsigned i = lane; i < num; i += LANES) {
        const uint4 one = segment_of(tables, i), previous = segment_of(tables, i ? i - 1 : 0);
        const unsigned first = i ? previous.z + previous.w : 0;
        wrong |= one.z != first || one.w < 1 || one.w > h.num_entries || one.x >> 31 || one.y >= experts ||
                 (i + 1 == num && one.z + one.w != h.num_entries);
    }
    return votes(wrong) ? BAD_SEGMENTS : NOTHING_WRONG;
}

DEVICE int check_map(const unsigned char* map, unsigned entries, unsigned rows, int lane) {
    bool wrong = false;
#pragma unroll 4
    for (unsigned i = lane; i < entries; i += LANES)
        wrong |= static_cast<unsigned>(load_l2(reinterpret_cast<const int*>(map) + i)) >= rows;
    return votes(wrong) ? BAD_MAP : NOTHING_WRONG;
}

// A scale is finite, and from 0 on.
DEVICE int check_scales(const unsigned char* scales, unsigned num_rows, int lane) {
    bool wrong = false;
    for (unsigned i = lane; i < num_rows; i += LANES) {
        const float scale = load_l2(reinterpret_cast<const float*>(scales) + i);
        wrong |= !(scale >= 0.0f && scale <= LARGEST_FLOAT);  // neither is true of a NaN
    }
    return votes(wrong) ? BAD_SCALE : NOTHING_WRONG;
}

DEVICE int check_tables(const Serve& s, const lora_request& h, const unsigned char* tables, int lane) {
    const RequestParts at(h, element_bytes(h));
    int why = check_segments(s, h, tables, lane);
    if (!why && h.flags & LORA_HAS_IN_MAP) why = check_map(tables + at.in_map, h.num_entries, h.num_rows, lane);
    if (!why && h.flags & LORA_HAS_OUT_MAP) why = check_map(tables + at.out_map, h.num_entries, h.num_out_rows, lane);
    if (!why && h.dtype == LORA_E4M3) why = check_scales(tables + at.scales, h.num_rows, lane);
    return why;
}

enum WeightState { WEIGHTS_UNKNOWN, WEIGHTS_LOADING, WEIGHTS_READY };

DEVICE const Entry* entry_of(const Serve& s, unsigned handle, unsigned layer, unsigned projection) {
    const unsigned index = handle & ((1u << HANDLE_BITS) - 1);
    if (index >= static_cast<unsigned>(s.num_handles)) return nullptr;
    return s.directory + (static_cast<int64>(index) * s.num_layers + layer) * s.num_projections + projection;
}

// Whoever finds READY finds the pages too, and the entry's other fields as they belong to this generation.
DEVICE int weights_of(const Serve& s, unsigned handle, unsigned layer, unsigned projection) {
    const Entry* entry = entry_of(s, handle, layer, projection);
    if (entry == nullptr) return WEIGHTS_UNKNOWN;
    const uint64 ready = load_acquire_system(&entry->ready);
    const unsigned generation = load_l2(reinterpret_cast<const int*>(&entry->generation));
    if (generation == 0 || generation != handle >> HANDLE_BITS) return WEIGHTS_UNKNOWN;
    return ready == generation ? WEIGHTS_READY : WEIGHTS_LOADING;
}

// Whether a link's client may name a handle: its word has the generation of the one that the client, or who lends to it,
// holds at that index. The host alone writes these words, and clears a link's before it connects another to it. What is
// read late is refused or served a moment later; it never is another's, whose generation is not this one.
DEVICE bool is_held(const Serve& s, int link, unsigned handle) {
    if (s.held == nullptr) return true;
    const unsigned* its = s.held + static_cast<int64>(link) * s.num_handles + (handle & ((1u << HANDLE_BITS) - 1));
    return static_cast<unsigned>(load_l2(reinterpret_cast<const int*>(its))) == handle >> HANDLE_BITS;
}

// Segments of (handle, expert) become those of (block, tile), in place, for a turn. The whole warp calls it.
DEVICE int translate(const Serve& s, const lora_request& h, unsigned char* tables, uint64 turn, int lane) {
    bool unknown = false, misplaced = false;
    for (unsigned i = lane; i < h.num_segments; i += LANES) {
        const uint4 one = segment_of(tables, i);
        if (weights_of(s, one.x, h.layer, h.projection) != WEIGHTS_READY) {
            unknown = true;
            continue;
        }
        const uint4* entry = reinterpret_cast<const uint4*>(entry_of(s, one.x, h.layer, h.projection));
        const uint4 low = load_l2(entry), high = load_l2(entry + 1);  // .w: row; first tile, tiles each, experts' range
        if (one.y < high.z || one.y >= high.w) {
            misplaced = true;
            continue;
        }
        const unsigned expert = one.y - high.z;
        uint2 place = {low.w, high.x + expert * high.y};
        if (static_cast<int>(high.y) == UNEVEN) {
            const int* its = s.places + 2 * (high.x + expert);
            place = {static_cast<unsigned>(load_l2(its)), static_cast<unsigned>(load_l2(its + 1))};
        }
        store(reinterpret_cast<uint4*>(tables + LORA_HEADER_BYTES) + i, uint4{place.x, place.y, one.z, one.w});
        if (s.used) store(s.used + (one.x & ((1u << HANDLE_BITS) - 1)), turn);
    }
    if (votes(unknown)) return UNKNOWN_ADAPTER;
    if (votes(misplaced)) return MISPLACED;
    sync_warp();
    return NOTHING_WRONG;
}
