// The warp that serves while others compute: it finds the next step, checks it, and orders it, one turn ahead of them.
// Its rule and its checks are those of shard/schedule.py and shard/request.py; a lane knows clients
// lane, lane + 32, and so on, up to the last that is here.
#pragma once
#include "answer.cuh"
#include "copy.cuh"

constexpr uint64 STEP_ROWS = LORA_STEP_ROWS, MOST_ROWS = LORA_MOST_ROWS, AHEAD_ROWS = LORA_AHEAD_ROWS;  // shard/schedule.py
constexpr uint64 ROW_NS = 32;  // that a row takes, roughly: what a deadline has to spare for it
constexpr int MAILBOX_SCANS = 32;       // a look at host memory costs a microsecond
constexpr uint64 MAX_BUDGET_US = LORA_MAX_BUDGET_US;
constexpr uint64 HELD_NS = 5'000'000'000;  // within which a shard hears of adapters, and what its clients hold
constexpr uint64 WEIGHTS_NS = LORA_WEIGHTS_NS;  // for which a client's steps wait for weights: shard/patience.py

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
    uint64 turn, done, taken, noted, active, share;  // share: of the only tenant, the least start of its ready steps
    int rounds = 0;  // of LANES clients, up to the last that is here
    int whose = -1;      // step is in m; -1: no client's
    bool sited = false;  // so is its site
    int is_ready = -1;   // whose step was found to lack nothing, in this scan
    int tickets;
    bool draining, several;  // several: tenants

    DEVICE Poller(Serve& serve, PollerMemory& memory, int its_lane) : s(serve), m(memory), lane(its_lane), links(serve.links) {
        for (int l = lane; l < s.num_links; l += LANES)
            if (load_l2(&s.links[l].epoch)) here |= bit_of(l);
        rounds = s.num_links / LANES;
        forget_rounds();
        turn = load_l2(&s.turn), done = load_l2(&s.done), taken = load_l2(&s.taken), noted = load_l2(&s.noted);
        tickets = static_cast<int>(load_l2(&s.tickets)), share = load_l2(&s.tenants->share);
        draining = load_l2(&s.draining), several = load_l2(&s.several);
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
            store(&its_link.start_by, h.step_class == LORA_DECODE && k.step_ns ? now + k.step_ns - ROW_NS * cost() : 0);
            blocked |= bit_of(l);
        }
        if (lane == 0) m.link.received = now, m.link.expires = now + budget * 1000;
        tickets++;
        sync_warp();
        if (lane == 0) store(&s.tickets, static_cast<uint64>(static_cast<unsigned>(tickets)));
        if (!sane) make_ready(l, seq);  // the checks say what is wrong with it
    }
    // Of the step at hand.
    DEVICE uint64 cost() const {
        const uint64 wide = m.request.num_rows > m.request.num_entries ? m.request.num_rows : m.request.num_entries;
        const uint64 rows = wide > m.request.num_out_rows ? wide : m.request.num_out_rows;
        return STEP_ROWS + (rows < MOST_ROWS ? rows : MOST_ROWS);
    }
    // The step at hand.
    DEVICE void make_ready(int l, uint64 seq) {
        const uint64 least = several ? load(&s.tenants[m.link.tenant].share) : share;
        const uint64 had = m.link.had, start = had > least ? had : least;
        const uint64 finish = start + (s.role == FOLLOWS ? 0 : cost());  // its age decides there
        if (is_mine(l)) {
            store(&s.links[l].start, start), store(&s.links[l].finish, finish);
            blocked &= ~bit_of(l), ready |= bit_of(l);
        }
        sync_warp();
        if (lane == 0) m.link.start = start, m.link.finish = finish;
        sync_warp();
        tell_all(READY, l, seq, s.tells_all ? load(&s.links[l].start_by) : 0);
    }
    // For how long the client's earlier steps have waited for weights, without what it regained since.
    DEVICE uint64 used_ns() const {
        const uint64 regained = m.link.received - m.link.waited_at;
        return m.link.waited > regained ? m.link.waited - regained : 0;
    }
    // Until when the step at hand waits for weights: its refusal reaches a client before the client's own deadline.
    DEVICE uint64 patience_ends() const {
        const uint64 of_budget = (m.link.expires - m.link.received) / 10 * 9, used = used_ns();
        const uint64 of_client = used < WEIGHTS_NS ? WEIGHTS_NS - used : 0;
        const bool waits = m.request.flags & LORA_WAITS_FOR_WEIGHTS || of_budget < of_client;
        return m.link.received + (waits ? of_budget : of_client);
    }
    // The step at hand waits for weights no more.
    DEVICE void note_wait(int l) {
        if (load(&s.links[l].asked) != ASKED) return;
        const uint64 now = together(now_ns()), waited = used_ns() + now - m.link.received;
        if (is_mine(l)) store(&s.links[l].waited, waited), store(&s.links[l].waited_at, now);
        sync_warp();
    }

    // Whether what it names is known here, its client holds that, the weights are here, and its leader has numbered it; or its time is over.
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
        const bool foreign = votes(lacks.foreign), untold = votes(lacks.untold);
        if (foreign || untold) {
            const uint64 heard = m.link.received + HELD_NS;
            const bool late = together(now_ns()) >= (heard < expires ? heard : expires);
            if (late || draining) refuse(l, seq, !late ? DRAINING : foreign ? NOT_HELD : UNKNOWN_ADAPTER);
            return;
        }
        const unsigned lacking = votes(lacks.weights);
        const int handle = lacking ? shuffle(static_cast<int>(lacks.handle), first_bit(lacking)) : 0;
        if (!lacking && numbered) {
            note_wait(l);
            if (!votes(lacks.unknown)) is_ready = l;
            make_ready(l, seq);
            return;
        }
        const bool late = together(now_ns()) >= (lacking ? patience_ends() : expires);
        if (late || draining) {
            note_wait(l);
            refuse(l, seq, !late ? DRAINING : lacking ? NOT_LOADED : NOT_NUMBERED, handle);
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
    // A ready step of a client. The least key goes first, the oldest of equals.
    struct Candidate { int link, age; uint64 key; };
    DEVICE static void offer(Candidate& best, int link, int age, uint64 key) {
        if (best.link < 0 || goes_first(key, age, best.key, best.age)) best = {link, age, key};
    }
    DEVICE static bool goes_first(uint64 key, int age, uint64 than, int its) {
        return key < than || (key == than && is_older(age, its));
    }
    DEVICE static bool is_older(int age, int its) {
        return static_cast<int>(static_cast<unsigned>(age) - static_cast<unsigned>(its)) < 0;
    }
    // Of those that lanes have found; `least` becomes the least of theirs. No client where none has found one.
    DEVICE Candidate first_of_lanes(const Candidate& mine, uint64& least) {
        Candidate best = {-1, 0, 0};
        const uint64 its_least = least;
        for (unsigned lanes = votes(mine.link >= 0); lanes; lanes &= lanes - 1) {
            const int from = first_bit(lanes);
            const uint64 other = shuffle_long(its_least, from);
            if (best.link < 0 || other < least) least = other;
            offer(best, shuffle(mine.link, from), shuffle(mine.age, from), shuffle_long(mine.key, from));
        }
        return best;
    }
    // The next step of one tenant, whose clients are `its` of the lane, or -1; `least`: the least start of its ready steps.
    // The least finish; but what has a deadline, and is not far ahead of its share, goes first, by its deadline.
    DEVICE int first_of(unsigned its, uint64& least) {
        int fair = -1;
#pragma unroll 1
        for (bool urgent = false;; urgent = true) {
            Candidate mine = {-1, 0, 0};
            bool has_class = false;
            uint64 begins = ~0ull;
            for (unsigned left = its; left; left &= left - 1) {
                const int l = lane + LANES * first_bit(left);
                const uint64 begin = load(&links[l].start), finish = load(&links[l].finish), start_by = load(&links[l].start_by);
                begins = begin < begins ? begin : begins;
                has_class |= start_by != 0;
                if (!urgent || (start_by && finish <= least + AHEAD_ROWS)) offer(mine, l, load(&links[l].ticket), urgent ? start_by : finish);
            }
            const int found = first_of_lanes(mine, begins).link;
            if (urgent) return found >= 0 ? found : fair;
            fair = found, least = begins;
            if (!votes(has_class)) return fair;
        }
    }
    // Those of `some` that are clients of a tenant.
    DEVICE unsigned of_tenant(uint64 tenant, unsigned some) const {
        unsigned its = 0;
        for (; some; some &= some - 1)
            if (load(&links[lane + LANES * first_bit(some)].tenant) == tenant) its |= some & ~(some - 1);
        return its;
    }
    // Of each tenant's first step the one whose tenant would have had the least behind it, by its weight.
    // Few registers are left beside clients' blocks (kernels_cuda/residency.py), so `first_of` has one caller.
    DEVICE int pick() {
        const int only = several ? -1 : only_one();
        if (only >= 0) return only;
        int best = -1, best_age = 0;
        const double tenants_share = load(&s.tenants_share);
        double best_end = 0, now = tenants_share;
        unsigned left = ready;
        for (unsigned lanes = votes(left); lanes; lanes = votes(left)) {
            const int any = shuffle(lane + LANES * first_bit(left), first_bit(lanes));
            const uint64 tenant = several ? load(&links[any].tenant) : 0;
            const unsigned its = several ? of_tenant(tenant, left) : left;
            left &= ~its;
            uint64 least;
            const int first = first_of(its, least), age = load(&links[first].ticket);
            if (!several) {
                share = least;
                return first;
            }
            const double before = load(&s.tenants[tenant].had), had = before < tenants_share ? tenants_share : before;
            const double end = had + rows_of(first) * load(&links[first].slowness);
            if (best < 0 || had < now) now = had;
            if (best < 0 || end < best_end || (end == best_end && is_older(age, best_age))) best = first, best_age = age, best_end = end;
            sync_warp();
            if (lane == 0) store(&s.tenants[tenant].had, had), store(&s.tenants[tenant].share, least);
            sync_warp();
        }
        if (lane == 0 && best >= 0) store(&s.tenants_share, now);
        sync_warp();
        return best;
    }
    // That the client's ready step costs.
    DEVICE double rows_of(int l) const { return static_cast<double>(load(&links[l].finish) - load(&links[l].start)); }
    // The client, and its tenant, for the step at hand.
    DEVICE void charge(int l) {
        const Link& k = m.link;
        if (is_mine(l)) store(&s.links[l].had, k.finish);
        Tenant& its = s.tenants[several ? k.tenant : 0];
        const double cost = static_cast<double>(k.finish - k.start) * k.slowness;
        if (lane == 0 && several) store(&its.had, load(&its.had) + cost);
        if (lane == 0 && !several) store(&its.had, cost), store(&its.share, share);  // ahead of one that comes by its last step
    }

    DEVICE void order(int l) {
        read_step(l);
        const lora_request& h = m.request;
        const uint64 seq = m.link.served + 1;
        if (!sited) keep_site(has_site(s, h) ? site_of(s, h) : Site());
        charge(l);
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

    DEVICE void refuse(int l, uint64 seq, int why, int handle = 0) {
        read_step(l);
        answer_refusal(m.link, seq, why, handle, m.response, lane);
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
