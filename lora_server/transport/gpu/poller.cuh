// The warp that serves while others compute: it finds the next step, checks it, and orders it, one turn ahead of them.
// Its rule and its checks are those of shard/schedule.py and shard/request.py; a lane knows one client.
#pragma once
#include "answer.cuh"

constexpr uint64 STEP_ROWS = 8, MOST_ROWS = 65536;  // of a share: shard/schedule.py
constexpr int MAILBOX_SCANS = 32;       // a look at host memory costs a microsecond
constexpr uint64 MAX_BUDGET_US = 3'600'000'000;
constexpr uint64 HELD_NS = 5'000'000'000;  // within which a shard hears what its clients hold
enum StepState { NO_STEP, STEP_BLOCKED, STEP_READY };

struct PollerMemory {
    lora_request request;
    Order order;
    lora_response response;
};

struct Poller {
    Serve& s;
    PollerMemory& m;
    const int lane;
    // the lane's client, and its oldest step
    uint64 epoch, served, received = 0, expires = 0, busy = 0, wild = 0;  // busy: the turn of its last order
    uint64 had, start = 0, finish = 0;                                    // of its share: before this step, and of it
    int ticket = 0, state = NO_STEP, asked = 0;
    // the same in all lanes
    uint64 turn, done, taken, noted, active, share;  // share: the least start of those that are ready
    int tickets;
    bool draining;

    DEVICE Poller(Serve& serve, PollerMemory& memory, int its_lane) : s(serve), m(memory), lane(its_lane) {
        epoch = load_l2(&s.links[lane].epoch), served = load_l2(&s.links[lane].served), had = load_l2(&s.links[lane].had);
        turn = load_l2(&s.turn), done = load_l2(&s.done), taken = load_l2(&s.taken), noted = load_l2(&s.noted);
        tickets = static_cast<int>(load_l2(&s.tickets)), share = load_l2(&s.share);
        draining = load_l2(&s.draining);
        active = together(now_ns());
    }

    DEVICE void run(uint64 launch) {
        bool goes_on = true;
        tell_all(STARTED, 0, 0, launch);
        for (unsigned scan = 0; goes_on; scan++) {
            done = together(load_acquire(&s.done));
            if (scan % MAILBOX_SCANS == 0) goes_on = look_at_mailbox(launch);
            const int before = tickets;
            wild = 0;
            for (unsigned fresh = votes(is_fresh()); fresh; fresh &= fresh - 1) take(first_bit(fresh));
            for (unsigned beyond = votes(wild); beyond; beyond &= beyond - 1) cut_off(first_bit(beyond));
            for (unsigned blocked = votes(state == STEP_BLOCKED); blocked; blocked &= blocked - 1) recheck(first_bit(blocked));
            const int next = turn < done + 2 ? pick() : -1;
            if (next >= 0) order(next);
            if (next >= 0 || tickets != before || turn != done || votes(state != NO_STEP)) active = together(now_ns());
            if (together(load_acquire(s.arrivals + 1)) || together(now_ns()) - active > s.idle_ns) goes_on = false;
            pause(20);
        }
        leave(launch);
    }

    // The lane's client has a step that was not taken, and its last one was answered, so that its tables are free.
    DEVICE bool is_fresh() {
        if (epoch == 0 || state != NO_STEP || done < busy) return false;
        const uint64 word = load_acquire_system(reinterpret_cast<const uint64*>(load(&s.links[lane].request_signal)));
        if (LORA_SIGNAL_EPOCH(word) != (epoch & 0xffff) || LORA_SIGNAL_SEQ(word) <= served) return false;
        if (LORA_SIGNAL_SEQ(word) > served + load(&s.links[lane].depth)) {  // beyond its slots
            wild = LORA_SIGNAL_SEQ(word);
            return false;
        }
        confirm(reinterpret_cast<const uint64*>(load(&s.links[lane].request_signal)), word);
        return true;
    }
    DEVICE void cut_off(int l) {
        note(CUT_OFF, l, shuffle_long(wild, l), 0);
        if (lane == l) epoch = 0, store(&s.links[l].epoch, epoch);
        sync_warp();
    }

