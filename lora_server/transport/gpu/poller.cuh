// The warp that serves while others compute: it finds the next step, checks it, and orders it, one turn ahead of them.
// Its rule and its checks are those of shard/schedule.py and shard/request.py; a lane knows clients
// lane, lane + 32, and so on, up to the last that is here.
#pragma once
#include "answer.cuh"
#include "copy.cuh"

constexpr uint64 STEP_ROWS = 8, MOST_ROWS = 65536;  // of a share: shard/schedule.py
constexpr int MAILBOX_SCANS = 32;       // a look at host memory costs a microsecond
constexpr uint64 MAX_BUDGET_US = 3'600'000'000;
constexpr uint64 HELD_NS = 5'000'000'000;  // within which a shard hears what its clients hold

struct PollerMemory {
    lora_request request;
    Order order;
    lora_response response;
};

struct Poller {
    Serve& s;
    PollerMemory& m;
    const int lane;
    Link* const links;
    // of the lane's clients, bit l / LANES is that of client l: who is here, whose oldest step waits, or may be ordered
    unsigned here = 0, blocked = 0, ready = 0;
    uint64 wild = 0;
    // the same in all lanes
    uint64 turn, done, taken, noted, active, share;  // share: the least start of those that are ready
    int rounds = 0;  // of LANES clients, up to the last that is here
    int whose = -1;  // header is in m.request
    int tickets;
    bool draining;

    DEVICE Poller(Serve& serve, PollerMemory& memory, int its_lane) : s(serve), m(memory), lane(its_lane), links(serve.links) {
        for (int l = lane; l < s.num_links; l += LANES)
            if (load_l2(&s.links[l].epoch)) here |= bit_of(l);
        rounds = s.num_links / LANES;
        forget_rounds();
        turn = load_l2(&s.turn), done = load_l2(&s.done), taken = load_l2(&s.taken), noted = load_l2(&s.noted);
        tickets = static_cast<int>(load_l2(&s.tickets)), share = load_l2(&s.share);
        draining = load_l2(&s.draining);
        active = together(now_ns());
        claim_rows();
    }

    DEVICE void run(uint64 launch) {
        bool goes_on = true;
        tell_all(STARTED, 0, 0, launch);
        for (unsigned scan = 0; goes_on; scan++) {
            if (together(load_system(&s.done)) != done) done = together(load_acquire(&s.done));
            if (scan % MAILBOX_SCANS == 0) goes_on = look_at_mailbox(launch);
            const int before = tickets;
#pragma unroll 1
            for (int first = 0; first < rounds * LANES; first += LANES) {
                for (unsigned fresh = votes(is_fresh(first + lane)); fresh; fresh &= fresh - 1) take(first + first_bit(fresh));
                for (unsigned beyond = votes(wild); beyond; beyond &= beyond - 1) cut_off(first + first_bit(beyond));
                for (unsigned wait = votes(blocked & bit_of(first)); wait; wait &= wait - 1) recheck(first + first_bit(wait));
            }
            const int next = turn < done + 2 ? pick() : -1;
            if (next >= 0) order(next);
            if (next >= 0 || tickets != before || turn != done || votes(blocked | ready)) active = together(now_ns());
            if (together(load_system(s.arrivals + 1)) || together(now_ns()) - active > s.idle_ns) goes_on = false;
            pause(20);
        }
        leave(launch);
    }

    static_assert(MAX_LINKS <= 32 * LANES, "a bit each");
    DEVICE static unsigned bit_of(int l) { return 1u << l / LANES; }
    DEVICE bool is_mine(int l) const { return l % LANES == lane; }
    DEVICE void forget_rounds() {
        while (rounds && !votes(here & bit_of((rounds - 1) * LANES))) rounds--;
    }

