"""What an engine's process runs.

device_link    a client with activations on a device     put       its kernel: tables, rows, signal
cuda_ipc       an engine on a GPU, on one host           imported_twin  GPU memory of a shard, mapped here
link           one whose shard's kernel serves           captured  the same for CUDA graphs
world_link     the same in NVSHMEM's world               links     opens them
"""
