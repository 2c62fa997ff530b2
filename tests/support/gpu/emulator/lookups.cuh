// What the poller asks of one step's tables, and how many trips to memory each question took its first lane.
#pragma once

struct Lookups { int checked, checked_in, untold, foreign, missing, looked_up_in, translated, translated_in; };

// One warp. memory: header, segments and maps.
extern "C" __global__ void lookups(Serve* serve, unsigned char* memory, int64 link, int64 turn, Lookups* out) {
    const int lane = threadIdx.x;
    SHARED_MEMORY(shared);
    uint4* const near = reinterpret_cast<uint4*>(shared);
    for (int i = lane; i < NEAR_BYTES / 16; i += LANES) near[i] = load_l2(reinterpret_cast<const uint4*>(memory) + i);
    sync_warp();
    const Tables tables = {near, memory};
    const lora_request& h = *reinterpret_cast<const lora_request*>(near);
    const Site site = has_site(*serve, h) ? site_of(*serve, h) : Site();
    all_begun();
    Lookups found = {};
    auto trips = [at = current->trips]() mutable {
        const unsigned before = at;
        at = current->trips;
        return static_cast<int>(at - before);
    };
    found.checked = check_tables(h, site, tables, lane), found.checked_in = trips();
    const Lacks lacks = look_up(*serve, static_cast<int>(link), h, tables, lane);
    found.looked_up_in = trips();
    const unsigned lacking = votes(lacks.weights), ready = !lacking && !votes(lacks.unknown);
    found.foreign = votes(lacks.foreign) != 0, found.untold = votes(lacks.untold) != 0;
    found.missing = shuffle(static_cast<int>(lacks.handle), lacking ? first_bit(lacking) : 0);
    if (!found.checked) found.translated = translate(*serve, h, tables, turn, ready, lane), found.translated_in = trips();
    if (lane == 0) *out = found;
}
