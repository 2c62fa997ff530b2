"""The server on a GPU: steps that no host touches, device code and its hosts; see docs/gpu.md.

protocol  layout of mailboxes and slots, a GPU and its memory: what both sides need
client    what an engine's process runs: links, and the kernels that put steps and add deltas
host      what a shard's process runs: the kernel that serves, its mailbox, its clients' memory
nvshmem   the world of GPUs that reach each other beyond one host
"""
