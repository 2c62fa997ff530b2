"""Where a shard's adapter weights live, and how they get there.

store      the interface, and the states of a layer    loader    one thread, layer by layer, prefetched first
resident   as tensors in host memory (--device cpu)    paged     in pages of a device's pool (--device cuda)
pages      the pool                                    directory  where in the pages each block begins
"""
