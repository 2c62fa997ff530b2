// What a client wrote is copied once, then checked, then used: the rules of shard/request.py, in their order. A warp
// does it together. Every check that fails has a name here, and a sentence for the client.
#pragma once
#include "peer.cuh"
#include "protocol.cuh"

// code\nmessage, as in write_failure of shard/request.py; at most 127 characters. A handle is written over ten #.
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
        case NOT_LOADED: return "adapter_not_loaded\nhandles ##########: the weights are still loading; wait until the adapter is loaded";
        case DRAINING: return "shard_unavailable\nthe shard is draining; the next request joins another, or waits";
        case NOT_HELD: return "permission_denied\nthe step names an adapter that its client does not hold; acquire it first";
        case BAD_WIRE: return "protocol\ngot rows of another wire than this server's (--wire): both ends must be of a version that knows it; join again";
        case BAD_SCALE: return "protocol\ngot the scale of a row that is negative, or not finite";
        case NOT_NUMBERED: return "step_timeout\nthe leader of the shard's stage did not order the step before the client's deadline; is it up?";
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

DEVICE bool has_site(const Serve& s, const lora_request& h) {
    return h.layer < static_cast<unsigned>(s.num_layers) && h.projection < static_cast<unsigned>(s.num_projections);
}
// The step's site, which the model has.
DEVICE Site site_of(const Serve& s, const lora_request& h) { return load(s.sites + h.layer * s.num_projections + h.projection); }