    DEVICE const unsigned char* request_slot(int l, uint64 seq) const {
        const Link& k = s.links[l];
        return reinterpret_cast<const unsigned char*>(load(&k.request_slots)) + seq % load(&k.depth) * load(&k.request_bytes);
    }
    DEVICE unsigned char* tables_of(int l) const { return reinterpret_cast<unsigned char*>(load(&s.links[l].tables)); }
    DEVICE uint64 next_seq(int l) const { return load(&s.links[l].served) + 1; }

    DEVICE void copy(unsigned char* to, const unsigned char* from, uint64 begin, uint64 end) {
        for (uint64 at = begin + 16 * lane; at < end; at += 16 * LANES)
            store(reinterpret_cast<uint4*>(to + at), load_l2(reinterpret_cast<const uint4*>(from + at)));
        sync_warp();
    }
    DEVICE void read_header(int l) {
        sync_warp();
        if (lane < static_cast<int>(sizeof(lora_request) / 16))
            reinterpret_cast<uint4*>(&m.request)[lane] = load_l2(reinterpret_cast<const uint4*>(tables_of(l)) + lane);
        sync_warp();
    }

    DEVICE void take(int l) {
        const Link& k = s.links[l];
        const uint64 seq = next_seq(l);
        const unsigned char* slot = request_slot(l, seq);
        unsigned char* tables = tables_of(l);
        copy(tables, slot, 0, LORA_HEADER_BYTES);
        read_header(l);
        int why = check_header(m.request, load(&k.client), load(&k.epoch), seq, s.max_entries);
        tell_all(TAKEN, l, seq, why);
        if (!why && draining) why = DRAINING;
        if (why) {
            refuse(l, seq, why);
            return;
        }
        const RequestParts at(m.request, 2);
        const bool sane = m.request.num_segments <= static_cast<unsigned>(s.max_entries) &&
                          m.request.num_entries <= static_cast<unsigned>(s.max_entries);
        if (sane) copy(tables, slot, LORA_HEADER_BYTES, at.rows);
        if (lane == l) {
            const uint64 budget = m.request.budget_us < MAX_BUDGET_US ? m.request.budget_us : MAX_BUDGET_US;
            received = now_ns(), expires = received + budget * 1000;
            ticket = tickets, asked = 0, state = STEP_BLOCKED;
        }
        tickets++;
        if (lane == 0) store(&s.tickets, static_cast<uint64>(static_cast<unsigned>(tickets)));
        if (!sane) make_ready(l, seq);  // the checks say what is wrong with it
    }
    DEVICE void make_ready(int l, uint64 seq) {
        const uint64 wide = m.request.num_rows > m.request.num_entries ? m.request.num_rows : m.request.num_entries;
        const uint64 rows = wide > m.request.num_out_rows ? wide : m.request.num_out_rows;
        if (lane == l) {
            state = STEP_READY, start = had > share ? had : share;
            finish = start + STEP_ROWS + (rows < MOST_ROWS ? rows : MOST_ROWS);
        }
        tell_all(READY_STEP, l, seq, 0);
    }

    // Whether its client holds what it names, and the weights are here; or its time is over.
    DEVICE void recheck(int l) {
        read_header(l);
        const lora_request& h = m.request;
        const unsigned char* tables = tables_of(l);
        const bool is_site = h.layer < static_cast<unsigned>(s.num_layers) && h.projection < static_cast<unsigned>(s.num_projections);
        unsigned missing = 0;
        bool mine = false, foreign = false;
        for (unsigned i = lane; is_site && i < h.num_segments; i += LANES) {
            const unsigned handle = segment_of(tables, i).x;
            const int weights = weights_of(s, handle, h.layer, h.projection);
            if (weights != WEIGHTS_UNKNOWN && !is_held(s, l, handle)) foreign = true;
            if (!mine && weights == WEIGHTS_LOADING) mine = true, missing = handle;
        }
        if (votes(foreign)) {
            const uint64 heard = received + HELD_NS;
            const bool late = shuffle(together(now_ns()) >= (heard < expires ? heard : expires), l);
            if (late || draining) refuse(l, next_seq(l), late ? NOT_HELD : DRAINING);
            return;
        }
        const unsigned lacking = votes(mine);
        const int handle = lacking ? shuffle(static_cast<int>(missing), first_bit(lacking)) : 0;
        if (!lacking) {
            make_ready(l, h.seq);
            return;
        }
        const bool late = shuffle(together(now_ns()) >= expires, l);
        if (late || draining) {
            refuse(l, next_seq(l), late ? TOO_LATE : DRAINING);
        } else if (!shuffle(asked, l)) {
            const bool told = note(PREFETCH, l, h.seq, handle);
            if (lane == l) asked = told;
        }
    }

