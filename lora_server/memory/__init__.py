"""Where a shard's adapter weights live, and how they get there (docs/memory.md).

store      adapters of a shard: known, loaded, pinned by steps, evicted, dropped
filling    its thread, the loader                        loading   from files to memory, layer by layer
fetching   files from far, to the disk cache             preload   what fills idle memory
turns      who comes next                                room      who has memory, and gets some
eviction   who makes room, and for whom                  pins      what steps read now
entry      one adapter and the states of its layers      manifest  where in its memory each block lies
pools      bytes that are handed out and taken back      formats   how a block's weights lie in them
mapped     a pool of the operating system's pages        pages     a pool of 2 MiB pages, on a GPU or pinned
tier       the memory that steps read                    on_cpu    as tensors, for the CPU kernels
paged      as tiles in pages, for the CUDA kernels       directory where in the pages each block begins
resident   the same for a kernel that finds them itself   use      what a store says of itself
"""
