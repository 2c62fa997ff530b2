// Runs a kernel's whole grid on this CPU; see ptx.cuh. Built with the kernel's source on the command line (-include).
#include <tuple>

namespace {

constexpr size_t STACK_BYTES = 256 * 1024;
void (*body)();

void thread_main() {
    body();
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

template <class... A, size_t... I> void call(void (*kernel)(A...), const int64* arguments, std::index_sequence<I...>) {
    kernel(((A)(arguments[I]))...);
}

template <class... A> void call(void (*kernel)(A...), const int64* arguments) {
    call(kernel, arguments, std::index_sequence_for<A...>{});
}

const int64* arguments;

}  // namespace

#define ENTRY(NAME) \
    if (!std::strcmp(name, #NAME)) body = [] { call(NAME, arguments); };

extern "C" int run(const char* name, int grid, int late, const int64* kernel_arguments) {
    body = nullptr;
    ENTRY(lora_step_bfloat16) ENTRY(lora_step_float16) ENTRY(shrink_bfloat16) ENTRY(shrink_float16)
    ENTRY(expand_bfloat16) ENTRY(expand_float16)
    if (body == nullptr) return -1;
    arguments = kernel_arguments;
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
