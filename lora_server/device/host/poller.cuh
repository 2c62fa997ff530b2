// The warp that serves while others compute: it finds the next step, checks it, and orders it, one turn ahead of them.
// Its rule and its checks are those of shard/schedule.py and shard/request.py; a lane knows clients
// lane, lane + 32, and so on, up to the last that is here.
#pragma once
#include "answer.cuh"
#include "copy.cuh"

constexpr uint64 STEP_ROWS = LORA_STEP_ROWS, MOST_ROWS = LORA_MOST_ROWS;  // of a share: shard/schedule.py
constexpr int MAILBOX_SCANS = 32;       // a look at host memory costs a microsecond
constexpr uint64 MAX_BUDGET_US = LORA_MAX_BUDGET_US;
constexpr uint64 HELD_NS = 5'000'000'000;  // within which a shard hears what its clients hold

// Of the step at hand, whose client is `whose`: where its link, site and first tables are, a look costs no trip to memory.
struct PollerMemory {
    union {
        lora_request request;
        alignas(16) uint4 tables[NEAR_BYTES / 16];
    };
    Link link;
    Site site;
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
    const uint64* signal = nullptr;  // of the lane's client that was looked at last
    // the same in all lanes
    uint64 turn, done, taken, noted, active, share;  // share: the least start of those that are ready
    int rounds = 0;  // of LANES clients, up to the last that is here
    int whose = -1;      // step is in m; -1: no client's
    bool sited = false;  // so is its site
    int is_ready = -1;   // whose step was found to lack nothing, in this scan
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
            is_ready = -1;
#pragma unroll 1
            for (int first = 0; first < rounds * LANES; first += LANES) {
                for (unsigned fresh = votes(is_fresh(first + lane)); fresh; fresh &= fresh - 1) take(first + first_bit(fresh));
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
        if (!(here & ~(blocked | ready) & bit_of(l))) return false;
        const Link& k = links[l];
        signal = reinterpret_cast<const uint64*>(load(&k.request_signal));
        const uint64 epoch = load(&k.epoch), served = load(&k.served);
        if (done < load(&k.busy)) return false;
        const uint64 word = load_system(signal);
        return LORA_SIGNAL_EPOCH(word) == (epoch & 0xffff) && LORA_SIGNAL_SEQ(word) > served;
    }
    // It is not here any more, nor what it has pushed.
    DEVICE void forget(int l) {
        if (is_mine(l)) here &= ~bit_of(l), blocked &= ~bit_of(l), ready &= ~bit_of(l), store(&s.links[l].epoch, 0ull);
        sync_warp();
        forget_rounds();
    }

    DEVICE const unsigned char* request_slot(uint64 seq) const {
        const Link& k = m.link;
        return reinterpret_cast<const unsigned char*>(k.request_slots) + seq % k.depth * k.request_bytes;
    }
    DEVICE Tables tables() const { return {m.tables, reinterpret_cast<unsigned char*>(m.link.tables)}; }
    DEVICE uint64 next_seq(int l) const { return load(&links[l].served) + 1; }

