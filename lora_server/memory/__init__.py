"""Where a shard's adapter weights live, and how they get there (docs/memory.md).

store      adapters of a shard: known, loaded, pinned by steps, evicted, dropped; its thread is the loader
entry      one adapter and the states of its layers      manifest  where in its memory each block lies
loading    from files to memory, layer by layer          eviction  who makes room, and for whom
preload    what fills idle memory
fetching   files from far, to the disk cache
pools      bytes that are handed out and taken back      formats   how a block's weights lie in them
pins       what steps read now
mapped     a pool of the operating system's pages        pages     a pool of 2 MiB pages, on a GPU or pinned
tier       the memory that steps read                    on_cpu    as tensors, for the CPU kernels
paged      as tiles in pages, for the CUDA kernels       directory where in the pages each block begins
"""
