// What the poller hears from its host, and tells it: members of Poller.

// Whether to go on. All lanes call it.
DEVICE bool Poller::look_at_mailbox(uint64 launch) {
    bool goes_on = true;
    const uint64 posted = together(load_acquire_system(&s.mailbox->posted));
    for (; taken < posted; taken++) {
        const Command& c = s.mailbox->commands[taken % COMMANDS];
        const uint64 word = lane < COMMAND_WORDS ? load_system(reinterpret_cast<const uint64*>(&c) + lane) : 0;
        const uint64 kind = shuffle_long(word, 0), l = shuffle_long(word, 1) % s.num_links;
        if (kind == CONNECT) connect(static_cast<int>(l), word);
        if (kind == REVOKE) revoke(static_cast<int>(l), shuffle_long(word, 2));
        if (kind == DRAIN) drain();
        if (kind == STOP) goes_on = false;
        if (lane == 0) store_system(&s.mailbox->acks[taken % COMMANDS], turn);
        active = together(now_ns());
    }
    if (lane == 0) {
        store(&s.taken, taken);
        store_system(&s.mailbox->turn, turn);
        store_system(&s.mailbox->beat_ns, now_ns());
        store_release_system(&s.mailbox->done, done);
        store_release_system(&s.mailbox->taken, taken);
    }
    sync_warp();
    if (together(load_system(&s.mailbox->abort))) {
        if (lane == 0) store_release(s.arrivals + 1, 1);  // for all blocks
        goes_on = false;
    }
    return goes_on;
}

// Lane 2 + i has word i of the Link.
DEVICE void Poller::connect(int l, uint64 word) {
    if (lane >= 2 && lane < 2 + CONNECT_WORDS) store(reinterpret_cast<uint64*>(s.links + l) + lane - 2, word);
    Link& k = s.links[l];
    if (lane == 0) store(&k.served, 0ull), store(&k.had, 0ull), store(&k.busy, 0ull), store(&k.row, ~0), store(&k.waited, 0ull);
    const uint64 its_epoch = shuffle_long(word, 2);
    sync_warp();
    if (lane == 0 && s.role == FOLLOWS) store(&k.tenant, 0ull), store(&k.step_ns, 0ull);  // its leader decides
    sync_warp();
    if (load(&k.tenant) && !several) {
        several = true;
        if (lane == 0) store(&s.several, 1ull);
        sync_warp();
    }
    if (is_mine(l)) here |= bit_of(l), blocked &= ~bit_of(l), ready &= ~bit_of(l);
    if (rounds <= l / LANES) rounds = l / LANES + 1;
    clear_row(l);
    tell_all(CHANGED, l, 0, its_epoch);
}

// What of it is ordered is answered all the same: its memory stays until that turn is done.
DEVICE void Poller::revoke(int l, uint64 its_epoch) {
    if (together(load(&s.links[l].epoch)) == its_epoch) forget(l);
    tell_all(CHANGED, l, 0, 0);
}

// No new steps: those that wait are refused, those that are ordered end.
DEVICE void Poller::drain() {
    draining = true;
    if (lane == 0) store(&s.draining, 1ull);
    for (int first = 0; first < rounds * LANES; first += LANES)
        for (unsigned waiting = votes((blocked | ready) & bit_of(first)); waiting; waiting &= waiting - 1) {
            const int l = first + first_bit(waiting);
            refuse(l, next_seq(l), DRAINING);
        }
}

// To the host, if it has room; all lanes call it.
DEVICE bool Poller::note(int kind, int l, uint64 seq, uint64 what) {
    if (noted - together(load_system(&s.mailbox->heard)) >= NOTES) return false;
    if (lane == 0) {
        uint64* to = reinterpret_cast<uint64*>(&s.mailbox->notes[noted % NOTES]);
        store(to, static_cast<uint64>(kind)), store(to + 1, static_cast<uint64>(l)), store(to + 2, seq), store(to + 3, what);
        store_release_system(&s.mailbox->noted, noted + 1);
        store(&s.noted, noted + 1);
    }
    noted++;
    sync_warp();
    return true;
}
DEVICE void Poller::tell_all(int kind, int l, uint64 seq, uint64 what) {
    if (s.tells_all) note(kind, l, seq, what);
}

// What is ordered ends first, unless it takes too long.
DEVICE void Poller::leave(uint64 launch) {
    const uint64 deadline = together(now_ns()) + PATIENCE_NS;
    while ((done = together(load_acquire(&s.done))) < turn && !together(load_acquire(s.arrivals + 1)) &&
           together(now_ns()) < deadline)
        pause(100);
    if (lane != 0) return;
    store_release_system(&s.mailbox->done, done);
    store_release(&s.left, launch);
    store_release_system(&s.mailbox->left, launch);
}