    // A lane has a word of it.
    DEVICE uint64 link_word(int l) const {
        static_assert(sizeof(Link) == 8 * LANES, "a word each");
        return load_l2(reinterpret_cast<const uint64*>(links + l) + lane);
    }
    DEVICE void keep_link(uint64 word) {
        sync_warp();
        reinterpret_cast<uint64*>(&m.link)[lane] = word;
        whose = -1;
        sync_warp();
    }
    // The near ones to m, and `also` to memory.
    DEVICE void keep_tables(int l, const unsigned char* from, uint4* also) {
        const uint64 bytes = m.link.request_bytes < NEAR_BYTES ? m.link.request_bytes : NEAR_BYTES;
        const int room = s.table_bytes / 16, has = static_cast<int>(bytes) / 16, units = has < room ? has : room;
        constexpr int EACH = NEAR_BYTES / 16 / LANES;
        uint4 some[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++)
            some[i] = load_l2(reinterpret_cast<const uint4*>(from) + (lane + i * LANES < units ? lane + i * LANES : 0));
        all_begun();
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int at = lane + i * LANES;
            m.tables[at] = some[i];
            if (also && at < units) store(also + at, some[i]);
        }
        whose = l, sited = false;
        sync_warp();
    }
    DEVICE void read_step(int l) {
        if (whose == l) return;
        keep_link(link_word(l));
        keep_tables(l, tables().far, nullptr);
    }
    DEVICE void keep_site(const Site& site) {
        sync_warp();
        if (lane == 0) m.site = site;
        sited = true;
        sync_warp();
    }

    // Behind an acquire of its signal, which empties the L1 that the block's workers read through.
    DEVICE void take(int l) {
        const uint64* const its = reinterpret_cast<const uint64*>(shuffle_long(reinterpret_cast<uint64>(signal), l % LANES));
        const uint64 mine = link_word(l), found = load_acquire_system(its);
        all_begun();
        keep_link(mine);
        const Link& k = m.link;
        const uint64 word = together(found), pushed = LORA_SIGNAL_SEQ(word), seq = k.served + 1;
        if (LORA_SIGNAL_EPOCH(word) != (k.epoch & 0xffff) || pushed < seq) return;  // another word than the one that was seen
        if (pushed >= seq + k.depth) {  // beyond its slots
            note(CUT_OFF, l, pushed, 0);
            forget(l);
            return;
        }
        if (lane == 0) confirm(its, word);
        sync_warp();
        const unsigned char* slot = request_slot(seq);
        unsigned char* const far = tables().far;
        keep_tables(l, slot, reinterpret_cast<uint4*>(far));
        const lora_request& h = m.request;
        int why = check_header(h, k.client, k.epoch, seq, s.max_entries);
        tell_all(TAKEN, l, seq, why);
        if (!why && draining) why = DRAINING;
        if (why) {
            refuse(l, seq, why);
            return;
        }
        const RequestParts at(h, 2);
        const unsigned most = s.max_entries;  // of what the tables have room for
        const bool scaled = h.dtype == LORA_E4M3, fits = !scaled || (h.num_rows <= most && is_of_wire(s, h));
        const bool sane = h.num_segments <= most && h.num_entries <= most && fits;
        if (sane && at.rows > NEAR_BYTES) {
            copy_units<uint4>(far + NEAR_BYTES, slot + NEAR_BYTES, static_cast<int>(at.rows - NEAR_BYTES) / 16, lane, LANES);
            sync_warp();
        }
        const uint64 budget = h.budget_us < MAX_BUDGET_US ? h.budget_us : MAX_BUDGET_US, now = together(now_ns());
        if (is_mine(l)) {
            Link& its_link = s.links[l];
            store(&its_link.received, now), store(&its_link.expires, now + budget * 1000);
            store(&its_link.ticket, tickets), store(&its_link.asked, static_cast<int>(NOTHING_ASKED));
            blocked |= bit_of(l);
        }
        if (lane == 0) m.link.received = now, m.link.expires = now + budget * 1000;
        tickets++;
        sync_warp();
        if (lane == 0) store(&s.tickets, static_cast<uint64>(static_cast<unsigned>(tickets)));
        if (!sane) make_ready(l, seq);  // the checks say what is wrong with it
    }
    // The step at hand.
    DEVICE void make_ready(int l, uint64 seq) {
        const uint64 wide = m.request.num_rows > m.request.num_entries ? m.request.num_rows : m.request.num_entries;
        const uint64 rows = wide > m.request.num_out_rows ? wide : m.request.num_out_rows;
        const uint64 had = m.link.had, start = had > share ? had : share;
        const uint64 cost = s.role == FOLLOWS ? 0 : STEP_ROWS + (rows < MOST_ROWS ? rows : MOST_ROWS);  // its age decides there
        if (is_mine(l)) {
            store(&s.links[l].start, start), store(&s.links[l].finish, start + cost);
            blocked &= ~bit_of(l), ready |= bit_of(l);
        }
        sync_warp();
        if (lane == 0) m.link.start = start, m.link.finish = start + cost;
        sync_warp();
        tell_all(READY, l, seq, 0);
    }

    // Whether its client holds what it names, the weights are here, and its leader has numbered it; or its time is over.
    DEVICE void recheck(int l) {
        const Link& k = s.links[l];
        const bool numbered = s.role != FOLLOWS || is_numbered(l);
        if (!numbered && load(&k.asked) == ALL_HERE && !draining && together(now_ns()) < load(&k.expires)) return;
        read_step(l);
        const lora_request& h = m.request;
        const uint64 seq = h.seq, expires = m.link.expires;
        const bool is_site = has_site(s, h);
        const Site site = is_site ? site_of(s, h) : Site();  // on its way beside what is looked up
        const Lacks lacks = is_site ? look_up(s, l, h, tables(), lane) : Lacks();
        keep_site(site);
        if (votes(lacks.foreign)) {
            const uint64 heard = m.link.received + HELD_NS;
            const bool late = together(now_ns()) >= (heard < expires ? heard : expires);
            if (late || draining) refuse(l, seq, late ? NOT_HELD : DRAINING);
            return;
        }
        const unsigned lacking = votes(lacks.weights);
        const int handle = lacking ? shuffle(static_cast<int>(lacks.handle), first_bit(lacking)) : 0;
        if (!lacking && numbered) {
            if (!votes(lacks.unknown)) is_ready = l;
            make_ready(l, seq);
            return;
        }
        const bool late = together(now_ns()) >= expires;
        if (late || draining) {
            refuse(l, seq, !late ? DRAINING : lacking ? TOO_LATE : NOT_NUMBERED);
        } else if (!lacking || (load(&k.asked) != ASKED && note(PREFETCH, l, seq, handle))) {
            if (is_mine(l)) store(&s.links[l].asked, static_cast<int>(lacking ? ASKED : ALL_HERE));
            sync_warp();
        }
    }

    // Of one step that is ready there is nothing to read; -1 where that is not so.
    DEVICE int only_one() {
        const unsigned lanes = votes(ready != 0), its = shuffle(static_cast<int>(ready), lanes ? first_bit(lanes) : 0);
        if (lanes & (lanes - 1) || its & (its - 1) || !lanes) return -1;
        const int l = first_bit(lanes) + LANES * first_bit(its);
        if (l != whose) return -1;
        share = m.link.start;
        return l;
    }
    // The least finish, the oldest of equals: of each lane's, and of those of all lanes.
    DEVICE int pick() {
        const int only = only_one();
        if (only >= 0) return only;
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
        read_step(l);
        const lora_request& h = m.request;
        const uint64 seq = m.link.served + 1;
        if (!sited) keep_site(has_site(s, h) ? site_of(s, h) : Site());
        if (lane == 0) store(&s.share, share);
        if (is_mine(l)) store(&s.links[l].had, m.link.finish);
        int why = check_counts(s, h, m.site, m.link.request_bytes);
        if (!why) why = check_tables(h, m.site, tables(), lane);
        if (!why && lane == 0) write_order(seq);
        if (!why) why = translate(s, h, tables(), turn + 1, is_ready == l, lane);
        if (!why && h.dtype != static_cast<unsigned>(s.dtype)) why = BAD_DTYPE;
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

    DEVICE void write_order(uint64 seq) {
        const Link& k = m.link;
        const lora_request& h = m.request;
        const RequestParts at(h, element_bytes(h));
        const uint64 tables = k.tables;
        Order& o = m.order;
        o.rows = reinterpret_cast<uint64>(request_slot(seq)) + at.rows;
        o.in_map = h.flags & LORA_HAS_IN_MAP ? tables + at.in_map : 0;
        o.out_map = h.flags & LORA_HAS_OUT_MAP ? tables + at.out_map : 0;
        o.weights = h.flags & LORA_HAS_OUT_MAP ? tables + at.weights : 0;
        o.segments = tables + at.segments;
        o.slot = response_slot(k, seq), o.pe = k.pe;
        o.scales = h.dtype == LORA_E4M3 ? tables + at.scales : 0;
        o.answer_scales = reinterpret_cast<uint64>(writable(o.slot, static_cast<int>(o.pe))) + LORA_HEADER_BYTES;
        const uint64 scales_bytes = o.scales ? rounded(4ull * h.num_out_rows, LORA_ALIGN) : 0;
        o.out = o.answer_scales + scales_bytes;
        o.signal = k.response_signal, o.signal_value = LORA_SIGNAL(k.epoch, seq);
        o.num_segments = h.num_segments, o.num_entries = h.num_entries, o.num_out_rows = h.num_out_rows;
        o.row_width = h.in_end - h.in_begin, o.in_begin = h.in_begin, o.in_width = m.site.in_width;
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
        r.received_ns = k.received, r.started_ns = now_ns();
    }

    DEVICE void refuse(int l, uint64 seq, int why) {
        read_step(l);
        answer_refusal(m.link, seq, why, m.response, lane);
        settle(l, seq);
        note(REFUSED, l, seq, why);
    }
    // It is ordered, or refused; the client's next one may come.
    DEVICE void settle(int l, uint64 seq) {
        number_step(l, seq);
        whose = -1;
        if (is_mine(l)) blocked &= ~bit_of(l), ready &= ~bit_of(l), store(&s.links[l].served, seq);
        sync_warp();
    }

    // What lanes read apart may differ: all take what the first one found.
    DEVICE uint64 together(uint64 value) { return shuffle_long(value, 0); }
    DEVICE uint64 shuffle_long(uint64 value, int from) {
        const unsigned low = shuffle(static_cast<int>(value), from), high = shuffle(static_cast<int>(value >> 32), from);
        return static_cast<uint64>(high) << 32 | low;
    }

    // numbers of steps in leader mode: leader.cuh
    DEVICE uint64* numbers_at(uint64 table, int row) const;
    DEVICE uint64 owner_of(int l) const;
    DEVICE int number_at(int l, uint64 seq) const;
    DEVICE static bool is_of(uint64 word, uint64 seq);
    DEVICE void clear_row(int l);
    DEVICE void claim_row(int l);
    DEVICE void claim_rows();
    DEVICE void number_step(int l, uint64 seq);
    DEVICE bool is_numbered(int l);
    DEVICE bool has_row(int l);
    DEVICE void look_from(int l, int first);

    // what it hears from its host, and tells it: mailbox.cuh
    DEVICE bool look_at_mailbox(uint64 launch);
    DEVICE void connect(int l, uint64 word);
    DEVICE void revoke(int l, uint64 its_epoch);
    DEVICE void drain();
    DEVICE bool note(int kind, int l, uint64 seq, uint64 what);
    DEVICE void tell_all(int kind, int l, uint64 seq, uint64 what);
    DEVICE void leave(uint64 launch);
};

#include "leader.cuh"
#include "mailbox.cuh"
