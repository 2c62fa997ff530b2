"""Memory of a shard's adapter weights, and how they are loaded into it (docs/memory.md).

store      the facade that steps use: pin, gather, prefetch
adapters   commands: register, load, keep, drop         report     what is where
table      the adapters that a shard knows              entry      one of them, why it is loaded, its layers' states
load_queue entries in the order of their urgency
planner    chooses what to load next, forecasts when    loader     the thread that loads it
fetching   remote files, to the disk cache              lock       of the store; answers wait for its release
layers     from files to memory, layer by layer
preload    what fills idle memory                       pins       what steps read now
evictor    reserves memory, and evicts for it, but not what clients hold or pinned
eviction   the policies: which entries are evicted      manifest   where in its memory each block lies
pools      bytes that are allocated and freed           formats    how a block's weights lie in them
mapped     a pool of the operating system's pages       pages      a pool of 2 MiB pages, on a GPU or pinned
tier       the memory that steps read                   on_cpu     as tensors, for the CPU kernels
paged      as tiles in pages, for the CUDA kernels      directory  where in the pages each block begins
resident   the same for a kernel that looks blocks up by itself
"""