    // The least finish, the oldest of equals.
    DEVICE int pick() {
        unsigned ready = votes(state == STEP_READY);
        if (!ready) return -1;
        int best = first_bit(ready), its = shuffle(ticket, best);
        uint64 ends = shuffle_long(finish, best), least = shuffle_long(start, best);
        for (ready &= ready - 1; ready; ready &= ready - 1) {
            const int other = first_bit(ready), age = shuffle(ticket, other);
            const uint64 end = shuffle_long(finish, other), begin = shuffle_long(start, other);
            const bool older = static_cast<int>(static_cast<unsigned>(age) - static_cast<unsigned>(its)) < 0;
            if (begin < least) least = begin;
            if (end < ends || (end == ends && older)) best = other, its = age, ends = end;
        }
        share = least;
        return best;
    }

    DEVICE void order(int l) {
        const uint64 seq = next_seq(l);
        unsigned char* tables = tables_of(l);
        read_header(l);
        if (lane == 0) store(&s.share, share);
        if (lane == l) had = finish, store(&s.links[l].had, had);
        int why = check_counts(s, m.request, load(&s.links[l].request_bytes));
        if (!why) why = check_tables(s, m.request, tables, lane);
        if (!why) why = translate(s, m.request, tables, turn + 1, lane);
        if (!why && m.request.dtype != static_cast<unsigned>(s.dtype)) why = BAD_DTYPE;
        tell_all(ORDERED, l, seq, why);
        if (why) {
            refuse(l, seq, why);
            return;
        }
        if (lane == 0) write_order(l, seq);
        const uint64 began = shuffle_long(received, l);
        if (lane == 0) reinterpret_cast<lora_response*>(m.order.header)->received_ns = began;
        sync_warp();
        turn++;
        Order* to = s.orders + turn % ORDERS;
        for (int i = lane; i < static_cast<int>(sizeof(Order) / 16); i += LANES)
            store(reinterpret_cast<uint4*>(to) + i, reinterpret_cast<const uint4*>(&m.order)[i]);
        if (lane == l) served = seq, busy = turn, state = NO_STEP, store(&s.links[l].served, seq);
        sync_warp();
        if (lane == 0) store_release(&s.turn, turn);
        sync_warp();
    }

    DEVICE void write_order(int l, uint64 seq) {
        const Link& k = s.links[l];
        const lora_request& h = m.request;
        const RequestParts at(h, 2);
        const uint64 tables = load(&k.tables);
        Order& o = m.order;
        o.rows = reinterpret_cast<uint64>(request_slot(l, seq)) + at.rows;
        o.in_map = h.flags & LORA_HAS_IN_MAP ? tables + at.in_map : 0;
        o.out_map = h.flags & LORA_HAS_OUT_MAP ? tables + at.out_map : 0;
        o.weights = h.flags & LORA_HAS_OUT_MAP ? tables + at.weights : 0;
        o.segments = tables + at.segments;
        o.slot = response_slot(k, seq), o.pe = load(&k.pe);
        o.out = reinterpret_cast<uint64>(writable(o.slot, static_cast<int>(o.pe))) + LORA_HEADER_BYTES;
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
        fill_response(r, LORA_OK, k, seq, 2ull * h.num_out_rows * width);
        o.nbytes = LORA_HEADER_BYTES + r.payload_bytes;
        r.slot = h.slot, r.dtype = h.dtype, r.num_rows = h.num_out_rows, r.width = width, r.started_ns = now_ns();
    }

    DEVICE void refuse(int l, uint64 seq, int why) {
        answer_refusal(s.links[l], seq, why, m.response, lane);
        if (lane == l) served = seq, state = NO_STEP, store(&s.links[l].served, seq);
        sync_warp();
        note(REFUSED, l, seq, why);
    }

    // What lanes read apart may differ: all take what the first one found.
    DEVICE uint64 together(uint64 value) { return shuffle_long(value, 0); }
    DEVICE uint64 shuffle_long(uint64 value, int from) {
        const unsigned low = shuffle(static_cast<int>(value), from), high = shuffle(static_cast<int>(value >> 32), from);
        return static_cast<uint64>(high) << 32 | low;
    }

#include "mailbox.cuh"
};
