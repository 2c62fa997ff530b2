"""Steps that no host touches: both ends of a link between GPUs, device code and its hosts; see docs/gpu.md.

gpu       a GPU as hosts use it                cuda       a real one
opened    which GPU a device is
needs     what a machine must have for it      slots      the memory of a link
link      an engine's end                      captured   the same for CUDA graphs
world     that processes are in (NVSHMEM)      world_link both ends of a link there
nvshmem   a real GPU there                     nvshmem_build  its device code, linked
connection     a shard's end                   carrier    of a client that a host polls
kernel    the shard's: launched, watched       mailbox    what it and its host tell each other
directory      where it finds weights          places     of experts that differ in shape
layout    what hosts and kernels read and write           source     the kernels' sources
"""
