"""The side of a device's links that an engine's process runs.

links     opens links                                    put       the put kernel: tables, rows, signal
steps     arguments of a link's puts                     cuda_ipc  a link to a shard that its host serves,
                                                                   its GPU memory is mapped here
link      a link to a shard that a kernel serves         ends      its ends: on this host, or in NVSHMEM's world
state     its state block, and waits for answers         captured  its use in CUDA graphs
"""
