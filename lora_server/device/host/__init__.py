"""The side of a device's links that a shard's process runs.

kernel      the shard's kernel: launched, watched        mailbox     its host's commands, and its notes
arguments   its arguments, and clients' holds            directory   the weights that it finds, and the
                                                                     places of experts that differ in shape
carrier     a client's steps, carried by its host
connection  a shard's end of a link                      device_memory  GPU memory for clients' rows
world_connection  a shard's end in NVSHMEM's world
"""
