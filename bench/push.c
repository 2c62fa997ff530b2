/* The floor of a one-way push: memcpy, then a release store of a flag, polled with acquire loads. */
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Returns the time before the copy. */
uint64_t push(char *slot, const char *payload, uint64_t nbytes, _Atomic uint64_t *flag, uint64_t seq) {
    uint64_t began = now_ns();
    memcpy(slot, payload, nbytes);
    atomic_store_explicit(flag, seq, memory_order_release);
    return began;
}

/* Returns the time at which the flag was seen. */
uint64_t take(_Atomic uint64_t *flag, uint64_t seq) {
    while (atomic_load_explicit(flag, memory_order_acquire) < seq)
        ;
    return now_ns();
}
