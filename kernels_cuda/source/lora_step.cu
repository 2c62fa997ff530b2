// One LoRA step in one launch. Semantics: kernels_cuda/ops.py; how: lora_step.cuh.
#include "lora_step.cuh"

// If a barrier fails, the kernel's error is all that its launcher learns of it.
template <class T, int PHASES> DEVICE void run_alone(const Args& a, BlockMemory& memory) {
    Ring ring(memory.warps[threadIdx.x / LANES], threadIdx.x % LANES);
    if (!lora_step<T, PHASES>(a, memory, ring)) stop();
}

// Arguments are all 64 bits wide. Grid: any, launched cooperatively. Shared memory: sizeof(BlockMemory).
#define KERNEL(NAME, T, PHASES)                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                           \
        NAME(const void* rows, const int* in_map, const int* out_map, const float* weights, const Segment* segments,   \
             const Block* blocks, const int* counts, void* out, float* partial, float* v, float* delta, int* groups,   \
             uint64* arrivals, int64 max_entries, int64 max_rank, int64 row_width, int64 in_begin, int64 in_width,     \
             int64 out_width, int64 num_windows, int64 begin0, int64 end0, int64 begin1, int64 end1, int64 begin2,     \
             int64 end2) {                                                                                             \
        SHARED_MEMORY(shared);                                                                                         \
        const Args a = {rows, in_map, out_map, weights, segments, blocks, counts, out, partial, v, delta, groups,      \
                        arrivals, int(max_entries), int(max_rank), int(row_width), int(in_begin), int(in_width),       \
                        int(out_width), int(num_windows), int(begin0), int(end0), int(begin1), int(end1),              \
                        int(begin2), int(end2)};                                                                       \
        run_alone<T, PHASES>(a, *reinterpret_cast<BlockMemory*>(shared));                                              \
    }

KERNEL(lora_step_bfloat16, Bf16, FUSED)
KERNEL(lora_step_float16, Fp16, FUSED)
KERNEL(shrink_bfloat16, Bf16, SHRINK_ONLY)
KERNEL(shrink_float16, Fp16, SHRINK_ONLY)
KERNEL(expand_bfloat16, Bf16, EXPAND_ONLY)
KERNEL(expand_float16, Fp16, EXPAND_ONLY)
