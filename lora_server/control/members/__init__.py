"""Members: the shards and clients of a server.

shards     shards that are up, commands to them     agreement  settings that all nodes must share
leases     clients, and when their leases expire    world      places of processes in NVSHMEM's world
ranks      leases of nodes that choose no rank
twins      connections to shards of which another replica has the same
"""
