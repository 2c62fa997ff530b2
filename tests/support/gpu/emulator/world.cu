// Both ends' kernels in one world.
#include "serve.cu"
#include "link.cu"
#include "lookups.cuh"
#include <cstddef>

#define FIELD(TYPE, NAME) #TYPE "." #NAME, static_cast<int>(offsetof(TYPE, NAME))
struct Named { const char* name; int value; };
inline const Named NAMED[] = {
    {"Client", sizeof(Client)}, {"Link", sizeof(Link)}, {"Tenant", sizeof(Tenant)}, {"Entry", sizeof(Entry)}, {"Site", sizeof(Site)},
    {"Order", sizeof(Order)}, {"Command", sizeof(Command)}, {"Note", sizeof(Note)}, {"Mailbox", sizeof(Mailbox)},
    {"Serve", sizeof(Serve)}, {"shared", sizeof(ServeMemory)},
    {FIELD(Client, response_slots)}, {FIELD(Client, pushed)}, {FIELD(Client, budget_ns)}, {FIELD(Client, arrived)},
    {FIELD(Client, status)}, {FIELD(Client, abort)}, {FIELD(Client, live)}, {FIELD(Client, failed)}, {FIELD(Link, tables)}, {FIELD(Link, served)},
    {FIELD(Entry, row)}, {FIELD(Entry, end_expert)}, {FIELD(Mailbox, commands)}, {FIELD(Mailbox, taken)},
    {FIELD(Mailbox, done)}, {FIELD(Mailbox, left)}, {FIELD(Mailbox, acks)}, {FIELD(Mailbox, notes)},
    {FIELD(Serve, arrivals)}, {FIELD(Serve, idle_ns)}, {FIELD(Serve, held)}, {FIELD(Serve, used)}, {FIELD(Serve, places)}, {FIELD(Serve, max_entries)}, {FIELD(Serve, dtype)},
    {FIELD(Link, step_ns)}, {FIELD(Link, had)}, {FIELD(Serve, tenants)}, {FIELD(Serve, several)}, {FIELD(Serve, tenants_share)}, {FIELD(Serve, num_links)}, {FIELD(Serve, followers)}, {FIELD(Serve, numbers)}, {FIELD(Serve, role)},
    {FIELD(Serve, row_words)}, {FIELD(Serve, number)},
    {FIELD(Serve, tells_all)}, {FIELD(Serve, turn)}, {FIELD(Serve, left)}, {FIELD(Serve, done)},
    {FIELD(Serve, tickets)}, {FIELD(Serve, draining)}, {FIELD(Serve, noted)},
};
extern "C" int layout_of(const char* name) {
    for (const Named& one : NAMED)
        if (!std::strcmp(one.name, name)) return one.value;
    return -1;
}
extern "C" const char* layout_name(int i) { return i < static_cast<int>(sizeof(NAMED) / sizeof(Named)) ? NAMED[i].name : nullptr; }
