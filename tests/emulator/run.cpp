// Runs a kernel's whole grid on this CPU; see ptx.cuh. Compiled behind the kernel's source.
#include <utility>

namespace {

#ifndef STACK_BYTES
#define STACK_BYTES (256 * 1024)
#endif
constexpr size_t MAX_ARGUMENTS = 40;
const void* body;
int64 arguments[MAX_ARGUMENTS];  // all are 64 bits wide: a kernel that takes fewer leaves the rest alone

template <size_t... I> void call(std::index_sequence<I...>) {
    reinterpret_cast<void (*)(decltype(I, int64())...)>(const_cast<void*>(body))(arguments[I]...);
}

void thread_main() {
    call(std::make_index_sequence<MAX_ARGUMENTS>());
    current->ended = true;
    yield();
    std::abort();
}

void prepare(Thread& thread) {
    thread.memory.assign(STACK_BYTES, 0xff);
    auto top = reinterpret_cast<uintptr_t>(thread.memory.data() + STACK_BYTES) & ~uintptr_t{63};
    auto* stack = reinterpret_cast<void**>(top);
    *--stack = nullptr;  // as after a call
    *--stack = reinterpret_cast<void*>(thread_main);
    for (int i = 0; i < 6; i++) *--stack = nullptr;
    thread.stack = stack;
}

}  // namespace

extern "C" int run(const void* kernel, int grid, int late, const int64* kernel_arguments, int count) {
    if (count > static_cast<int>(MAX_ARGUMENTS)) return -1;
    body = kernel;
    std::memcpy(arguments, kernel_arguments, count * sizeof(int64));
    copy_late = late;
    gridDim.x = grid;
    block_threads = THREADS;
    std::vector<GridBlock> blocks(grid);
    std::vector<Thread> threads(static_cast<size_t>(grid) * THREADS);
    for (int b = 0; b < grid; b++) {
        blocks[b].shared = static_cast<unsigned char*>(std::aligned_alloc(128, (sizeof(BlockMemory) + 127) / 128 * 128));
        std::memset(blocks[b].shared, 0xff, sizeof(BlockMemory));
        blocks[b].warps.resize(WARPS);
        for (int t = 0; t < THREADS; t++) {
            Thread& thread = threads[static_cast<size_t>(b) * THREADS + t];
            thread.index = t, thread.block_index = b, thread.block = &blocks[b], thread.ended = false;
            prepare(thread);
        }
    }
    for (bool any = true; any;) {
        any = false;
        for (Thread& thread : threads) {
            if (thread.ended) continue;
            any = true;
            current = &thread;
            switch_stack(&scheduler_stack, thread.stack);
        }
    }
    for (GridBlock& block : blocks) std::free(block.shared);
    return copies.empty() ? 0 : -2;
}

extern "C" int shared_bytes() { return static_cast<int>(sizeof(BlockMemory)); }