    // A client of the lane has a step that was not taken, and its last one was answered, so that its tables are free.
    DEVICE bool is_fresh(int l) {
        wild = 0;
        if (!(here & ~(blocked | ready) & bit_of(l))) return false;
        const Link& k = links[l];
        const auto* const signal = reinterpret_cast<const uint64*>(load(&k.request_signal));
        const uint64 epoch = load(&k.epoch), served = load(&k.served), depth = load(&k.depth);
        if (done < load(&k.busy)) return false;
        // an acquire empties the L1 that the block's workers read through: not before there is something
        if (LORA_SIGNAL_SEQ(load_system(signal)) <= served) return false;
        const uint64 word = load_acquire_system(signal);
        if (LORA_SIGNAL_EPOCH(word) != (epoch & 0xffff) || LORA_SIGNAL_SEQ(word) <= served) return false;
        if (LORA_SIGNAL_SEQ(word) > served + depth) {  // beyond its slots
            wild = LORA_SIGNAL_SEQ(word);
            return false;
        }
        confirm(signal, word);
        return true;
    }
    DEVICE void cut_off(int l) {
        note(CUT_OFF, l, shuffle_long(wild, l % LANES), 0);
        forget(l);
    }
    // It is not here any more, nor what it has pushed.
    DEVICE void forget(int l) {
        if (is_mine(l)) here &= ~bit_of(l), blocked &= ~bit_of(l), ready &= ~bit_of(l), store(&s.links[l].epoch, 0ull);
        sync_warp();
        forget_rounds();
    }

    DEVICE const unsigned char* request_slot(int l, uint64 seq) const {
        const Link& k = links[l];
        return reinterpret_cast<const unsigned char*>(load(&k.request_slots)) + seq % load(&k.depth) * load(&k.request_bytes);
    }
    DEVICE unsigned char* tables_of(int l) const { return reinterpret_cast<unsigned char*>(load(&links[l].tables)); }
    DEVICE uint64 next_seq(int l) const { return load(&links[l].served) + 1; }

    DEVICE void copy(unsigned char* to, const unsigned char* from, uint64 begin, uint64 end) {
        copy_units<uint4>(to + begin, from + begin, static_cast<int>(end - begin) / 16, lane, LANES);
        sync_warp();
    }
    DEVICE void read_header(int l) {
        if (whose == l) return;
        sync_warp();
        if (lane < static_cast<int>(sizeof(lora_request) / 16))
            reinterpret_cast<uint4*>(&m.request)[lane] = load_l2(reinterpret_cast<const uint4*>(tables_of(l)) + lane);
        whose = l;
        sync_warp();
    }
    DEVICE void take_header(int l, unsigned char* tables, const unsigned char* slot) {
        static_assert(LORA_HEADER_BYTES / 16 <= LANES, "a lane each");
        if (lane < LORA_HEADER_BYTES / 16) {
            const uint4 part = load_l2(reinterpret_cast<const uint4*>(slot) + lane);
            store(reinterpret_cast<uint4*>(tables) + lane, part);
            if (lane < static_cast<int>(sizeof(lora_request) / 16)) reinterpret_cast<uint4*>(&m.request)[lane] = part;
        }
        whose = l;
        sync_warp();
    }

    DEVICE void take(int l) {
        sync_warp();  // one lane has acquired the signal, all of them copy, and a vote orders no memory
        const Link& k = links[l];
        const uint64 seq = next_seq(l);
        const unsigned char* slot = request_slot(l, seq);
        unsigned char* tables = tables_of(l);
        take_header(l, tables, slot);
        int why = check_header(m.request, load(&k.client), load(&k.epoch), seq, s.max_entries);
        tell_all(TAKEN, l, seq, why);
        if (!why && draining) why = DRAINING;
        if (why) {
            refuse(l, seq, why);
            return;
        }
        const RequestParts at(m.request, 2);
        const unsigned most = s.max_entries;  // of what the tables have room for
        const bool scaled = m.request.dtype == LORA_E4M3, fits = !scaled || (m.request.num_rows <= most && is_of_wire(s, m.request));
        const bool sane = m.request.num_segments <= most && m.request.num_entries <= most && fits;
        if (sane) copy(tables, slot, LORA_HEADER_BYTES, at.rows);
        if (is_mine(l)) {
            const uint64 budget = m.request.budget_us < MAX_BUDGET_US ? m.request.budget_us : MAX_BUDGET_US, now = now_ns();
            Link& mine = s.links[l];
            store(&mine.received, now), store(&mine.expires, now + budget * 1000);
            store(&mine.ticket, tickets), store(&mine.asked, static_cast<int>(NOTHING_ASKED));
            blocked |= bit_of(l);
        }
        tickets++;
        sync_warp();
        if (lane == 0) store(&s.tickets, static_cast<uint64>(static_cast<unsigned>(tickets)));
        if (!sane) make_ready(l, seq);  // the checks say what is wrong with it
    }
    DEVICE void make_ready(int l, uint64 seq) {
        const uint64 wide = m.request.num_rows > m.request.num_entries ? m.request.num_rows : m.request.num_entries;
        const uint64 rows = wide > m.request.num_out_rows ? wide : m.request.num_out_rows;
        if (is_mine(l)) {
            Link& mine = s.links[l];
            const uint64 had = load(&mine.had), start = had > share ? had : share;
            const uint64 cost = s.role == FOLLOWS ? 0 : STEP_ROWS + (rows < MOST_ROWS ? rows : MOST_ROWS);  // its age decides there
            store(&mine.start, start), store(&mine.finish, start + cost);
            blocked &= ~bit_of(l), ready |= bit_of(l);
        }
        sync_warp();
        tell_all(READY_STEP, l, seq, 0);
    }

