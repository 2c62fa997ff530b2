"""What a shard's process runs.

kernel      the shard's kernel: launched, watched        mailbox     what it and its host tell each other
directory   where it finds weights                       places      of experts that differ in shape
connection  a shard's end of a link                      carrier     that of a client that a host polls
world_connection  a shard's end in NVSHMEM's world       device_memory  GPU memory for clients' rows
"""
