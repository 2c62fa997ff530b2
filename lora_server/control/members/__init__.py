"""Members: the shards and clients of a server.

shards     shards that are up, commands to them     agreement  settings that all nodes must share
leases     clients, and when their leases expire    world      places of processes in NVSHMEM's world
ranks      leases of nodes that choose no rank  nodes      those that are connected, and their layouts
twins      connections to shards of which another replica has the same
"""
