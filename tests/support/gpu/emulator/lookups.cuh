// What the poller asks of one step's tables, and how many trips to memory each question took its first lane.
#pragma once

struct Lookups { int checked, checked_in, foreign, missing, looked_up_in, translated, translated_in, unused; };

// One warp. tables: header, segments and maps.
extern "C" __global__ void lookups(Serve* serve, unsigned char* tables, int64 link, int64 turn, Lookups* out) {
    const int lane = threadIdx.x;
    const lora_request& h = *reinterpret_cast<const lora_request*>(tables);
    Lookups found = {};
    auto trips = [at = current->trips]() mutable {
        const unsigned before = at;
        at = current->trips;
        return static_cast<int>(at - before);
    };
    found.checked = check_tables(*serve, h, tables, lane), found.checked_in = trips();
    const Lacks lacks = look_up(*serve, static_cast<int>(link), h, tables, lane);
    found.looked_up_in = trips();
    const unsigned lacking = votes(lacks.weights);
    found.foreign = votes(lacks.foreign) != 0;
    found.missing = shuffle(static_cast<int>(lacks.handle), lacking ? first_bit(lacking) : 0);
    if (!found.checked) found.translated = translate(*serve, h, tables, turn, lane), found.translated_in = trips();
    if (lane == 0) *out = found;
}
