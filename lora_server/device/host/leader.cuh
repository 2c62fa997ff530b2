// Leader mode: the leader of a stage numbers its clients' steps, and its followers serve the least number first. Members
// of Poller.
//
// A follower has a table that its leader alone stores to, a row for each of the leader's links: its client, then numbers,
// each behind the low half of its step's seq. A client pushes every step of the stage to each of its shards, as the same
// seq. What one shard has answered it follows up there while others still owe as many answers as they have slots, but no
// further: so with room for twice as many a number is overwritten when its step was answered here, or is its client's no
// more. A table is one leader's: the next one gets another, of zeros.

DEVICE uint64* Poller::numbers_at(uint64 table, int row) const {
    return reinterpret_cast<uint64*>(table) + static_cast<int64>(row) * s.row_words;
}
DEVICE uint64 Poller::owner_of(int l) const {
    const Link& k = s.links[l];
    return load(&k.client) << 32 | (load(&k.epoch) & 0xffffffff);
}
DEVICE int Poller::number_at(int l, uint64 seq) const { return 1 + static_cast<int>(seq % (2 * load(&s.links[l].depth))); }
DEVICE bool Poller::is_of(uint64 word, uint64 seq) { return word >> 32 == (seq & 0xffffffff); }

// -- the leader's; a lane tells one follower

// A client's row is empty before it is its.
DEVICE void Poller::clear_row(int l) {
    if (s.role != LEADS) return;
    const uint64 table = load_l2(s.followers + lane);
    for (int i = 1; table && i < s.row_words; i++) store_system(numbers_at(table, l) + i, 0ull);
    claim_row(l);
}
DEVICE void Poller::claim_row(int l) {
    const uint64 table = load_l2(s.followers + lane);
    if (table) store_release_system(numbers_at(table, l), owner_of(l));
    sync_warp();
}
// A follower that came since the last launch has a table of zeros.
DEVICE void Poller::claim_rows() {
    for (int first = 0; s.role == LEADS && first < rounds * LANES; first += LANES)
        for (unsigned its = votes(here & bit_of(first)); its; its &= its - 1) claim_row(first + first_bit(its));
}
// A step is ordered here, or refused. A reader of its number sees the row's client, too.
DEVICE void Poller::number_step(int l, uint64 seq) {
    if (s.role != LEADS) return;
    const uint64 table = load_l2(s.followers + lane), number = (load_l2(&s.number) + 1) & 0xffffffff;
    if (table) store_release_system(numbers_at(table, l) + number_at(l, seq), seq << 32 | number);
    sync_warp();
    if (lane == 0) store(&s.number, number);
    sync_warp();
}

// -- a follower's

// Whether a client's oldest step has a number, which is its age from then on. All lanes call it.
DEVICE bool Poller::is_numbered(int l) {
    if (!s.numbers || !has_row(l)) return false;
    const uint64 seq = next_seq(l);
    const uint64* row = numbers_at(s.numbers, load(&s.links[l].row));
    const uint64* at = row + number_at(l, seq);
    uint64 word = together(load_system(at));
    if (is_of(word, seq)) word = together(load_acquire_system(at));
    if (!is_of(word, seq) || together(load_system(row)) != owner_of(l)) return false;
    if (is_mine(l)) store(&s.links[l].ticket, static_cast<int>(word));
    sync_warp();
    return true;
}
// Its client's, as far as it was found: each call looks at LANES of them.
DEVICE bool Poller::has_row(int l) {
    const int row = load(&s.links[l].row), first = ~row;
    if (row >= 0) return true;
    const unsigned found = votes(load_acquire_system(numbers_at(s.numbers, first + lane)) == owner_of(l));
    look_from(l, found ? ~(first + first_bit(found)) : (first + LANES) % MAX_LINKS);
    return found;
}
DEVICE void Poller::look_from(int l, int first) {
    if (is_mine(l)) store(&s.links[l].row, ~first);
    sync_warp();
}