// site: the step's, if the model has it.
DEVICE int check_counts(const Serve& s, const lora_request& h, const Site& site, uint64 slot_bytes) {
    if (!has_site(s, h) || h.dtype > LORA_E4M3) return BAD_SITE;
    if (!is_of_wire(s, h)) return BAD_WIRE;
    const unsigned most = s.max_entries;
    if (h.num_entries > most || h.num_rows > most || h.num_out_rows > most) return BAD_COUNTS;
    if (h.num_segments > h.num_entries || (h.num_entries && !h.num_segments)) return BAD_COUNTS;
    if (h.flags & LORA_HAS_OUT_MAP && h.num_entries > MOST_COMBINED) return BAD_COUNTS;
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

// A step's header, segments and maps, as they were copied: all of them in global memory, and the first of them here, in
// shared memory, where a look costs no trip.
constexpr int NEAR_BYTES = 4096;
struct Tables {
    const uint4* near;
    unsigned char* far;
    template <class V> DEVICE V at(uint64 offset) const {
        if (offset + sizeof(V) > NEAR_BYTES) return load_l2(reinterpret_cast<const V*>(far + offset));
        return *reinterpret_cast<const V*>(reinterpret_cast<const unsigned char*>(near) + offset);
    }
    template <class V> DEVICE V segment(unsigned i, unsigned from = 0) const { return at<V>(LORA_HEADER_BYTES + 16ull * i + from); }
};

// Of a lane's segments, those whose loads are under way together: an answer is hundreds of cycles away, and what is looked
// at one by one costs that one by one. Loops over segments are the whole warp's: segment first + i * LANES is this lane's.
// As many as leave clients' kernels room beside it (kernels_cuda/residency.py); NVSHMEM's functions take some.
#if NVSHMEM
constexpr unsigned LOOKUPS = 4;
#else
constexpr unsigned LOOKUPS = 6;
#endif
constexpr unsigned LOOKED_UP = LOOKUPS * LANES;

// In the place of a segment behind the last, the last.
DEVICE unsigned place_of(unsigned first, unsigned i, unsigned num) {
    return first + i * LANES < num ? first + i * LANES : num - 1;
}
// V: uint4, or uint2 for handle and expert, or unsigned for the handle alone.
template <class V> DEVICE void load_segments(V (&some)[LOOKUPS], const Tables& tables, unsigned first, unsigned num) {
#pragma unroll
    for (unsigned i = 0; i < LOOKUPS; i++) some[i] = tables.segment<V>(place_of(first, i, num));
}

// handle, expert, first, entries of each follow each other; the whole warp calls it.
DEVICE int check_segments(const lora_request& h, unsigned experts, const Tables& tables, int lane) {
    const unsigned num = h.num_segments;
    bool wrong = num == 0 && h.num_entries != 0;
#pragma unroll 1
    for (unsigned first = lane; first - lane < num; first += LOOKED_UP) {
        uint4 some[LOOKUPS];
        uint2 before[LOOKUPS];  // first, entries
        load_segments(some, tables, first, num);
#pragma unroll
        for (unsigned i = 0; i < LOOKUPS; i++) {
            const unsigned at = place_of(first, i, num);
            before[i] = tables.segment<uint2>(at ? at - 1 : 0, 8);
        }
        all_begun();
#pragma unroll
        for (unsigned i = 0; i < LOOKUPS; i++) {
            const uint4 one = some[i];
            const unsigned at = place_of(first, i, num), begin = at ? before[i].x + before[i].y : 0;
            wrong |= one.z != begin || one.w < 1 || one.w > h.num_entries || one.x >> 31 || one.y >= experts ||
                     (at + 1 == num && one.z + one.w != h.num_entries);
        }
    }
    return votes(wrong) ? BAD_SEGMENTS : NOTHING_WRONG;
}

// Whether a value of a table is not as it must be; sixteen bytes at a time, behind which there is room up to the next.
template <class IsWrong> DEVICE bool any_wrong(const Tables& tables, uint64 table, unsigned count, int lane, IsWrong is_wrong) {
    constexpr unsigned AT_ONCE = 2, VALUES = 4 * LANES;
    bool wrong = false;
#pragma unroll 1
    for (unsigned first = 0; first < count; first += AT_ONCE * VALUES) {
        uint4 some[AT_ONCE];
#pragma unroll
        for (unsigned i = 0; i < AT_ONCE; i++) {
            const unsigned at = first + VALUES * i + 4 * lane;
            some[i] = tables.at<uint4>(table + 4ull * (at < count ? at : first));
        }
        all_begun();
#pragma unroll
        for (unsigned i = 0; i < AT_ONCE; i++) {
            const unsigned at = first + VALUES * i + 4 * lane;
            wrong |= (at < count && is_wrong(some[i].x)) || (at + 1 < count && is_wrong(some[i].y)) ||
                     (at + 2 < count && is_wrong(some[i].z)) || (at + 3 < count && is_wrong(some[i].w));
        }
    }
    return votes(wrong);
}

DEVICE int check_map(const Tables& tables, uint64 map, unsigned entries, unsigned rows, int lane) {
    return any_wrong(tables, map, entries, lane, [=](unsigned row) { return row >= rows; }) ? BAD_MAP : NOTHING_WRONG;
}

// A scale is finite, and from 0 on.
DEVICE int check_scales(const Tables& tables, uint64 scales, unsigned num_rows, int lane) {
    const auto is_wrong = [](unsigned bits) {
        const float scale = __uint_as_float(bits);
        return !(scale >= 0.0f && scale <= LARGEST_FLOAT);  // neither is true of a NaN
    };
    return any_wrong(tables, scales, num_rows, lane, is_wrong) ? BAD_SCALE : NOTHING_WRONG;
}

DEVICE int check_tables(const lora_request& h, const Site& site, const Tables& tables, int lane) {
    const RequestParts at(h, element_bytes(h));
    int why = check_segments(h, site.experts, tables, lane);
    if (!why && h.flags & LORA_HAS_IN_MAP) why = check_map(tables, at.in_map, h.num_entries, h.num_rows, lane);
    if (!why && h.flags & LORA_HAS_OUT_MAP) why = check_map(tables, at.out_map, h.num_entries, h.num_out_rows, lane);
    if (!why && h.dtype == LORA_E4M3) why = check_scales(tables, at.scales, h.num_rows, lane);
    return why;
}

DEVICE unsigned index_of(unsigned handle) { return handle & ((1u << HANDLE_BITS) - 1); }
DEVICE unsigned generation_of(unsigned handle) { return handle >> HANDLE_BITS; }

// The directory at one site. A handle whose index is beyond it has the first one's entry, which does not count.
struct SiteEntries {
    const Entry* first;
    unsigned num_handles, stride;
    DEVICE SiteEntries(const Serve& s, const lora_request& h)
        : first(s.directory + h.layer * s.num_projections + h.projection), num_handles(s.num_handles),
          stride(s.num_layers * s.num_projections) {}
    DEVICE bool has(unsigned handle) const { return index_of(handle) < num_handles; }
    // generation: of the index, or of its weights that are READY, which are never another's than the index's.
    DEVICE bool is_known(unsigned handle, uint64 generation) const {
        return has(handle) && generation != 0 && generation == generation_of(handle);
    }
    // It is no adapter's, or was dropped, or its index is another's now: no command makes it known any more.
    DEVICE bool is_over(unsigned handle, unsigned generation, uint64 ready) const {
        if (static_cast<int>(handle) < 1 << HANDLE_BITS) return true;
        return has(handle) && (generation != 0 || ready >= (GONE | generation_of(handle)));
    }
    DEVICE unsigned index(unsigned handle) const { return has(handle) ? index_of(handle) : 0; }
    DEVICE const Entry* entry(unsigned handle) const { return first + static_cast<int64>(index(handle)) * stride; }
};

// What keeps a step from being ordered.
struct Lacks {
    bool unknown = false;  // it names what is not here: `translate` refuses it
    bool untold = false;   // of that the shard may hear yet: its client was told first, perhaps
    bool foreign = false;  // its client does not hold what it names
    bool weights = false;  // they are not here yet: those of `handle`, the first of this lane's
    unsigned handle = 0;
};

// A link's client may name a handle whose generation is in the link's word: that of the one that the client, or its lender,
// holds at that index. The host alone writes these words, and clears a link's before it connects another to it.
// What is read late is refused or served a moment later; it never is another's, whose generation is not this one.
// Each word is the newest, or an adapter that went would be waited for. Nothing is acquired: that is `translate`'s.
DEVICE Lacks look_up(const Serve& s, int link, const lora_request& h, const Tables& tables, int lane) {
    const SiteEntries entries(s, h);
    const unsigned* const held = s.held ? s.held + static_cast<int64>(link) * s.num_handles : nullptr;
    const unsigned num = h.num_segments;
    Lacks lacks;
#pragma unroll 1
    for (unsigned first = lane; first - lane < num; first += LOOKED_UP) {
        unsigned handles[LOOKUPS], generation[LOOKUPS], its[LOOKUPS];
        uint64 ready[LOOKUPS];
        load_segments(handles, tables, first, num);
        all_begun();
#pragma unroll
        for (unsigned i = 0; i < LOOKUPS; i++) {
            const Entry* const entry = entries.entry(handles[i]);
            ready[i] = load_system(&entry->ready), generation[i] = load_system(&entry->generation);
            its[i] = held ? load_system(held + entries.index(handles[i])) : generation_of(handles[i]);
        }
        all_begun();
#pragma unroll
        for (unsigned i = 0; i < LOOKUPS; i++) {
            const unsigned handle = handles[i];
            const bool known = entries.is_known(handle, generation[i]);
            lacks.unknown |= !known;
            const bool is_held = its[i] == generation_of(handle) && (!held || entries.has(handle));
            lacks.foreign |= known && !is_held;
            lacks.untold |= !known && !is_held && !entries.is_over(handle, generation[i], ready[i]);
            if (!lacks.weights && known && ready[i] != generation[i]) lacks.weights = true, lacks.handle = handle;
        }
    }
    return lacks;
}

// Whether the weights of all of them are here; the whole warp calls it.
DEVICE bool are_ready(const SiteEntries& entries, const uint2 (&some)[LOOKUPS]) {
    uint64 ready[LOOKUPS];
    bool unknown = false;
#pragma unroll
    for (unsigned i = 0; i < LOOKUPS; i++) ready[i] = load_system(&entries.entry(some[i].x)->ready);
    all_begun();
#pragma unroll
    for (unsigned i = 0; i < LOOKUPS; i++) unknown |= !entries.is_known(some[i].x, ready[i]);
    return !votes(unknown);
}

// Segments of (handle, expert) become those of (block, tile), in place, for a turn. The whole warp calls it.
// A reader that finds READY finds behind the fence the pages too, and the entry's fields of this generation.
// all_ready: `look_up` has found so since the mailbox was looked at: what has gone since then stays until its host hears
// which turn is the newest (RETIRE), and that turn is done.
DEVICE int translate(const Serve& s, const lora_request& h, const Tables& tables, uint64 turn, bool all_ready, int lane) {
    const SiteEntries entries(s, h);
    const auto* const list = reinterpret_cast<const uint2*>(s.places);
    uint64* const used = s.used;
    const unsigned num = h.num_segments;
    bool misplaced = false;
#pragma unroll 1
    for (unsigned first = lane; first - lane < num; first += LOOKED_UP) {
        uint2 some[LOOKUPS];  // handle, expert
        unsigned row[LOOKUPS];
        uint4 its[LOOKUPS];  // first tile, tiles each, experts' range
        load_segments(some, tables, first, num);
        all_begun();
        if (!all_ready && !are_ready(entries, some)) return UNKNOWN_ADAPTER;
        if (first == static_cast<unsigned>(lane) || !all_ready) fence_system();
        bool uneven = false;
#pragma unroll
        for (unsigned i = 0; i < LOOKUPS; i++) {
            const Entry* const entry = entries.entry(some[i].x);
            row[i] = load_l2(reinterpret_cast<const unsigned*>(&entry->row));
            its[i] = load_l2(reinterpret_cast<const uint4*>(&entry->first_tile));
        }
        all_begun();
#pragma unroll
        for (unsigned i = 0; i < LOOKUPS; i++) {
            const unsigned expert = some[i].y - its[i].z;
            misplaced |= some[i].y < its[i].z || some[i].y >= its[i].w;
            uneven |= static_cast<int>(its[i].y) == UNEVEN;
            its[i].x += static_cast<int>(its[i].y) == UNEVEN ? expert : expert * its[i].y;
        }
        if (votes(misplaced)) continue;  // others may be unknown
        if (votes(uneven)) {
            uint2 listed[LOOKUPS];
#pragma unroll
            for (unsigned i = 0; i < LOOKUPS; i++) listed[i] = load_l2(list + (static_cast<int>(its[i].y) == UNEVEN ? its[i].x : 0));
            all_begun();
#pragma unroll
            for (unsigned i = 0; i < LOOKUPS; i++)
                if (static_cast<int>(its[i].y) == UNEVEN) row[i] = listed[i].x, its[i].x = listed[i].y;
        }
#pragma unroll
        for (unsigned i = 0; i < LOOKUPS; i++) {
            if (first + i * LANES >= num) break;
            store(reinterpret_cast<uint2*>(tables.far + LORA_HEADER_BYTES) + 2 * (first + i * LANES), uint2{row[i], its[i].x});
            if (used) store(used + index_of(some[i].x), turn);
        }
    }
    if (votes(misplaced)) return MISPLACED;
    sync_warp();
    return NOTHING_WRONG;
}