    // Whether its client holds what it names, the weights are here, and its leader has numbered it; or its time is over.
    DEVICE void recheck(int l) {
        const Link& k = s.links[l];
        const uint64 expires = load(&k.expires);
        const bool numbered = s.role != FOLLOWS || is_numbered(l);
        if (!numbered && load(&k.asked) == ALL_HERE && !draining && together(now_ns()) < expires) return;
        read_header(l);
        const lora_request& h = m.request;
        const unsigned char* tables = tables_of(l);
        const bool is_site = h.layer < static_cast<unsigned>(s.num_layers) && h.projection < static_cast<unsigned>(s.num_projections);
        const Lacks lacks = is_site ? look_up(s, l, h, tables, lane) : Lacks();
        if (votes(lacks.foreign)) {
            const uint64 heard = load(&k.received) + HELD_NS;
            const bool late = together(now_ns()) >= (heard < expires ? heard : expires);
            if (late || draining) refuse(l, next_seq(l), late ? NOT_HELD : DRAINING);
            return;
        }
        const unsigned lacking = votes(lacks.weights);
        const int handle = lacking ? shuffle(static_cast<int>(lacks.handle), first_bit(lacking)) : 0;
        if (!lacking && numbered) {
            make_ready(l, h.seq);
            return;
        }
        const bool late = together(now_ns()) >= expires;
        if (late || draining) {
            refuse(l, next_seq(l), !late ? DRAINING : lacking ? TOO_LATE : NOT_NUMBERED);
        } else if (!lacking || (load(&k.asked) != ASKED && note(PREFETCH, l, h.seq, handle))) {
            if (is_mine(l)) store(&s.links[l].asked, static_cast<int>(lacking ? ASKED : ALL_HERE));
            sync_warp();
        }
    }

    // The least finish, the oldest of equals: of each lane's, and of those of all lanes.
    DEVICE int pick() {
        int best = -1, its = 0;
        uint64 ends = 0, least = ~0ull;
        for (unsigned left = ready; left; left &= left - 1) {
            const Link& k = s.links[lane + LANES * first_bit(left)];
            const uint64 end = load(&k.finish), begin = load(&k.start);
            const int age = load(&k.ticket);
            least = begin < least ? begin : least;
            if (best < 0 || goes_first(end, age, ends, its)) best = lane + LANES * first_bit(left), its = age, ends = end;
        }
        unsigned lanes = votes(best >= 0);
        if (!lanes) return -1;
        const int mine = best, its_age = its, first = first_bit(lanes);
        const uint64 its_end = ends, its_least = least;
        best = shuffle(mine, first), its = shuffle(its_age, first);
        ends = shuffle_long(its_end, first), least = shuffle_long(its_least, first);
        for (lanes &= lanes - 1; lanes; lanes &= lanes - 1) {
            const int from = first_bit(lanes), other = shuffle(mine, from), age = shuffle(its_age, from);
            const uint64 end = shuffle_long(its_end, from), begin = shuffle_long(its_least, from);
            if (begin < least) least = begin;
            if (goes_first(end, age, ends, its)) best = other, its = age, ends = end;
        }
        share = least;
        return best;
    }
    DEVICE static bool goes_first(uint64 end, int age, uint64 than, int its) {
        const bool older = static_cast<int>(static_cast<unsigned>(age) - static_cast<unsigned>(its)) < 0;
        return end < than || (end == than && older);
    }

