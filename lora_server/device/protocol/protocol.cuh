// What a shard's kernel keeps of its clients, and what it and its host tell each other. Mirrored by layout.py;
// codes.cuh is made of codes.py.
// Addresses are those of the GPU that reads the struct.
#pragma once
#include "codes.cuh"
#include "slot.h"
#include "step.cuh"

constexpr int MAX_LINKS = LORA_MAX_LINKS;
constexpr int ORDERS = LORA_ORDERS;
constexpr int COMMANDS = LORA_COMMANDS, COMMAND_WORDS = 16, NOTES = LORA_NOTES;

// A client as the shard's kernel knows it. The words up to `step_ns` come with CONNECT; the poller alone writes the rest.
struct alignas(128) Link {
    uint64 epoch;  // 0: no client
    uint64 client, depth;
    uint64 request_slots, request_signal, request_bytes;     // here
    uint64 response_slots, response_signal, response_bytes;  // the client's
    uint64 tables;  // here: header, segments and maps of its oldest step, copied before they are looked at
    uint64 pe;      // the client's: see peer.cuh
    uint64 tenant;    // whose client it is: an index of `tenants`
    double slowness;  // 1 / its weight
    uint64 step_ns;   // within which a decode step should be answered, by the client's SLO class; 0: none
    uint64 served;  // the newest step that was ordered or refused
    uint64 had;     // where its share stands: shard/schedule.py
    uint64 busy;    // the turn of its newest order
    // of its oldest step, as long as the poller has it
    uint64 received, expires, start, finish;  // the last two in its share: before the step, and behind it
    uint64 start_by;                          // its deadline - cost; 0: it has none
    int ticket, asked;
    int row, unused_too;  // a follower's: where its leader's numbers are; below 0: not found yet. See leader.cuh
    uint64 waited, waited_at;  // for weights, so long and until then: shard/patience.py
    uint64 unused[6];
};
// Where a tenant's share stands among others', and its clients' among each other: shard/schedule.py.
struct alignas(16) Tenant { double had; uint64 share; };
constexpr int CONNECT_WORDS = LORA_CONNECT_WORDS;
enum Asked { NOTHING_ASKED, ASKED, ALL_HERE };  // the host for weights; whether there is no need to

// The weights of (handle, site). A copy engine sets `ready` behind the pages, in stream order.
struct alignas(32) Entry {
    uint64 ready;         // == generation: the pages are there; GONE | the generation of an adapter that was dropped
    unsigned generation;  // of the adapter that has the handle's index now
    int row, first_tile, tiles_each;  // or, with UNEVEN tiles each, first_tile is where the experts' places begin
    int first_expert, end_expert;  // that are here
};
constexpr int UNEVEN = LORA_UNEVEN, HANDLE_BITS = LORA_HANDLE_BITS;
constexpr uint64 GONE = 1ull << LORA_GONE_BIT;

struct alignas(16) Site { int in_width, out_width, experts, unused; };

// One step, checked and translated, for all blocks.
struct alignas(128) Order {
    uint64 rows, in_map, out_map, weights, segments, out, signal, signal_value;
    int num_segments, num_entries, num_out_rows, unused;
    int row_width, in_begin, in_width, out_width;
    int num_windows, begin0, end0, begin1;
    int end1, begin2, end2, unused2;
    uint64 slot, nbytes, pe, answer_scales;  // of the answer
    uint64 scales, more[3];  // of the rows, where these are codes; else 0
    uint4 header[8];  // of the response
};

// In host memory. The host writes the first part, the kernel the second.
struct Command { uint64 kind, link, words[14]; };  // words: CONNECT's Link; REVOKE's epoch
struct Note { uint64 kind, link, seq, what; };     // what: a handle, a refusal
struct alignas(128) Mailbox {
    uint64 posted, heard, abort, unused[13];
    Command commands[COMMANDS];
    uint64 taken, noted, turn, done, beat_ns, left, more[10];
    uint64 acks[COMMANDS];  // the turn after which a command holds
    Note notes[NOTES];
};

struct alignas(128) Serve {
    // set before the kernel is launched
    Link* links;
    Order* orders;
    const Entry* directory;  // [num_handles, num_layers * num_projections]
    const Site* sites;
    const Block* blocks;
    Mailbox* mailbox;
    float *partial, *v, *delta;
    int* groups;
    uint64* arrivals;
    uint64 idle_ns;
    const unsigned* held;  // [num_links, num_handles]: see is_held; null while its host keeps no such table
    uint64* used;  // [num_handles]: the newest turn that read it; null while its host does not ask
    const int* places;  // [.., 2]: block and first tile of each expert, where those of a site differ in shape
    void* results;  // [max_entries, widest] 16-bit, before they become codes; null where rows travel as they are
    const uint64* followers;  // [LANES]: a leader's, where each has its table; 0: none
    uint64 numbers;  // a follower's table; 0 while it has no leader
    float* other_partial;  // of every second turn: some blocks may read one turn's while others write the next one's
    Tenant* tenants;  // [MAX_TENANTS]
    int max_entries, max_rank, table_bytes, dtype;  // dtype: of rows that travel
    int num_handles, num_layers, num_projections, tells_all;  // tells_all: notes of every decision, for tests
    int num_links;  // there is room for: 32, 64 ... MAX_LINKS
    int role, row_words;  // of a table of numbers
    // the kernel's, kept from one launch to the next
    alignas(128) uint64 turn;  // the newest order's
    uint64 left;               // the last launch whose poller has left
    alignas(128) uint64 done;  // the newest turn that was answered
    uint64 sent;               // blocks that have sent their part, ever
    uint64 tickets, several, draining, taken, noted;  // several: there were clients of more than one tenant
    uint64 number;  // the newest
    double tenants_share;  // the least of those that were ready
};