    DEVICE void order(int l) {
        const uint64 seq = next_seq(l);
        unsigned char* tables = tables_of(l);
        read_header(l);
        if (lane == 0) store(&s.share, share);
        if (is_mine(l)) store(&s.links[l].had, load(&s.links[l].finish));
        int why = check_counts(s, m.request, load(&s.links[l].request_bytes));
        if (!why) why = check_tables(s, m.request, tables, lane);
        if (!why && lane == 0) write_order(l, seq);  // before a fence empties the L1 of what it reads
        if (!why) why = translate(s, m.request, tables, turn + 1, lane);
        if (!why && m.request.dtype != static_cast<unsigned>(s.dtype)) why = BAD_DTYPE;
        tell_all(ORDERED, l, seq, why);
        if (why) {
            refuse(l, seq, why);
            return;
        }
        sync_warp();
        turn++;
        Order* to = s.orders + turn % ORDERS;
        for (int i = lane; i < static_cast<int>(sizeof(Order) / 16); i += LANES)
            store(reinterpret_cast<uint4*>(to) + i, reinterpret_cast<const uint4*>(&m.order)[i]);
        if (is_mine(l)) store(&s.links[l].busy, turn);
        settle(l, seq);
        if (lane == 0) store_release(&s.turn, turn);
        sync_warp();
    }

    DEVICE void write_order(int l, uint64 seq) {
        const Link& k = s.links[l];
        const lora_request& h = m.request;
        const RequestParts at(h, element_bytes(h));
        const uint64 tables = load(&k.tables);
        Order& o = m.order;
        o.rows = reinterpret_cast<uint64>(request_slot(l, seq)) + at.rows;
        o.in_map = h.flags & LORA_HAS_IN_MAP ? tables + at.in_map : 0;
        o.out_map = h.flags & LORA_HAS_OUT_MAP ? tables + at.out_map : 0;
        o.weights = h.flags & LORA_HAS_OUT_MAP ? tables + at.weights : 0;
        o.segments = tables + at.segments;
        o.slot = response_slot(k, seq), o.pe = load(&k.pe);
        o.scales = h.dtype == LORA_E4M3 ? tables + at.scales : 0;
        o.answer_scales = reinterpret_cast<uint64>(writable(o.slot, static_cast<int>(o.pe))) + LORA_HEADER_BYTES;
        const uint64 scales_bytes = o.scales ? rounded(4ull * h.num_out_rows, LORA_ALIGN) : 0;
        o.out = o.answer_scales + scales_bytes;
        o.signal = load(&k.response_signal), o.signal_value = LORA_SIGNAL(load(&k.epoch), seq);
        o.num_segments = h.num_segments, o.num_entries = h.num_entries, o.num_out_rows = h.num_out_rows;
        const Site site = load(s.sites + h.layer * s.num_projections + h.projection);
        o.row_width = h.in_end - h.in_begin, o.in_begin = h.in_begin, o.in_width = site.in_width;
        o.num_windows = h.num_windows;
        int bounds[6] = {}, width = 0;
#pragma unroll
        for (int w = 0; w < 3; w++)
            if (w < static_cast<int>(h.num_windows)) {
                bounds[2 * w] = h.out_windows[2 * w], bounds[2 * w + 1] = h.out_windows[2 * w + 1];
                width += bounds[2 * w + 1] - bounds[2 * w];
            }
        o.begin0 = bounds[0], o.end0 = bounds[1], o.begin1 = bounds[2], o.end1 = bounds[3], o.begin2 = bounds[4], o.end2 = bounds[5];
        o.out_width = width;
        lora_response& r = *reinterpret_cast<lora_response*>(o.header);
        fill_response(r, LORA_OK, k, seq, scales_bytes + static_cast<uint64>(h.num_out_rows) * width * element_bytes(h));
        o.nbytes = LORA_HEADER_BYTES + r.payload_bytes;
        r.slot = h.slot, r.dtype = h.dtype, r.num_rows = h.num_out_rows, r.width = width;
        r.received_ns = load(&k.received), r.started_ns = now_ns();
    }

    DEVICE void refuse(int l, uint64 seq, int why) {
        answer_refusal(s.links[l], seq, why, m.response, lane);
        settle(l, seq);
        note(REFUSED, l, seq, why);
    }
    // It is ordered, or refused; the client's next one may come.
    DEVICE void settle(int l, uint64 seq) {
        number_step(l, seq);
        if (is_mine(l)) blocked &= ~bit_of(l), ready &= ~bit_of(l), store(&s.links[l].served, seq);
        sync_warp();
    }

    // What lanes read apart may differ: all take what the first one found.
    DEVICE uint64 together(uint64 value) { return shuffle_long(value, 0); }
    DEVICE uint64 shuffle_long(uint64 value, int from) {
        const unsigned low = shuffle(static_cast<int>(value), from), high = shuffle(static_cast<int>(value >> 32), from);
        return static_cast<uint64>(high) << 32 | low;
    }

#include "leader.cuh"
#include "mailbox.cuh"
};
